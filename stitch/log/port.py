"""The port EventLog: four append-only streams of bytes, each with one order.

A log knows nothing of what a record means. Its promises, which one behaviour suite checks on every implementation:

- `append` returns only once the record is durable. When it raises `Unavailable`, the record is not in the log and never will be;
  when it raises `OutcomeUnknown`, it may be there, or land later. Nothing else is raised for a fault of the log.
- Offsets grow, and may have gaps. They order records; they do not identify them (a retried append may land twice), events carry
  ids for that.
- `time_ms` is the log's own clock. It goes back where another broker leads whose clock is behind, and never by a producer's will.
- A reader sees records in order, none twice and none left out, from the offset that it was opened at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

from stitch.core.ids import Offset


class Stream(StrEnum):
    """The streams of a namespace."""

    PUBLICATIONS = "publications"
    """Decisions. Kept for ever: their order is the compare-and-set of Stitch."""
    POINTERS = "pointers"
    """Compacted: the last record of each key stays."""
    ACTIVATIONS = "activations"
    """States of replicas; kept for days."""
    ROLLOUTS = "rollouts"
    """One record per answered request; kept for weeks."""


Headers = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A record to be appended."""

    key: str
    value: bytes
    headers: Headers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record that the log holds."""

    stream: Stream
    offset: Offset
    time_ms: int
    key: str
    value: bytes
    headers: Headers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`start`: the first offset still held; `end`: the one that the next record gets at the earliest."""

    start: Offset
    end: Offset


@dataclass(frozen=True, slots=True)
class Copies:
    """How many copies of each record a log keeps, and how many of them have it before an append returns."""

    kept: int
    acknowledged: int

    def __str__(self) -> str:
        if self.kept == 1:
            return "one copy of each record: a lost disk loses the log"
        return f"{self.kept} copies of each record, {self.acknowledged} of them before an append counts"


class Reader(ABC):
    """Follows one stream. Not safe for concurrent use; cheap to discard and reopen at `position`."""

    @property
    @abstractmethod
    def position(self) -> Offset:
        """The offset from which the next poll reads. Reaches `Bounds.end` once all before it was read, also where the
        stream ends in entries that are no records."""

    @property
    def end(self) -> Offset | None:
        """The end of the stream as the log's last answer told it, for measuring lag; None where answers do not tell."""
        return None

    @property
    def answered_at(self) -> float | None:
        """Monotonic time at which the log answered last; None where a poll returns only with an answer."""
        return None

    @abstractmethod
    async def poll(self, timeout: float, max_records: int = 1000) -> Sequence[Record]:
        """Records from `position` on, as soon as there is one; empty after `timeout` seconds without any.

        Raises LogDiverged where `position` is before the stream's start or beyond its end, Unavailable where the log cannot
        be reached.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Frees what the reader holds. May be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


class EventLog(ABC):
    """One namespace of a log. All methods may be called concurrently from one event loop."""

    @property
    @abstractmethod
    def url(self) -> str:
        """As it may be shown: without secrets."""

    @property
    def embedded(self) -> bool:
        """Whether the log needs no server. Then whoever comes first makes it; on a server the operator makes the streams, with
        settings that last."""
        return False

    @abstractmethod
    async def setup(self, *, create: bool) -> Copies:
        """Checks the streams and, with `create`, makes those that are missing. Returns the copies of the worst kept one.

        Raises InvalidRequest where a stream is missing or has settings that would lose records, naming the command that mends it.
        """

    @abstractmethod
    async def append(self, stream: Stream, draft: Draft, *, timeout: float | None = None) -> None:
        """Durably appends within `timeout` seconds (default: a bound of the implementation's own)."""

    @abstractmethod
    async def bounds(self, stream: Stream) -> Bounds:
        """Raises Unavailable where the log cannot be reached."""

    async def bounds_reaching(self, stream: Stream, offset: Offset) -> Bounds:
        """The bounds of a stream that was read up to `offset` before. A log of several servers asks for a while before it says that
        the stream ends earlier: a server that was deposed while it stood still may not know so yet. Raises Unavailable."""
        return await self.bounds(stream)

    @abstractmethod
    async def offset_at(self, stream: Stream, time_ms: int) -> Offset:
        """The offset of the first record whose time is at least `time_ms`; `Bounds.end` where there is none."""

    @abstractmethod
    async def newest(self, stream: Stream) -> Record | None:
        """The last record of the stream, or None where it holds none."""

    @abstractmethod
    async def reader(self, stream: Stream, start: Offset) -> Reader:
        """A reader whose first poll begins at `start`, of which `Bounds.start` is the least."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closes the log and every reader of it. May be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()
