"""Work on several tensors at once, in threads, with their order kept and memory bounded.

Scans, digests and copies of large arrays release the interpreter's lock, so threads do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeVar

from stitch.weights.host import HostTensor
from stitch.weights.parallel import default_threads

WORK_BYTES: Final = 512 * 1024 * 1024
"""Of tensors in work; a larger one is worked on alone."""
_WORTH_KEEPING: Final = 1024 * 1024
"""Smaller buffers are cheap to make."""

R = TypeVar("R")


def in_order(
    tensors: Iterable[HostTensor],
    act: Callable[[HostTensor], R],
    *,
    copy: bool,
    threads: int | None = None,
    room: int = WORK_BYTES,
) -> Iterator[tuple[HostTensor, R]]:
    """Each tensor with what `act` makes of it, in the order of `tensors`. Both are good until the next pair is taken.

    `tensors` is iterated in the caller's own thread, and `act` runs in `threads` others (default: one per core, up to eight).
    `copy` says that a tensor's bytes are only good until the next one is taken: they are copied first.

    Memory: in work, or ready so that no thread waits for the next, is at most one tensor more than threads, of `room` bytes
    together, or a single larger one. Beside them there is the one that was taken and waits for room, and where copies are made,
    up to `room` bytes of idle buffers. An error of `tensors` or of `act` ends it once no thread is at work any more.
    """
    workers = default_threads() if threads is None else threads
    spare = _Buffers(room) if copy else None
    pending: deque[tuple[HostTensor, Future[R]]] = deque()
    held = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="stitch-encode") as pool:

        def finish() -> Iterator[tuple[HostTensor, R]]:
            nonlocal held
            tensor, future = pending.popleft()
            yield tensor, future.result()
            held -= tensor.data.nbytes
            if spare is not None:
                spare.give_back(tensor)

        try:
            for tensor in tensors:
                while pending and (len(pending) > workers or held + tensor.data.nbytes > room):
                    yield from finish()
                mine = tensor if spare is None else spare.copy(tensor)
                held += mine.data.nbytes
                pending.append((mine, pool.submit(act, mine)))
            while pending:
                yield from finish()
        finally:
            for _, future in pending:
                future.cancel()


class _Buffers:
    """Memory for copies, used again: fresh pages cost more than the copy itself. What lies idle is bounded as what is in work."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._free: list[bytearray] = []
        self._used: dict[int, bytearray] = {}

    def copy(self, tensor: HostTensor) -> HostTensor:
        size = tensor.data.nbytes
        buffer = self._take(size)
        view = memoryview(buffer)[:size]
        view[:] = tensor.data
        mine = replace(tensor, data=view.toreadonly())
        self._used[id(mine)] = buffer
        return mine

    def give_back(self, tensor: HostTensor) -> None:
        buffer = self._used.pop(id(tensor))
        if len(buffer) >= _WORTH_KEEPING and sum(map(len, self._free)) + len(buffer) <= self._room:
            self._free.append(buffer)

    def _take(self, size: int) -> bytearray:
        fitting = [buffer for buffer in self._free if size <= len(buffer) <= 2 * size]
        if not fitting:
            return bytearray(size)
        buffer = min(fitting, key=len)
        self._free.remove(buffer)
        return buffer
