"""Retention while others act: trainers, operators, replicas, another collector, between any two of its steps."""

from __future__ import annotations

import pytest

from stitch.core.errors import Unavailable
from stitch.core.events import ChannelMoved
from stitch.core.ids import ChannelName, Sequence, WriterId
from stitch.log.faulty import Fault as LogFault
from stitch.log.faulty import FaultyLog
from stitch.log.port import Stream
from stitch.log.views import new_event_id
from tests.operators.published import POLICY
from tests.operators.world import (
    HOUR_MS,
    World,
    before_first_decision,
    numbers,
    ref,
    retired_and_hours_later,
)

pytestmark = pytest.mark.unit


async def test_a_channel_that_moves_to_it_meanwhile_keeps_it() -> None:
    world = World()
    await world.publish("FFFF")
    move = ChannelMoved(
        policy=POLICY,
        channel=ChannelName("stable"),
        target=ref(1),
        event_id=new_event_id(),
        writer=WriterId("op"),
        expected_sequence=Sequence(0),
    )
    report = await world.gc(tap=before_first_decision(lambda: world.say(move)), grace_ms=0)
    assert [(str(refused), why) for refused, why in report.refused] == [("r1/weight_v000001", "version_needed")]
    assert numbers(await world.policy(), retired=True) == {0}
    assert any("channel stable names it" in why for held in report.kept for why in held.why if held.ref == ref(1))
    await world.check()


async def test_a_claim_that_goes_on_from_it_meanwhile_keeps_it() -> None:
    world = World()
    await world.publish("FFFF")

    async def rewind() -> None:
        world.made.rewind(1)
        await world.flush()

    report = await world.gc(tap=before_first_decision(rewind), grace_ms=0)
    assert [why for _, why in report.refused] == ["version_needed"]
    policy = await world.policy()
    assert policy.tip == ref(1)
    assert numbers(policy, retired=True) == {2, 3}, "planned anew: they were abandoned"
    await world.check()


async def test_a_new_run_that_takes_it_as_its_own_meanwhile_keeps_it() -> None:
    world = World()
    await world.publish("FdFF")

    async def take() -> None:
        world.made.claim("r2", alias=ref(1))
        await world.flush()

    await world.gc(tap=before_first_decision(take), grace_ms=0)
    policy = await world.policy()
    assert policy.tip == ref(0, "r2")
    assert policy.versions[ref(1)].retired is None
    await world.check()


async def test_a_publisher_that_goes_on_meanwhile_is_not_disturbed() -> None:
    world = World(sharing=True)
    await world.publish("Fddd")
    world.made.anchor(2, world.made.weights[2])
    await world.flush()

    def publish(step: str, done: int, total: int) -> None:
        if step in ("retiring", "deleting"):
            world.now(lambda: world.publish("d"))

    report = await world.gc(grace_ms=0, progress=publish)
    assert [group.path for group in report.deleted] == ["p/r1/1.e1", "p/r1/0.e1"]
    await world.check()
    assert len(world.made.weights) == 4 + 2 + 2


async def test_a_replica_that_begins_to_stage_it_meanwhile_finds_its_bytes() -> None:
    """After the retirement was read back and the grace is over, just before the first delete: with what its chain needs."""
    world = World()
    await retired_and_hours_later(world)
    staging = False

    def begin(step: str, done: int, total: int) -> None:
        nonlocal staging
        if step == "deleting" and not staging:
            staging = True
            world.now(lambda: world.replica("late", serving=ref(5), target=ref(1)))

    report = await world.gc(progress=begin)
    assert [group.path for group in report.deleted] == ["p/r1/2.e1"]
    assert (await world.stage(1)).weights_digest == world.made.version(1).manifest.weights_digest


async def test_a_replica_that_begins_after_the_plan_finds_them_for_the_whole_grace() -> None:
    world = World()
    await world.publish("FddFdd")
    await world.gc(tap=before_first_decision(lambda: world.replica("late", serving=ref(5), target=ref(1))))
    assert numbers(await world.policy(), retired=True) == {2}, "planned anew"
    assert (await world.stage(1)).weights_digest == world.made.version(1).manifest.weights_digest


async def test_two_collectors_at_once_do_what_one_does() -> None:
    world = World()
    await world.publish("FddFdd")
    second = before_first_decision(lambda: world.gc())
    report = await world.gc(tap=second)
    assert report.retired == []
    assert report.refused == []
    world.ahead_ms += HOUR_MS

    def again(step: str, done: int, total: int) -> None:
        if step == "deleting" and done == 0:
            world.now(lambda: world.gc())

    await world.gc(progress=again)
    assert {key.split("/")[2].split(".")[0] for key in world.held()} == {"3", "4", "5"}
    await world.check()


async def test_pointers_are_abreast_before_anything_goes() -> None:
    """Who knows the pointer alone is never led to what is gone."""
    world = World()
    await retired_and_hours_later(world)
    assert await world.latest_pointer() is None
    log = FaultyLog(world.log, lambda stream, draft: LogFault.REFUSE if stream is Stream.POINTERS else LogFault.NONE)
    before = world.held()
    with pytest.raises(Unavailable):
        await world.gc(log=log)
    assert world.held() == before
    await world.gc()
    pointer = await world.latest_pointer()
    assert pointer is not None
    assert pointer.target == ref(5)
