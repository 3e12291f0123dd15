"""Following a stream: abreast, never ahead of itself, and frozen rather than wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from stitch.core.errors import InvalidRequest, LogDiverged, StitchError, Unavailable, UnreadableEvent
from stitch.core.events import Event, RunClaimed
from stitch.core.ids import EventId, Offset
from stitch.core.lineage import Position
from stitch.log import follow
from stitch.log.events import append, draft
from stitch.log.follow import Follower
from stitch.log.memory import MemoryLog
from stitch.log.port import Copies, Draft, EventLog, Reader, Record, Stream
from tests.support.examples import examples

pytestmark = pytest.mark.unit

WAIT = 10.0


def _claim(number: int) -> RunClaimed:
    claim = examples()["run_claimed"]
    assert isinstance(claim, RunClaimed)
    return replace(claim, event_id=EventId(f"e-{number}"))


def _collect(state: tuple[str, ...], event: Event, at: Position) -> tuple[str, ...]:
    return (*state, event.event_id)


@asynccontextmanager
async def _following(log: EventLog, **options: Any) -> AsyncIterator[Follower[tuple[str, ...]]]:
    follower: Follower[tuple[str, ...]] = Follower(log, Stream.PUBLICATIONS, (), _collect, **options)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _append(log: EventLog, *numbers: int) -> None:
    for number in numbers:
        await append(log, _claim(number), source="test")


class _Rig(EventLog):
    """A log whose readers and bounds can be made to fail, and whose records can be exchanged."""

    def __init__(self, inner: MemoryLog) -> None:
        self.inner, self.opened = inner, 0
        self.down: StitchError | None = None

    @property
    def url(self) -> str:
        return self.inner.url

    def _check(self) -> None:
        if self.down is not None:
            raise self.down

    async def setup(self, *, create: bool) -> Copies:
        return await self.inner.setup(create=create)

    async def append(self, stream: Stream, draft: Draft, *, timeout: float | None = None) -> None:
        await self.inner.append(stream, draft, timeout=timeout)

    async def bounds(self, stream: Stream) -> Any:
        self._check()
        return await self.inner.bounds(stream)

    async def offset_at(self, stream: Stream, time_ms: int) -> Offset:
        return await self.inner.offset_at(stream, time_ms)

    async def newest(self, stream: Stream) -> Record | None:
        return await self.inner.newest(stream)

    async def reader(self, stream: Stream, start: Offset) -> Reader:
        self._check()
        self.opened += 1
        return _RigReader(self, await self.inner.reader(stream, start))

    async def aclose(self) -> None:
        await self.inner.aclose()


class _RigReader(Reader):
    def __init__(self, rig: _Rig, inner: Reader) -> None:
        self.rig, self.inner = rig, inner

    @property
    def position(self) -> Offset:
        return self.inner.position

    async def poll(self, timeout: float, max_records: int = 1000) -> Sequence[Record]:
        self.rig._check()
        return await self.inner.poll(min(timeout, 0.02), max_records)

    async def aclose(self) -> None:
        await self.inner.aclose()


class _Slow(_Rig):
    """The first answer to a reader takes twice as long as a poll."""

    async def reader(self, stream: Stream, start: Offset) -> Reader:
        return _SlowReader(self, await super().reader(stream, start))


class _SlowReader(_RigReader):
    answered = False

    async def poll(self, timeout: float, max_records: int = 1000) -> Sequence[Record]:
        if not self.answered:
            self.answered = True
            await asyncio.sleep(min(timeout, 2 * follow.POLL_SECONDS))
            if timeout <= 2 * follow.POLL_SECONDS:
                return ()
        return await super().poll(timeout, max_records)


async def test_what_is_appended_is_folded_once_and_in_order() -> None:
    async with MemoryLog() as log:
        await _append(log, 0, 1)
        async with _following(log) as follower:
            assert await follower.catch_up() == ("e-0", "e-1")
            await _append(log, 2, 3)
            assert await follower.catch_up() == ("e-0", "e-1", "e-2", "e-3")
            assert follower.healthy


async def test_an_empty_log_is_caught_up_with() -> None:
    async with MemoryLog() as log, _following(log) as follower:
        assert await follower.catch_up() == ()
        assert follower.healthy


async def test_until_returns_the_first_state_that_holds() -> None:
    async with MemoryLog() as log, _following(log) as follower:
        waiting = asyncio.create_task(follower.until(lambda state: len(state) >= 2, WAIT))
        await _append(log, 0, 1)
        assert (await waiting)[:2] == ("e-0", "e-1")


REFUSED = InvalidRequest("log: permissions were taken away", field="log")


@pytest.mark.parametrize("down", [Unavailable("log: down for the test"), REFUSED])
async def test_an_outage_is_survived_and_said(monkeypatch: pytest.MonkeyPatch, down: StitchError) -> None:
    monkeypatch.setattr(follow, "BACKOFF_SECONDS", (0.01, 0.02))
    async with _Rig(MemoryLog()) as rig:
        await _append(rig, 0)
        async with _following(rig) as follower:
            await follower.catch_up()
            rig.down = down
            async with asyncio.timeout(WAIT):
                while follower.error is None:
                    await follower.changed()
            assert not follower.healthy
            with pytest.raises(type(down)):
                await follower.catch_up(0.05)
            await _append(rig, 1)
            rig.down = None
            assert await follower.until(lambda state: len(state) == 2, WAIT) == ("e-0", "e-1")
            await follower.catch_up()
            assert follower.healthy
            assert follower.error is None


async def test_a_refusal_before_the_log_was_ever_read_ends_the_follower() -> None:
    async with _Rig(MemoryLog()) as rig:
        rig.down = REFUSED
        follower: Follower[tuple[str, ...]] = Follower(rig, Stream.PUBLICATIONS, (), _collect)
        with pytest.raises(InvalidRequest):
            await follower.run()


async def test_a_mark_that_comes_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link, or under a quota, an answer takes longer than a poll of a reader that is abreast."""
    monkeypatch.setattr(follow, "REBUILD_SECONDS", 0.2)
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.05)
    async with _Slow(MemoryLog()) as log:
        await _append(log, 0)
        async with _following(log) as follower:
            await follower.catch_up()
            opened = log.opened
            async with asyncio.timeout(WAIT):
                while log.opened < opened + 3:
                    assert follower.error is None
                    await asyncio.sleep(0.01)
            await _append(log, 1)
            assert await follower.until(lambda state: len(state) == 2, WAIT) == ("e-0", "e-1")


async def test_a_reader_is_replaced_from_time_to_time_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "REBUILD_SECONDS", 0.02)
    async with _Rig(MemoryLog()) as rig, _following(rig) as follower:
        for number in range(20):
            await _append(rig, number)
            await follower.catch_up()
        async with asyncio.timeout(WAIT):
            while rig.opened < 4:
                await asyncio.sleep(0.01)
        assert follower.state == tuple(f"e-{n}" for n in range(20))


async def test_a_recreated_log_freezes_the_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "REBUILD_SECONDS", 0.02)
    async with _Rig(MemoryLog()) as rig, _following(rig) as follower:
        await _append(rig, 0, 1)
        await follower.catch_up()
        await rig.inner.aclose()
        rig.inner = MemoryLog()
        await _append(rig, 7, 8, 9)
        with pytest.raises((LogDiverged, Unavailable)):
            await follower.until(lambda state: "e-9" in state, WAIT)
        async with asyncio.timeout(WAIT):
            while follower.frozen is None:
                await asyncio.sleep(0.01)
        assert isinstance(follower.frozen, LogDiverged)
        assert follower.state == ("e-0", "e-1")
        assert not follower.healthy
        with pytest.raises(LogDiverged):
            await follower.catch_up()


async def test_catching_up_notices_a_truncated_log_at_once() -> None:
    async with _Rig(MemoryLog()) as rig, _following(rig) as follower:
        await _append(rig, 0, 1, 2)
        await follower.catch_up()
        rig.inner = MemoryLog()
        with pytest.raises(LogDiverged):
            await follower.catch_up()


async def test_a_truncated_log_freezes_the_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "REBUILD_SECONDS", 0.02)
    async with _Rig(MemoryLog()) as rig, _following(rig) as follower:
        await _append(rig, 0, 1, 2)
        await follower.catch_up()
        rig.inner = MemoryLog()
        await _append(rig, 0)
        async with asyncio.timeout(WAIT):
            while follower.frozen is None:
                await asyncio.sleep(0.01)
        assert isinstance(follower.frozen, LogDiverged)


async def test_a_decision_that_cannot_be_read_stops_the_fold() -> None:
    async with MemoryLog() as log, _following(log) as follower:
        await _append(log, 0)
        await log.append(Stream.PUBLICATIONS, Draft(key="math", value=b"poison"))
        await _append(log, 1)
        with pytest.raises(UnreadableEvent):
            await follower.until(lambda state: "e-1" in state, WAIT)
        assert follower.state == ("e-0",)
        assert not follower.healthy


async def test_an_optional_event_that_cannot_be_read_is_counted_and_skipped() -> None:
    async with MemoryLog() as log, _following(log) as follower:
        record = draft(examples()["rollout_served"], source="test")
        await log.append(Stream.PUBLICATIONS, replace(record, value=record.value[:2] + b"\0" * 8 + record.value[10:]))
        await _append(log, 1)
        assert await follower.catch_up() == ("e-1",)
        assert follower.skipped == {"stitch.rollout_served.v1": 1}
        assert follower.healthy


async def test_a_follower_may_begin_later() -> None:
    async def from_two(log: EventLog) -> Offset:
        return Offset(2)

    async with MemoryLog() as log:
        await _append(log, 0, 1, 2, 3)
        async with _following(log, start=from_two) as follower:
            assert await follower.catch_up() == ("e-2", "e-3")


async def test_listeners_hear_each_event_with_its_place() -> None:
    async with MemoryLog() as log, _following(log) as follower:
        heard: list[tuple[str, int]] = []
        follower.listeners.append(lambda event, at: heard.append((event.event_id, at.offset)))
        await _append(log, 0, 1)
        await follower.catch_up()
        assert heard == [("e-0", 0), ("e-1", 1)]


async def test_a_follower_says_how_far_behind_it_is() -> None:
    async with _Rig(MemoryLog()) as rig:
        follower: Follower[tuple[str, ...]] = Follower(rig, Stream.PUBLICATIONS, (), _collect)
        assert (follower.lag, follower.age) == (None, None)
        await _append(rig, 0, 1, 2)
        async with _following(rig) as follower:
            await follower.catch_up()
            async with asyncio.timeout(WAIT):
                while follower.lag != 0:
                    await asyncio.sleep(0.01)
            assert follower.age is not None
            rig.down = Unavailable("log: down for the test")
            async with asyncio.timeout(WAIT):
                while follower.age < 0.2:
                    await asyncio.sleep(0.01)
            assert follower.lag == 0  # as it was last told


async def test_lag_counts_what_is_not_folded_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    lags: list[int | None] = []

    def fold(state: int, event: Event, at: Position) -> int:
        lags.append(follower.lag)
        return state + 1

    monkeypatch.setattr(_RigReader, "end", property(lambda reader: None), raising=False)
    async with _Rig(MemoryLog()) as rig:
        await _append(rig, 0, 1, 2)
        follower: Follower[int] = Follower(rig, Stream.PUBLICATIONS, 0, fold)
        task = asyncio.create_task(follower.run())
        await follower.catch_up()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert lags == [3, 3, 3]


@pytest.mark.parametrize("stream", [Stream.POINTERS, Stream.ACTIVATIONS, Stream.ROLLOUTS])
async def test_a_thinned_stream_may_lose_records_but_never_get_others(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "REBUILD_SECONDS", 0.02)

    async def add(log: EventLog, *numbers: int) -> None:
        for number in numbers:
            await log.append(stream, replace(draft(_claim(number), source="test"), key=f"k{number}"))

    async with _Rig(MemoryLog()) as rig:
        follower: Follower[tuple[str, ...]] = Follower(rig, stream, (), _collect)
        task = asyncio.create_task(follower.run())
        try:
            await add(rig, 0, 1)
            assert await follower.catch_up() == ("e-0", "e-1")
            opened = rig.opened
            async with asyncio.timeout(WAIT):
                while rig.opened < opened + 2:  # it meets its last record again, and folds it no second time
                    await asyncio.sleep(0.01)
            await add(rig, 2)
            assert await follower.catch_up() == ("e-0", "e-1", "e-2")
            other = MemoryLog()
            await add(other, 7, 8, 9, 10)
            rig.inner = other
            async with asyncio.timeout(WAIT):
                while follower.frozen is None:
                    await asyncio.sleep(0.01)
            assert isinstance(follower.frozen, LogDiverged)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
