"""Following a stream: a fold that stays abreast of the log, and knows how far it can be trusted.

A follower owns a reader and replaces it on any error and, jittered, once a minute, so that a client which fell silent strands
nobody. It goes on at the record that it read last: where that record is no longer what the log holds there, the log was truncated
or recreated, and the follower freezes at what it knows and says so.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Generic, TypeVar

from stitch.core.errors import InvalidRequest, LogDiverged, StitchError, Unavailable, UnreadableEvent
from stitch.core.events import Event
from stitch.core.ids import Offset
from stitch.core.lineage import Position, make_position
from stitch.log.events import read
from stitch.log.keeping import READ_TIMEOUT_S
from stitch.log.port import Bounds, EventLog, Record, Stream
from stitch.wire.codec import Skipped

POLL_SECONDS: Final = 1.0
"""How long one poll waits for records; bounds how late a stop or a rebuild is noticed."""
REBUILD_SECONDS: Final = 60.0
"""Age at which a reader is replaced, give or take a quarter."""
BACKOFF_SECONDS: Final = (0.1, 5.0)
"""First and longest pause after a reader failed."""
CATCH_UP_SECONDS: Final = 60.0
"""Default bound on reading to the end."""
WAY_OUT: Final = "Restore it, or begin a new namespace"
"""For whoever is told that a log is not what it was."""

_THINNED: Final = frozenset({Stream.POINTERS, Stream.ACTIVATIONS, Stream.ROLLOUTS})
"""Streams that lose records by design. Only in the others is a missing record a proof of damage."""

S = TypeVar("S")
T = TypeVar("T")
Fold = Callable[[S, Event, Position], S]
Listener = Callable[[Event, Position], None]


class Follower(Generic[S]):
    """Folds one stream while `run` runs. Of one event loop; `state` may be read at any time."""

    def __init__(
        self,
        log: EventLog,
        stream: Stream,
        state: S,
        fold: Fold[S],
        *,
        start: Callable[[EventLog], Awaitable[Offset]] | None = None,
    ) -> None:
        """`start` finds the first offset to read (default: the first that the log holds)."""
        self.log, self.stream, self.state = log, stream, state
        self.listeners: list[Listener] = []
        self.skipped: dict[str, int] = {}
        """Optional events that this release cannot read, by type."""
        self.frozen: StitchError | None = None
        """Why the follower stopped for good: LogDiverged or UnreadableEvent. `state` stays what it was."""
        self.error: StitchError | None = None
        """What the last poll failed with, until one succeeds."""
        self.caught_up = False
        """Whether the end of the log was reached since the last fault."""
        self.complete = False
        """Whether it was ever reached: since then the state may be old, but lacks no history."""
        self.polled_at = 0.0
        """Monotonic time of the last poll that the log answered."""
        self._fold, self._start = fold, start
        self._position: Offset | None = None
        self._end: Offset | None = None
        self._mark: Record | None = None
        """The last record that was read: what a resumed reader must find again."""
        self._changed = asyncio.Condition()

    @property
    def position(self) -> Offset | None:
        """The offset up to which the state is folded; None before the first poll."""
        return self._position

    @property
    def lag(self) -> int | None:
        """Offsets between the state and the end of the log as it was last told, at least the records that are missing; None before
        the first answer. Stays what it was while the log is away: see `age`."""
        return None if self._end is None or self._position is None else max(0, self._end - self._position)

    @property
    def age(self) -> float | None:
        """Seconds since the log answered last; None before the first answer."""
        return time.monotonic() - self.polled_at if self.polled_at else None

    @property
    def healthy(self) -> bool:
        """Whether the state is abreast of the log, as far as the follower can know."""
        return self.caught_up and self.frozen is None

    async def run(self) -> None:
        """Follows until cancelled, or until the log can be trusted no more (then `frozen` says why).

        Raises InvalidRequest where the log refuses before it was ever read to its end: the way to it is barred. Later a refusal is
        one fault more, since permissions and certificates are changed while processes run.
        """
        pause = BACKOFF_SECONDS[0]
        while self.frozen is None:
            try:
                await self._follow_one_reader()
                pause = BACKOFF_SECONDS[0]
            except LogDiverged as error:
                told = str(error)
                await self._set(frozen=error if WAY_OUT in told else LogDiverged(f"{told}. {WAY_OUT}"))
            except UnreadableEvent as error:
                await self._set(frozen=error)
            except (Unavailable, InvalidRequest) as error:
                if isinstance(error, InvalidRequest) and not self.complete:
                    raise
                self.caught_up = False
                await self._set(error=error)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 # jitter, no secret
                pause = min(2 * pause, BACKOFF_SECONDS[1])

    async def until(self, holds: Callable[[S], bool], timeout: float | None) -> S:
        """The first state for which `holds` is true. Raises TimeoutError, or what the follower froze with."""
        async with asyncio.timeout(timeout), self._changed:
            while not holds(self.state):
                if self.frozen is not None:
                    raise self.frozen
                await self._changed.wait()
            return self.state

    async def catch_up(self, timeout: float = CATCH_UP_SECONDS) -> S:
        """The state once it has folded all that the log held at the call.

        Raises Unavailable after `timeout` seconds, LogDiverged where the log ends before what was read of it.
        """
        try:
            async with asyncio.timeout(timeout):
                end = (await self._bounds()).end
                return await self.until(lambda _: self._position is not None and self._position >= end, None)
        except TimeoutError as error:
            raise Unavailable(f"{self.stream}: not read to its end within {timeout:g} s ({self.error or 'no answer'})") from error

    async def changed(self) -> None:
        """Returns at the next change of the state, position or health."""
        async with self._changed:
            await self._changed.wait()

    async def _follow_one_reader(self) -> None:
        start = await self._first_offset()
        until = time.monotonic() + REBUILD_SECONDS * random.uniform(0.75, 1.25)  # noqa: S311 # jitter, no secret
        end = (await self._bounds()).end
        async with await self.log.reader(self.stream, start) as reader:
            if self._mark is not None and start == self._mark.offset:
                # In a thinned stream the record may be gone, and nothing may follow it. Elsewhere it comes as soon as the log can.
                patience = POLL_SECONDS if self.stream in _THINNED else READ_TIMEOUT_S
                await self._meet_mark(await reader.poll(patience, 1), self._mark)
            self._end = end
            while time.monotonic() < until:
                at_end = reader.position >= end
                if at_end != self.caught_up or self._position != reader.position or self.error is not None:
                    self.caught_up = at_end
                    self.complete = self.complete or at_end
                    await self._set(position=reader.position)
                try:
                    records = await reader.poll(POLL_SECONDS)
                except LogDiverged:
                    if self.stream in _THINNED and (await self.log.bounds(self.stream)).start > reader.position:
                        return  # records expired before they were read; the next reader goes on with those that are left
                    raise
                for record in records:
                    self._take(record)
                self.polled_at = reader.answered_at or time.monotonic()
                self._end = max(self._end, reader.end or reader.position)

    async def _first_offset(self) -> Offset:
        if self._mark is not None and self.stream not in _THINNED:
            return self._mark.offset
        if self._position is not None:
            # The record before may be gone for a good reason: compaction, or the end of its retention.
            bounds = await self._bounds()
            return max(self._position if self._mark is None else self._mark.offset, bounds.start)
        if self._start is not None:
            return await self._start(self.log)
        return (await self.log.bounds(self.stream)).start

    async def _bounds(self) -> Bounds:
        """Raises LogDiverged where the log ends before what was read of it."""
        if self._position is None:
            return await self.log.bounds(self.stream)
        bounds = await self.log.bounds_reaching(self.stream, self._position)
        if bounds.end < self._position:
            raise self._diverged(bounds.end)
        return bounds

    def _diverged(self, end: Offset) -> LogDiverged:
        return LogDiverged(
            f"{self.stream}: the log ends at {end}, before {self._position}, up to which it was read: it was truncated or "
            f"recreated. {WAY_OUT}"
        )

    async def _meet_mark(self, found: Sequence[Record], mark: Record) -> None:
        """What a resumed reader finds first must be the record that was read last; in a thinned stream that one may be gone, but no
        other can ever be in its place."""
        first = found[0] if found else None
        if self.stream in _THINNED or (first is not None and first.offset == mark.offset):
            if first is not None:
                await self._take_or_diverge(first, mark)
            return
        bounds = await self.log.bounds_reaching(self.stream, Offset(mark.offset + 1))
        if first is None and bounds.end > mark.offset:
            raise Unavailable(f"{self.stream}: record {mark.offset} was not read again in time")
        raise self._replaced(mark, bounds)

    async def _take_or_diverge(self, record: Record, mark: Record) -> None:
        if record.offset == mark.offset and _event_id(record) != _event_id(mark):
            raise self._replaced(mark, await self.log.bounds(self.stream))
        self._take(record)

    def _replaced(self, mark: Record, bounds: Bounds) -> LogDiverged:
        return LogDiverged(
            f"{self.stream}: record {mark.offset} is no longer the one that was read before (the log now holds "
            f"{bounds.start} to {bounds.end}): it was truncated or recreated. {WAY_OUT}"
        )

    def _take(self, record: Record) -> None:
        if self._mark is not None and record.offset <= self._mark.offset:
            return  # read again, since the reader was replaced
        event = read(record)
        at = make_position(offset=record.offset, time_ms=record.time_ms)
        if isinstance(event, Skipped):
            self.skipped[event.type] = self.skipped.get(event.type, 0) + 1
        else:
            self.state = self._fold(self.state, event, at)
            for listener in self.listeners:
                listener(event, at)
        self._mark = record

    async def _set(
        self, *, position: Offset | None = None, error: StitchError | None = None, frozen: StitchError | None = None
    ) -> None:
        self._position = self._position if position is None else position
        self.error = error or frozen
        self.frozen = frozen
        async with self._changed:
            self._changed.notify_all()


def _event_id(record: Record) -> bytes:
    return next((value for name, value in record.headers if name == "ce_id"), b"")


async def while_following(follower: Follower[Any], running: asyncio.Task[None], waiting: Coroutine[Any, Any, T]) -> T:
    """What `waiting` gives, or what ended the follower that it depends on, whose `run` is the task `running`."""
    task = asyncio.create_task(waiting)
    try:
        await asyncio.wait({task, running}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        error = running.exception() or follower.frozen
        assert error is not None
        raise error
    finally:
        task.cancel()
