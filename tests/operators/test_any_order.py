"""Trainers, operators, replicas and time in any order, with collectors that die anywhere: no accepted version ever loses a byte."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.events import ChannelMoved, Decision, RunVersion, VersionQuarantined
from stitch.core.ids import ChannelName, Sequence, WriterId
from stitch.core.lineage import PolicyLineage
from stitch.log.views import new_event_id
from stitch.operators.collection import Progress, silent
from tests.operators.published import POLICY, model
from tests.operators.world import HOUR_MS, World

pytestmark = pytest.mark.unit

Step = tuple[str, int]
STEPS = st.tuples(
    st.sampled_from(["publish", "publish", "rewind", "alias", "base", "lost", "anchor", "move", "quarantine", "replica", "hour"])
    | st.sampled_from(["gc", "gc", "gc at once", "dying gc"]),
    st.integers(0, 7),
)


class Death(Exception):
    """Of a collector."""


@settings(max_examples=25, deadline=None)
@given(st.booleans(), st.lists(STEPS, min_size=4, max_size=14))
def test_no_accepted_version_loses_a_byte(sharing: bool, steps: list[Step]) -> None:
    asyncio.run(_play(sharing, steps))


async def _play(sharing: bool, steps: list[Step]) -> None:
    world = World(sharing=sharing)
    await world.publish("Fds")
    for what, which in steps:
        await _step(world, what, which)
        await world.check(stage=False)
    await world.gc(grace_ms=0)
    before = world.held()
    again = await world.gc(grace_ms=0)
    assert (again.retired, again.deleted, world.held()) == ([], [], before), "one run does all that is to be done"
    await world.check()


async def _step(world: World, what: str, which: int) -> None:
    policy = await world.policy()
    some = _one_of(policy, which)
    if what in ("publish", "rewind", "alias", "base"):
        _train(world, policy, what, which, some)
    elif what in ("move", "quarantine"):
        await world.say(_decision(policy, what, some))
    elif what == "anchor":
        await world.compact(some.number, run=some.run)
    elif what == "lost":
        number = (policy.greatest(some.run) or 0) + which % 2
        world.store.put(f"p/{some.run}/{number}.e{policy.epoch}/{'ab' * 32}", b"lost")
    elif what == "replica":
        await world.replica(f"r{which}", serving=some, target=policy.tip)
    elif what == "hour":
        world.ahead_ms += HOUR_MS
    else:
        with contextlib.suppress(Death):
            progress = _dying(which) if what == "dying gc" else silent
            await world.gc(retain=1 + which % 3, grace_ms=HOUR_MS if what == "gc" else 0, progress=progress)
    await world.flush()


def _train(world: World, policy: PolicyLineage, what: str, which: int, some: RunVersion) -> None:
    match what:
        case "publish":
            world.made.forms("FdsFdsdd"[which] if which % 3 and policy.tip is not None else "F")
        case "rewind" if policy.living(some):
            world.made.rewind(some.number)
        case "alias":
            world.made.claim(f"n{len(policy.runs)}", alias=some)
        case "base":
            world.made.open_with_base(f"n{len(policy.runs)}", model(90 + which), claim=which % 2 == 0)


def _decision(policy: PolicyLineage, what: str, some: RunVersion) -> Decision:
    writer, event_id, stable = WriterId("op"), new_event_id(), ChannelName("stable")
    if what == "quarantine":
        return VersionQuarantined(policy=POLICY, version=some, event_id=event_id, writer=writer)
    known = policy.channels.get(stable)
    expected = Sequence(known.sequence if known else 0)
    return ChannelMoved(policy=POLICY, channel=stable, target=some, event_id=event_id, writer=writer, expected_sequence=expected)


def _one_of(policy: PolicyLineage, which: int) -> RunVersion:
    unretired = sorted((v for v in policy.versions.values() if v.retired is None), key=lambda v: v.position.offset)
    return unretired[which % len(unretired)].ref


def _dying(at: int) -> Progress:
    left = [at]

    def tell(step: str, done: int, total: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Death

    return tell
