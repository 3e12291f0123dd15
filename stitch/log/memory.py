"""EventLog in the memory of one process.

`memory://` is a log of its own; `memory://name` is shared by every handle of this process that names it, and lives as long as
the process does. Handles may sit on different event loops and threads.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from stitch.core.errors import LogDiverged, Unavailable
from stitch.core.ids import Offset
from stitch.log.bell import Bell
from stitch.log.keeping import COMPACTED, RETENTION_MS, check_draft
from stitch.log.port import Bounds, Copies, Draft, EventLog, Reader, Record, Stream

COMPACT_SLACK: Final = 64
"""Superseded pointers that may lie about before a compaction runs by itself."""


def now_ms() -> int:
    """The wall clock, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _offset_of(record: Record) -> int:
    return record.offset


def _time_of(record: Record) -> int:
    return record.time_ms


class _Tape:
    """The records of one stream. Offsets have gaps where compaction took records out; `start` moves by retention only."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.records: list[Record] = []
        self.start = 0
        self.end = 0
        self.last_ms = 0
        self._keys: set[str] = set()

    def append(self, draft: Draft, at_ms: int) -> None:
        self.last_ms = max(self.last_ms, at_ms)
        self.records.append(
            Record(
                stream=self.stream,
                offset=Offset(self.end),
                time_ms=self.last_ms,
                key=draft.key,
                value=bytes(draft.value),
                headers=draft.headers,
            )
        )
        self.end += 1
        if self.stream in COMPACTED:
            self._keys.add(draft.key)
            if len(self.records) > 2 * len(self._keys) + COMPACT_SLACK:
                self.compact()
        elif (kept_ms := RETENTION_MS.get(self.stream)) is not None:
            self._expire(self.last_ms - kept_ms)

    def compact(self) -> None:
        last = {record.key: record for record in self.records}
        self.records = sorted(last.values(), key=_offset_of)

    def _expire(self, before_ms: int) -> None:
        if self.records[0].time_ms < before_ms:
            del self.records[: bisect_left(self.records, before_ms, key=_time_of)]
            self.start = self.records[0].offset

    def read(self, position: int, most: int) -> tuple[Sequence[Record], int]:
        """Records from `position` on, and the position after them."""
        if not self.start <= position <= self.end:
            raise LogDiverged(f"{self.stream}: offset {position} is not in the log, which holds {self.start} to {self.end}")
        first = bisect_left(self.records, position, key=_offset_of)
        found = self.records[first : first + most]
        return found, found[-1].offset + 1 if first + most < len(self.records) else self.end


class _Tapes:
    """What the handles of one log share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tapes = {stream: _Tape(stream) for stream in Stream}
        self.bell = Bell()


_shared: dict[str, _Tapes] = {}
_shared_lock = threading.Lock()


class MemoryLog(EventLog):
    """`name` "" is a log of its own. `clock` gives milliseconds; the log's time never goes back, whatever it says."""

    def __init__(self, name: str = "", *, clock: Callable[[], int] = now_ms) -> None:
        self._name = name
        self._clock = clock
        self._closed = False
        with _shared_lock:
            self._tapes = _shared.setdefault(name, _Tapes()) if name else _Tapes()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def embedded(self) -> bool:
        return True

    async def setup(self, *, create: bool) -> Copies:
        self._check_open()
        return Copies(1, 1)

    async def append(self, stream: Stream, draft: Draft, *, timeout: float | None = None) -> None:
        check_draft(draft)
        self._check_open()
        with self._tapes.lock:
            self._tapes.tapes[stream].append(draft, self._clock())
        self._tapes.bell.ring()

    def compact(self) -> None:
        """Drops superseded pointers now, as the log else does in its own time."""
        with self._tapes.lock:
            for stream in COMPACTED:
                self._tapes.tapes[stream].compact()

    async def bounds(self, stream: Stream) -> Bounds:
        self._check_open()
        with self._tapes.lock:
            tape = self._tapes.tapes[stream]
            return Bounds(start=Offset(tape.start), end=Offset(tape.end))

    async def offset_at(self, stream: Stream, time_ms: int) -> Offset:
        self._check_open()
        with self._tapes.lock:
            tape = self._tapes.tapes[stream]
            place = bisect_left(tape.records, time_ms, key=_time_of)
            return tape.records[place].offset if place < len(tape.records) else Offset(tape.end)

    async def newest(self, stream: Stream) -> Record | None:
        self._check_open()
        with self._tapes.lock:
            records = self._tapes.tapes[stream].records
            return records[-1] if records else None

    async def reader(self, stream: Stream, start: Offset) -> Reader:
        self._check_open()
        return _MemoryReader(self, stream, start)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._tapes.bell.ring()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.url}: closed")

    def _read(self, stream: Stream, position: int, most: int) -> tuple[Sequence[Record], int]:
        self._check_open()
        with self._tapes.lock:
            return self._tapes.tapes[stream].read(position, most)


class _MemoryReader(Reader):
    def __init__(self, log: MemoryLog, stream: Stream, start: Offset) -> None:
        self._log = log
        self._stream = stream
        self._position: int = start
        self._closed = False

    @property
    def position(self) -> Offset:
        return Offset(self._position)

    async def poll(self, timeout: float, max_records: int = 1000) -> Sequence[Record]:
        deadline = time.monotonic() + timeout
        bell = self._log._tapes.bell
        while True:
            if self._closed:
                raise Unavailable(f"{self._log.url}: reader of {self._stream} is closed")
            rings = bell.rings
            found, self._position = self._log._read(self._stream, self._position, max_records)
            remaining = deadline - time.monotonic()
            if found or remaining <= 0:
                return found
            await bell.wait(rings, remaining)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._log._tapes.bell.ring()
