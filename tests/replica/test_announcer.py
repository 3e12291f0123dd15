from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from stitch.core.errors import InvalidRequest
from stitch.core.events import Phase, ReplicaState, Transition
from stitch.core.ids import PolicyId, PoolName, ReplicaId
from stitch.log.events import append, read
from stitch.log.faulty import Fault, FaultyLog, script
from stitch.log.memory import MemoryLog
from stitch.log.port import EventLog, Stream
from stitch.replica.announcer import FRESH_PERIODS, Announcer
from stitch.replica.budget import Budget
from stitch.replica.config import ReplicaConfig
from tests.replica.world import ref
from tests.support.provision import eventually

pytestmark = pytest.mark.unit


def config(name: str = "a", heartbeat: float = 5.0) -> ReplicaConfig:
    return ReplicaConfig(
        log="memory://",
        store="memory://x",
        policy=PolicyId("p"),
        replica=ReplicaId(name),
        workdir=Path("unused"),
        heartbeat_seconds=heartbeat,
    )


@asynccontextmanager
async def announcing(log: EventLog, name: str = "a", heartbeat: float = 5.0) -> AsyncIterator[Announcer]:
    announcer = Announcer(log, config(name, heartbeat), lambda: "http://x", lambda: 0)
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def told(log: EventLog) -> list[ReplicaState]:
    reader = await log.reader(Stream.ACTIVATIONS, (await log.bounds(Stream.ACTIVATIONS)).start)
    records = await reader.poll(0)
    await reader.aclose()
    found = [read(record) for record in records]
    return [event for event in found if isinstance(event, ReplicaState)]


async def test_the_incarnation_is_the_offset_of_the_joined_record() -> None:
    log = MemoryLog()
    async with announcing(log, "other") as other:
        await eventually(lambda: other.incarnation is not None, "the other joined")
    async with announcing(log) as announcer:
        announcer.state.phase = Phase.LOADING
        announcer.announce(Transition.STAGE_STARTED)
        assert await announcer.flushed(30)
        records = [r for r in await told(log) if r.replica == "a"]
    assert [(r.transition, r.incarnation, r.sequence) for r in records][:2] == [
        (Transition.JOINED, None, 0),
        (Transition.STAGE_STARTED, announcer.incarnation, 1),
    ]
    assert announcer.incarnation is not None
    assert announcer.incarnation > 0


async def test_every_transition_is_written_in_order_while_the_log_answers() -> None:
    log = MemoryLog()
    async with announcing(log) as announcer:
        for transition in (Transition.STAGE_STARTED, Transition.STAGED, Transition.ACTIVATED):
            announcer.announce(transition)
        assert await announcer.flushed(30)
        records = await told(log)
    assert [r.transition for r in records[:4]] == [
        Transition.JOINED,
        Transition.STAGE_STARTED,
        Transition.STAGED,
        Transition.ACTIVATED,
    ]
    assert [r.sequence for r in records] == sorted({r.sequence for r in records})


async def test_an_unknown_outcome_is_settled_by_the_same_record() -> None:
    log = FaultyLog(MemoryLog(), script(Fault.MUTE, Fault.MUTE))
    async with announcing(log) as announcer:
        announcer.announce(Transition.STAGE_STARTED)
        assert await announcer.flushed(30)
        records = await told(log)
    joined = [r for r in records if r.transition is Transition.JOINED]
    assert len({r.event_id for r in joined}) == 1
    started = [r for r in records if r.transition is Transition.STAGE_STARTED]
    assert len(started) == 2
    assert len({(r.event_id, r.sequence) for r in started}) == 1
    assert announcer.fleet.state.members[ReplicaId("a")].state.transition is Transition.STAGE_STARTED


async def test_a_log_that_refuses_a_replica_that_never_joined_ends_it() -> None:
    log = FaultyLog(MemoryLog())
    log.bar()
    announcer = Announcer(log, config(), lambda: "http://x", lambda: 0)
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(announcer.run(), 30)
    assert ended.group_contains(InvalidRequest)


@pytest.mark.parametrize("fault", [FaultyLog.cut, FaultyLog.bar])
async def test_while_the_log_is_away_only_the_newest_state_is_kept(fault: Callable[[FaultyLog], None]) -> None:
    log = FaultyLog(MemoryLog())
    async with announcing(log) as announcer:
        await eventually(lambda: announcer.incarnation is not None, "it joined")
        assert await announcer.flushed(30)
        fault(log)
        announcer.announce(Transition.STAGE_STARTED)
        await eventually(lambda: announcer.error is not None, "it noticed")
        announcer.state.phase = Phase.SERVING
        announcer.announce(Transition.STAGED)
        announcer.announce(Transition.ACTIVATED)
        await eventually(lambda: announcer.waiting == 1, "older ones were dropped")
        log.mend()
        assert await announcer.flushed(30)
        transitions = [r.transition for r in await told(log)]
    assert Transition.ACTIVATED in transitions
    assert Transition.STAGED not in transitions


async def test_heartbeats_fill_the_silence() -> None:
    log = MemoryLog()
    async with announcing(log, heartbeat=0.05):

        async def beats() -> bool:
            return sum(r.transition is Transition.HEARTBEAT for r in await told(log)) >= 3

        await eventually(beats, "three heartbeats")


async def test_a_newer_life_is_noticed_and_an_older_one_is_not() -> None:
    log = MemoryLog()
    async with announcing(log) as first:
        await eventually(lambda: first.incarnation is not None, "the first joined")
        async with announcing(log) as second:
            await eventually(lambda: first.fenced_by is not None, "the first is fenced")
            assert first.fenced_by == second.incarnation
            first.announce(Transition.HEARTBEAT)
            assert await first.flushed(30)
            await second.fleet.catch_up()
            assert second.fenced_by is None


async def test_a_want_counts_once_it_was_read_back_and_heartbeats_do_not_take_it_back() -> None:
    log = MemoryLog()
    async with announcing(log, heartbeat=0.05) as announcer:
        announcer.want()
        await eventually(lambda: announcer.state.want is not None, "it was read back")
        wanted = announcer.state.want
        seen = len(await told(log))

        async def more() -> bool:
            return len(await told(log)) >= seen + 3

        await eventually(more, "heartbeats")
        await announcer.fleet.catch_up()
        assert announcer.fleet.state.members[ReplicaId("a")].want == wanted
        announcer.unwant()
        announcer.announce(Transition.ACTIVATED)
        assert await announcer.flushed(30)
        await announcer.fleet.catch_up()
        assert announcer.fleet.state.members[ReplicaId("a")].want is None


async def test_of_two_that_want_one_goes_and_then_the_other() -> None:
    log = MemoryLog()
    async with announcing(log, "a") as a, announcing(log, "b") as b:
        for announcer in (a, b):
            await eventually(lambda announcer=announcer: announcer.readable, "it joined")  # type: ignore[misc]
        budgets = [Budget(x, replica=ReplicaId(n), pool=PoolName("default"), slot_seconds=60) for x, n in ((a, "a"), (b, "b"))]
        await budgets[0].acquire()
        second = asyncio.create_task(budgets[1].acquire())
        await eventually(lambda: b.state.want is not None, "the second's want is read back")
        await a.changed(0.2)
        assert not second.done()
        budgets[0].release()
        a.announce(Transition.ACTIVATED)
        await asyncio.wait_for(second, 30)


async def test_after_a_pause_the_stream_is_read_before_it_is_believed() -> None:
    """A process that was stopped for a lease goes on with the view from before, in which it may still be first in line."""
    async with announcing(MemoryLog(), heartbeat=0.2) as announcer:
        await eventually(lambda: announcer.readable, "it joined")
        time.sleep(0.2 * FRESH_PERIODS + 0.1)  # noqa: ASYNC251 # as SIGSTOP does: nothing of it runs
        assert not announcer.readable
        await eventually(lambda: announcer.readable, "it has read on")


async def test_what_failed_on_as_many_as_the_budget_is_held_back_until_it_serves_somewhere() -> None:
    log = MemoryLog()
    async with announcing(log) as announcer:
        await eventually(lambda: announcer.readable, "it joined")
        budget = Budget(announcer, replica=ReplicaId("a"), pool=PoolName("default"), slot_seconds=60)
        assert not budget.held(ref(1))
        mine = (await told(log))[0]
        other = replace(mine, replica=ReplicaId("z"), life="z1", event_id="z1", phase=Phase.FAILED, target=ref(1))  # type: ignore[arg-type]
        await append(log, other, source="test")
        await announcer.fleet.catch_up()
        assert budget.held(ref(1))
        assert not budget.held(ref(2))
        serves = replace(mine, replica=ReplicaId("y"), life="y1", event_id="y1", phase=Phase.SERVING, serving=ref(1))  # type: ignore[arg-type]
        await append(log, serves, source="test")
        await announcer.fleet.catch_up()
        assert not budget.held(ref(1))
