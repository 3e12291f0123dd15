"""The scrub: what was verified once and has rested since, read again while nobody waits for it.

Memory and disks change bits by themselves. A version that is staged by its changes alone carries the rest of the model on unread;
the scrub reads it at the operator's interval, tensor by tensor, and gives way to a staging between any two pieces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from stitch.core.errors import CorruptObject
from stitch.core.manifest import TensorSpec
from stitch.weights.buffers import Buffer
from stitch.weights.digest import add_to_state
from stitch.weights.header import tensor_bytes
from stitch.weights.safetensors import TensorFile
from stitch.weights.verify import EMPTY, check_state, part_sum

STEP_BYTES: Final = 4 * 1024 * 1024
"""Read at a time, a multiple of a word: a millisecond or so, and no more than some hundredths of a second from a cold disk, for
which a staging, or whoever marks one as active, has to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What a scrub found. `active`: the engine was given what lay there, at some moment before or after it was damaged."""

    buffer: str
    active: bool
    what: str


class _Moved(Exception):
    """The buffer was staged into meanwhile, which is no error."""


def scrub_buffer(
    buffer: Buffer, lock: threading.Lock, stopped: Callable[[], bool], damaged: Callable[[Buffer, CorruptObject], None]
) -> None:
    """Reads a buffer once, as it is or becomes meanwhile; `damaged` is called with the lock held where it is not what it should be.

    `lock` is held for a piece at a time, and as long again is rested after each. A buffer that is dirty, or that this process has
    not verified yet, is left alone: it is read before it is used in any case.
    """
    done: set[str] = set()
    while not stopped():
        with lock:
            writes, tensors = buffer.writes, buffer.tensors
        left = [spec for spec in tensors or () if spec.name not in done]
        if not left:
            return
        try:
            for name in _read(buffer, writes, left, lock, stopped):
                done.add(name)
        except _Moved:
            continue
        except CorruptObject as error:
            with lock:
                if buffer.writes != writes:
                    continue
                damaged(buffer, error)
        return


def _read(buffer: Buffer, writes: int, left: list[TensorSpec], lock: threading.Lock, stopped: Callable[[], bool]) -> Iterator[str]:
    """The names of tensors that were read and found right. Raises _Moved once the buffer is another, CorruptObject."""
    with lock:
        if buffer.writes != writes:
            raise _Moved
        buffer.check_header()
        file = TensorFile(buffer.weights)
    with file:
        for spec in left:
            state, size = EMPTY, tensor_bytes(spec.dtype, spec.shape)
            for begin in range(0, size, STEP_BYTES):
                if stopped():
                    return
                started = time.monotonic()
                with lock:
                    if buffer.writes != writes:
                        raise _Moved
                    state = add_to_state(state, part_sum(file.data(spec.name), begin, min(begin + STEP_BYTES, size)))
                time.sleep(time.monotonic() - started)
            check_state(spec, state, f"buffer {buffer.name}")
            yield spec.name
