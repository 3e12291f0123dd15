from __future__ import annotations

import asyncio

import pytest

from stitch.core.admission import Constraint
from stitch.core.errors import Unavailable, VersionGone, WeightVersionNotReady
from stitch.core.events import RunVersion
from stitch.core.ids import Digest, Generation, Offset, PolicyId, RunId, Sequence, VersionNumber
from stitch.core.lineage import PolicyLineage, Run
from stitch.core.manifest import ManifestRef
from stitch.replica.gate import Full, Gate
from stitch.replica.targets import Origin, Serving, Target
from tests.support.provision import eventually

pytestmark = pytest.mark.unit


def version(number: int, run: str = "r1") -> RunVersion:
    return RunVersion(run=RunId(run), number=VersionNumber(number))


def serving(number: int, run: str = "r1") -> Serving:
    target = Target(
        generation=Generation(0),
        sequence=Sequence(number + 1),
        offset=Offset(number),
        ref=version(number, run),
        manifest=ManifestRef(key="k", digest=Digest("0" * 64), weights_digest=Digest("0" * 64)),
        origin=Origin.LOG,
    )
    return Serving(target=target, label=str(number), model_path=f"/{run}/{number}")


def at_least(number: int) -> Constraint:
    return Constraint(run=RunId("r1"), min_version=VersionNumber(number))


def exactly(number: int) -> Constraint:
    return Constraint(run=RunId("r1"), exact_version=VersionNumber(number))


class Scene:
    def __init__(self, capacity: int = 2, wait_seconds: float = 30.0) -> None:
        self.lineage = PolicyLineage(policy=PolicyId("p"))
        self.gate = Gate(lambda: self.lineage, capacity=capacity, wait_seconds=wait_seconds)


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.gate.flip(serving(5))
    made.gate.open()
    return made


async def test_before_the_first_version_nothing_is_ready() -> None:
    with pytest.raises(WeightVersionNotReady, match="no version yet"):
        await Scene().gate.admit("a", Constraint(), tells=True)


async def test_it_admits_what_the_serving_version_satisfies(scene: Scene) -> None:
    ticket = await scene.gate.admit("a", at_least(5), tells=True)
    assert ticket.versions == [version(5)]
    assert scene.gate.in_flight == {ticket}
    scene.gate.release(ticket)
    assert not scene.gate.in_flight
    with pytest.raises(WeightVersionNotReady):
        await scene.gate.admit("b", at_least(6), tells=True)


async def test_what_can_never_be_met_is_gone(scene: Scene) -> None:
    scene.lineage = PolicyLineage(policy=PolicyId("p"), runs=scene.lineage.runs.set(RunId("r1"), Run(superseded=True)))
    with pytest.raises(VersionGone, match="superseded"):
        await scene.gate.admit("a", at_least(1), tells=True)


async def test_it_is_full_at_its_capacity(scene: Scene) -> None:
    for name in "ab":
        await scene.gate.admit(name, Constraint(), tells=True)
    with pytest.raises(Full):
        await scene.gate.admit("c", Constraint(), tells=True)


async def test_a_request_waits_for_its_version_and_no_longer_than_it_said(scene: Scene) -> None:
    waiting = asyncio.create_task(scene.gate.admit("a", at_least(6), tells=True, wait=30))
    await eventually(lambda: scene.gate.waiting == 1, "it waits")
    scene.gate.flip(serving(6))
    assert (await waiting).versions == [version(6)]
    with pytest.raises(WeightVersionNotReady):
        await scene.gate.admit("b", at_least(7), tells=True, wait=0.01)
    assert scene.gate.waiting == 0


async def test_released_waiters_respect_capacity(scene: Scene) -> None:
    scene.gate.close()
    waiting = [asyncio.create_task(scene.gate.admit(name, Constraint(), tells=True)) for name in "ab"]
    await eventually(lambda: scene.gate.waiting == 2, "both wait")
    with pytest.raises(Unavailable):
        await scene.gate.admit("c", Constraint(), tells=True)
    assert scene.gate.open() > 0
    assert len({await task for task in waiting}) == len(scene.gate.in_flight) == 2


async def test_at_the_closed_gate_a_request_waits_for_a_bounded_time() -> None:
    scene = Scene(wait_seconds=0.01)
    scene.gate.flip(serving(5))
    with pytest.raises(Unavailable, match="not started"):
        await scene.gate.admit("a", Constraint(), tells=True)


async def test_after_the_gate_opens_the_constraint_is_looked_at_anew(scene: Scene) -> None:
    scene.gate.close()
    waiting = asyncio.create_task(scene.gate.admit("a", exactly(5), tells=True))
    await eventually(lambda: scene.gate.waiting == 1, "it waits")
    scene.gate.flip(serving(6))
    scene.gate.open()
    with pytest.raises(WeightVersionNotReady):
        await waiting


async def test_while_it_is_about_to_leave_only_what_both_satisfy_is_admitted(scene: Scene) -> None:
    scene.gate.leave_for(version(6))
    with pytest.raises(WeightVersionNotReady, match="about to take"):
        await scene.gate.admit("a", exactly(5), tells=True)
    await scene.gate.admit("b", at_least(5), tells=True)
    scene.gate.leave_for(None)
    await scene.gate.admit("c", exactly(5), tells=True)


async def test_which_requests_must_end(scene: Scene) -> None:
    free = await scene.gate.admit("free", at_least(5), tells=True)
    pinned = await scene.gate.admit("pinned", exactly(5), tells=True)
    assert scene.gate.must_end(version(6), everything=False) == {pinned}
    assert scene.gate.must_end(version(6), everything=True) == {free, pinned}
    scene.gate.release(free)
    mute = await scene.gate.admit("mute", Constraint(), tells=False)
    assert scene.gate.must_end(version(6), everything=False) == {pinned, mute}
    assert scene.gate.must_end(version(4), everything=False) == {pinned, mute}


async def test_waiting_for_requests_is_bounded_and_returns_what_is_left(scene: Scene) -> None:
    ends = await scene.gate.admit("ends", Constraint(), tells=True)
    stays = await scene.gate.admit("stays", Constraint(), tells=True)
    waiting = asyncio.create_task(scene.gate.ended({ends, stays}, 0.2))
    await asyncio.sleep(0)
    scene.gate.release(ends)
    assert await waiting == {stays}
    scene.gate.give_up({stays}, "over")
    assert stays.given_up.is_set()
    assert stays.reason == "over"
    assert not ends.given_up.is_set()


async def test_a_request_in_flight_remembers_every_version_that_it_met(scene: Scene) -> None:
    ticket = await scene.gate.admit("a", Constraint(), tells=True)
    scene.gate.flip(serving(6))
    scene.gate.flip(serving(6))
    scene.gate.flip(serving(5))
    assert ticket.versions == [version(5), version(6), version(5)]


async def test_an_era_ends_where_a_version_takes_over_that_is_not_newer(scene: Scene) -> None:
    eras = []
    for number, run in ((7, "r1"), (8, "r1"), (8, "r1"), (6, "r1"), (9, "r1"), (9, "r2"), (8, "r1")):
        scene.gate.flip(serving(number, run))
        eras.append(scene.gate.era)
    assert eras == [0, 0, 0, 1, 1, 2, 3]


async def test_a_ticket_knows_the_era_of_its_admission(scene: Scene) -> None:
    early = await scene.gate.admit("a", Constraint(), tells=True)
    scene.gate.flip(serving(0))
    late = await scene.gate.admit("b", Constraint(), tells=True)
    assert late.era == early.era + 1


async def test_once_shut_it_admits_nothing_and_sends_waiters_away(scene: Scene) -> None:
    scene.gate.close()
    waiting = asyncio.create_task(scene.gate.admit("a", Constraint(), tells=True))
    await eventually(lambda: scene.gate.waiting == 1, "it waits")
    scene.gate.shut_for("leaving")
    with pytest.raises(Unavailable, match="leaving"):
        await waiting
    scene.gate.open()
    with pytest.raises(Unavailable, match="leaving"):
        await scene.gate.admit("b", Constraint(), tells=True)
