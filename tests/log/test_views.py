"""Views of the streams, and the repair of pointers that lag behind the lineage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from stitch.core.events import ChannelPointer, ReplicaState, RunClaimed, VersionPublished
from stitch.core.ids import EventId, ReplicaId, Sequence, VersionNumber
from stitch.core.lineage import Lineage
from stitch.log.events import append
from stitch.log.follow import Follower
from stitch.log.memory import MemoryLog
from stitch.log.port import EventLog, Stream
from stitch.log.views import Pointers, fleet_follower, lineage_follower, pointers_follower, write_pointers
from tests.support.examples import POLICY, examples, version

pytestmark = pytest.mark.unit


@asynccontextmanager
async def _views(log: EventLog) -> AsyncIterator[tuple[Follower[Lineage], Follower[Pointers]]]:
    lineage, pointers = lineage_follower(log), pointers_follower(log)
    tasks = [asyncio.create_task(lineage.run()), asyncio.create_task(pointers.run())]
    try:
        await lineage.catch_up()
        await pointers.catch_up()
        yield lineage, pointers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _publish(log: EventLog, *numbers: int) -> None:
    """A claim on base 0, if the first number is 1, then versions, each on the one before."""
    claim, published = examples()["run_claimed_base"], examples()["version_published"]
    assert isinstance(claim, RunClaimed)
    assert isinstance(published, VersionPublished)
    for number in numbers:
        if number == 1:
            await append(log, replace(claim, expected_head=None, event_id=EventId("v-0")), source="test")
        await append(
            log,
            replace(
                published,
                number=VersionNumber(number),
                event_id=EventId(f"v-{number}"),
                expected_head=EventId(f"v-{number - 1}"),
                parent=VersionNumber(number - 1),
                base=version(number - 1),
            ),
            source="test",
        )


async def test_pointers_are_written_once_and_name_the_nearest_anchor() -> None:
    async with MemoryLog() as log, _views(log) as (lineage, pointers):
        await _publish(log, 1, 2)
        await lineage.catch_up()
        assert await write_pointers(log, lambda: lineage.state, pointers, source="test") == 1
        assert await write_pointers(log, lambda: lineage.state, pointers, source="test") == 0
        found = (await pointers.catch_up()).greatest[f"{POLICY}/latest"]
        assert (found.target, found.anchor, found.sequence, found.source) == (version(2), version(0), 3, "v-2")


async def test_a_late_older_pointer_in_the_last_place_is_repaired() -> None:
    async with MemoryLog() as log, _views(log) as (lineage, pointers):
        await _publish(log, 1, 2)
        await lineage.catch_up()
        await write_pointers(log, lambda: lineage.state, pointers, source="test")
        newest = (await pointers.catch_up()).last[f"{POLICY}/latest"]
        await append(log, replace(newest, sequence=Sequence(1), target=version(0), event_id=EventId("late")), source="test")
        assert (await pointers.catch_up()).greatest[f"{POLICY}/latest"] == newest
        assert await write_pointers(log, lambda: lineage.state, pointers, source="test") == 1
        assert (await pointers.catch_up()).last[f"{POLICY}/latest"].target == version(2)


async def test_a_repairer_looks_again_after_its_pause() -> None:
    async with MemoryLog() as log, _views(log) as (lineage, pointers):
        await _publish(log, 1)
        await lineage.catch_up()

        async def another_is_faster() -> None:
            assert await write_pointers(log, lambda: lineage.state, pointers, source="other") == 1

        assert await write_pointers(log, lambda: lineage.state, pointers, source="test", pause=another_is_faster) == 0


async def test_compaction_of_pointers_strands_nobody() -> None:
    async with MemoryLog() as log, _views(log) as (lineage, pointers):
        for number in range(1, 6):
            await _publish(log, number)
            await lineage.catch_up()
            await write_pointers(log, lambda: lineage.state, pointers, source="test")
        await pointers.catch_up()
        log.compact()
        late = pointers_follower(log)
        task = asyncio.create_task(late.run())
        found = await late.catch_up()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert found.greatest[f"{POLICY}/latest"].target == version(5)
        assert isinstance(found.last[f"{POLICY}/latest"], ChannelPointer)


async def test_a_fleet_view_does_not_read_what_is_older_than_a_lease() -> None:
    state = examples()["replica_state"]
    assert isinstance(state, ReplicaState)
    clock = [1_000_000]
    async with MemoryLog(clock=lambda: clock[0]) as log:
        for number in range(100):
            clock[0] += 1000
            seen = replace(state, replica=ReplicaId(f"replica-{number}"), event_id=EventId(f"e-{number}"))
            await append(log, seen, source="test")
        follower = fleet_follower(log)
        task = asyncio.create_task(follower.run())
        fleet = await follower.catch_up()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(fleet.members) == 51
        assert (await log.bounds(Stream.ACTIVATIONS)).end == 100
