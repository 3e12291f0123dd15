"""An object read as ranges, several at once, and given out in order.

A download appends to its file and hashes as it goes, so what an interrupted one leaves is always a beginning of the object: the
file's own length says how far it came, and any later download goes on from there. Lost are at most the ranges that were held.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

from stitch.store.hashing import Stream

RANGE_BYTES: Final = 16 << 20
"""Long enough that a request's round trip costs little, short enough that several can be held."""
RANGES_AT_ONCE: Final = 4
"""Connections of one store's downloads, beside one per download: stores give each some hundred MB/s, and more cost cores."""
RANGES_HELD: Final = 8
"""Being fetched or waiting for their turn, over all downloads of a store: 128 MiB."""

Fetch = Callable[[int, int | None], Stream]
"""`fetch(start, end)`: the object's bytes from `start` to before `end`, or to its end where that is None, and none beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    length: int
    chunks: Future[list[bytes]]


class ReadAhead:
    """The threads and the bound on memory that the downloads of one store share."""

    def __init__(self, *, range_bytes: int = RANGE_BYTES) -> None:
        self._range_bytes = range_bytes
        self._room = threading.Semaphore(RANGES_HELD)
        self._pool = ThreadPoolExecutor(RANGES_AT_ONCE, thread_name_prefix="stitch-s3-get")

    def close(self) -> None:
        """Waits for the requests in hand."""
        self._pool.shutdown(cancel_futures=True)

    def stream(self, fetch: Fetch, start: int, size: int) -> Stream:
        """The object's bytes from `start` on, where it is expected to have `size`; what it has beyond is given out, too.

        Each download fetches the range whose turn it is by itself where none was fetched ahead, so that none ever waits for
        room that others hold.
        """
        spans = deque(self._spans(start, size))
        ahead: deque[_Held] = deque()
        try:
            while spans or ahead:
                held = ahead.popleft() if ahead else None
                first, end = (0, None) if held else spans.popleft()
                self._top_up(fetch, spans, ahead, size)
                if held is None:
                    wanted = (size if end is None else end) - first
                    with contextlib.closing(fetch(first, end)) as chunks:
                        got = yield from _counted(chunks)
                else:
                    wanted = held.length
                    try:
                        got = yield from _counted(held.chunks.result())
                    finally:
                        self._room.release()
                if got < wanted:
                    return  # the object is shorter than expected, and what comes behind is not its continuation
        finally:
            self._drop(ahead)

    def _spans(self, start: int, size: int) -> Iterator[tuple[int, int | None]]:
        """The last is open, so that an object that is longer than expected is noticed."""
        while size - start > self._range_bytes:
            yield start, start + self._range_bytes
            start += self._range_bytes
        yield start, None

    def _top_up(self, fetch: Fetch, spans: deque[tuple[int, int | None]], ahead: deque[_Held], size: int) -> None:
        while spans and len(ahead) < RANGES_AT_ONCE and self._room.acquire(blocking=False):
            first, end = spans.popleft()
            length = (size if end is None else end) - first
            ahead.append(_Held(length=length, chunks=self._pool.submit(_collect, fetch, first, end, length)))

    def _drop(self, ahead: deque[_Held]) -> None:
        for held in ahead:
            held.chunks.cancel()
        wait(held.chunks for held in ahead)
        for _ in ahead:
            self._room.release()


def _counted(chunks: Iterable[bytes]) -> Generator[bytes, None, int]:
    """The chunks; returns how many bytes they were."""
    got = 0
    for chunk in chunks:
        got += len(chunk)
        yield chunk
    return got


def _collect(fetch: Fetch, first: int, end: int | None, length: int) -> list[bytes]:
    """A range in memory; not much more than its length, however long the object turns out to be."""
    found: list[bytes] = []
    got = 0
    with contextlib.closing(fetch(first, end)) as chunks:
        for chunk in chunks:
            found.append(chunk)
            got += len(chunk)
            if got > length:
                break
    return found
