"""Retention on a log and a store: whatever the moment at which a collector dies, or others act, nothing that is needed goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stitch.core.errors import CorruptObject, InvalidRequest, OutcomeUnknown, Unavailable
from stitch.core.events import VersionRetired
from stitch.core.ids import Epoch, RunId, VersionNumber
from stitch.log.faulty import Fault as LogFault
from stitch.log.faulty import FaultyLog, script
from stitch.log.opening import open_log
from stitch.log.port import Stream
from stitch.operators.ledger import Ledger
from stitch.store.directory import DirectoryStore
from stitch.store.faulty import Fault, FaultyStore, Kind
from stitch.store.manifests import attempt_prefix
from stitch.store.memory import MemoryStore
from tests.operators.published import POLICY, model
from tests.operators.world import (
    HOUR_MS,
    World,
    numbers,
    publications,
    ref,
    retired_and_hours_later,
    retirement,
)

pytestmark = pytest.mark.unit
HASH = "ab" * 32


# --- what it does ----------------------------------------------------------------------------------------------------------


async def test_versions_are_retired_first_and_their_bytes_go_an_hour_later() -> None:
    world = World()
    await world.publish("FddFdd")
    before = world.held()
    report = await world.gc()
    assert [held.ref.number for held in report.kept] == [5, 4, 3]
    assert [held.ref.number for held in report.retired] == [2, 1, 0]
    assert numbers(await world.policy(), retired=True) == {0, 1, 2}
    assert world.held() == before
    assert report.waiting.objects == sum(1 for key in before if key.startswith(("p/r1/0.", "p/r1/1.", "p/r1/2.")))

    world.ahead_ms += HOUR_MS
    report = await world.gc()
    assert [group.path for group in report.deleted] == ["p/r1/2.e1", "p/r1/1.e1", "p/r1/0.e1"]
    assert world.held() == {key for key in before if key.startswith(("p/r1/3.", "p/r1/4.", "p/r1/5."))}
    await world.check()
    report = await world.gc()
    assert (report.retired, report.deleted, report.waiting.objects) == ([], [], 0)


async def test_the_log_is_asked_its_time_only_where_it_matters_and_that_changes_nothing() -> None:
    world = World()
    await world.publish("FFF")
    await world.gc()
    end = (await world.log.bounds(Stream.PUBLICATIONS)).end
    policy = await world.policy()
    await world.gc()  # waiting, and no newer decision: asked
    assert (await world.log.bounds(Stream.PUBLICATIONS)).end == end + 1
    assert await world.policy() == policy, "a copy of a decision that was judged changes nothing, for any reader"
    world.ahead_ms += HOUR_MS
    await world.gc()
    end = (await world.log.bounds(Stream.PUBLICATIONS)).end
    await world.gc()
    assert (await world.log.bounds(Stream.PUBLICATIONS)).end == end, "nothing waits any more"


async def test_time_is_told_by_decisions_alone_not_by_heartbeats_of_another_broker() -> None:
    world = World()
    await world.publish("FFF")
    await world.gc()
    world.ahead_ms += HOUR_MS
    await world.replica("r", serving=ref(2))
    world.ahead_ms = 0
    report = await world.gc()
    assert report.deleted == []


async def test_a_dry_run_says_what_a_run_would_do_and_does_nothing() -> None:
    world = World()
    await world.publish("FddFdd")
    before, end = world.held(), (await world.log.bounds(Stream.PUBLICATIONS)).end
    told = await world.gc(dry_run=True)
    assert world.held() == before
    assert (await world.log.bounds(Stream.PUBLICATIONS)).end == end
    done = await world.gc()
    assert told.dry_run
    assert (told.kept, told.retired, told.deleted, told.waiting) == (done.kept, done.retired, done.deleted, done.waiting)
    told = await world.gc(dry_run=True, grace_ms=0)
    done = await world.gc(grace_ms=0)
    assert told.deleted == done.deleted
    assert len(done.deleted) == 3


async def test_an_anchor_frees_the_chain_below_it() -> None:
    world = World()
    await world.publish("Fdddd")
    assert (await world.gc(dry_run=True)).retired == []
    world.made.anchor(3, world.made.weights[3])
    await world.flush()
    report = await world.gc(grace_ms=0)
    assert [held.ref.number for held in report.retired] == [2, 1, 0]
    assert len(report.deleted) == 3
    await world.check()
    for number in (3, 4):
        assert (await world.stage(number)).weights_digest == world.made.version(number).manifest.weights_digest


async def test_files_that_later_versions_share_outlive_the_version_that_brought_them() -> None:
    """`config.json` of 0 is named by all the others, which are built on one another."""
    world = World(sharing=True)
    await world.publish("Fdddd")
    config = world.made.manifest(3).files[0].key
    assert config.startswith("p/r1/0.e1/")
    world.made.anchor(3, world.made.weights[3])
    await world.flush()
    await world.gc(grace_ms=0)
    assert numbers(await world.policy(), retired=True) == {0, 1, 2}
    assert {key for key in world.held() if not key.startswith(("p/r1/3.", "p/r1/4."))} == {config}
    await world.check()
    await world.publish("FF")
    await world.gc(grace_ms=0)
    assert config not in world.held()
    await world.check()


async def test_what_a_version_in_its_grace_shares_stays_as_well() -> None:
    world = World(sharing=True)
    await world.publish("Fd")
    world.made.anchor(1, world.made.weights[1])
    await world.publish("FF")
    config = world.made.manifest(1).files[0].key
    await world.say(retirement(0))
    world.ahead_ms += HOUR_MS
    report = await world.gc()
    assert [held.ref.number for held in report.retired] == [1]
    assert [group.path for group in report.deleted] == ["p/r1/0.e1"]
    assert report.waiting.objects == len({config, *world.made.keys(1)})
    assert config in world.held()


async def test_an_alias_keeps_the_bytes_that_it_shares() -> None:
    world = World()
    await world.publish("Fd")
    world.made.claim("r2", alias=ref(1))
    await world.publish()
    report = await world.gc(grace_ms=0)
    assert {str(held.ref) for held in report.kept} == {"r2/weight_v000000", "r1/weight_v000001", "r1/weight_v000000"}
    assert report.deleted == []
    await world.check()


# --- bytes of no version ---------------------------------------------------------------------------------------------------


def attempt(number: int, epoch: int, run: str = "r1") -> str:
    return f"{attempt_prefix(POLICY, RunId(run), VersionNumber(number), Epoch(epoch))}/{HASH}"


async def test_losing_attempts_go_when_their_epoch_is_over_and_not_before() -> None:
    world = World()
    await world.publish("F")
    lost = [attempt(1, 1), "p/r1/1.e1.0123456789abcdef.json", attempt(0, 1)]
    for key in lost:
        world.store.put(key, b"lost")
    report = await world.gc(grace_ms=0)
    assert report.deleted == []
    assert (report.pending.objects, report.pending.size) == (3, 12)
    assert set(lost) <= world.held()

    world.made.claim("r2", alias=ref(0))
    await world.publish()
    world.store.put(attempt(1, 2, "r2"), b"in flight")
    report = await world.gc(grace_ms=0)
    assert not set(lost) & world.held()
    assert attempt(1, 2, "r2") in world.held()
    await world.check()


async def test_a_base_that_a_claim_may_still_name_stays() -> None:
    """An opener uploads before it claims: only what a run's first claim did not name is free once there was one."""
    world = World()
    await world.publish("F")
    dead = world.made.open_with_base("r2", model(7), claim=False)
    await world.gc(grace_ms=0)
    assert any(key.startswith(dead) for key in world.held())
    base = world.made.open_with_base("r2", model(8))
    await world.publish()
    report = await world.gc(grace_ms=0)
    assert (dead, 3) in [(group.path, len(group.keys)) for group in report.deleted]
    await world.check()
    await world.publish("FF")
    await world.gc(grace_ms=0)
    assert not any(key.startswith(base) for key in world.held()), "a version like any other"
    await world.check()


@pytest.mark.parametrize(
    "key",
    [
        f"p2/r1/0.e0/{HASH}",
        "p/notes.txt",
        f"p/r1/0.e01/{HASH}",
        f"p/r1/00.e0/{HASH}",
        "p/r1/0.e0/short",
        f"p/r1/0.e0/{HASH}/deeper",
        f"p/R1/0.e0/{HASH}",
        f"p/unheard-of/0.e0/{HASH}",
        f"p/r1/7.e99/{HASH}",
        "p/r1/0.e0.0123456789abcdef.json.bak",
        "p/r1/0.e0.txt",
    ],
)
async def test_what_no_writer_of_this_log_made_is_left(key: str) -> None:
    world = World()
    await world.publish("F")
    world.store.put(key, b"theirs")
    report = await world.gc(grace_ms=0)
    assert key in world.held()
    assert report.unknown_keys == (() if key.startswith("p2/") else (key,))


# --- what it refuses -------------------------------------------------------------------------------------------------------


async def test_another_store_is_noticed_before_anything_is_retired() -> None:
    world = World()
    await world.publish("FFF")
    with pytest.raises(CorruptObject, match="is this the store"):
        await world.gc(store=MemoryStore())
    assert numbers(await world.policy(), retired=True) == set()


async def test_a_policy_that_nobody_claimed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nothing was decided"):
        await World().gc()


async def test_without_a_view_of_the_fleet_nothing_happens() -> None:
    world = World()
    await world.publish("FFF")

    def blind(ledger: Ledger) -> None:
        async def read_fleet(timeout: float = 0) -> Any:
            raise Unavailable("activations: not read to its end")

        ledger.read_fleet = read_fleet  # type: ignore[method-assign]

    with pytest.raises(Unavailable, match="activations"):
        await world.gc(tap=blind)
    assert numbers(await world.policy(), retired=True) == set()


async def test_a_log_that_is_away_is_unavailable_and_nothing_is_deleted() -> None:
    world = World()
    await retired_and_hours_later(world)
    before = world.held()
    log = FaultyLog(world.log)

    def cut(step: str, done: int, total: int) -> None:
        if step == "deleting" and done == 1:
            log.cut()

    with pytest.raises(Unavailable):
        await world.gc(log=log, progress=cut)
    assert before - world.held() == {key for key in before if key.startswith("p/r1/2.")}
    log.mend()
    await world.gc()
    await world.check()


# --- deaths ----------------------------------------------------------------------------------------------------------------


class Death(Exception):
    """Of the process, at this moment."""


def dying(at: int) -> Callable[[str, int, int], None]:
    left = [at]

    def tell(step: str, done: int, total: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Death

    return tell


async def test_killed_after_any_step_the_next_run_comes_to_the_same_end(tmp_path: Path) -> None:
    async def at_the_end(world: World) -> set[str]:
        await world.gc()
        world.ahead_ms += HOUR_MS
        await world.gc()
        return world.held()

    whole = World(sharing=True)
    await whole.publish("FddFdd")
    expected = await at_the_end(whole)
    deaths = 0
    for at in range(100):
        world = World(DirectoryStore(tmp_path / str(at)), sharing=True)
        await world.publish("FddFdd")
        tell = dying(at)
        try:
            await world.gc(progress=tell)
            world.ahead_ms += HOUR_MS
            await world.gc(progress=tell)
        except Death:
            deaths += 1
        else:
            break
        await world.check()
        world.check_manifests_lead_to_objects()
        assert await at_the_end(world) == expected
        await world.check()
    assert deaths >= 9, "of which after each retirement, and before each version's bytes"


@pytest.mark.parametrize("kind", [Kind.FAIL_BEFORE, Kind.FAIL_AFTER])
async def test_killed_at_any_delete_the_next_run_comes_to_the_same_end(kind: Kind) -> None:
    for nth in range(1, 100):
        world = World()
        await retired_and_hours_later(world)
        store = FaultyStore(world.store, Fault(call="delete", kind=kind, nth=nth))
        try:
            await world.gc(store=store)
        except Unavailable:
            pass
        else:
            break
        await world.check()
        world.check_manifests_lead_to_objects()
        await world.gc()
        assert {key.split("/")[2].split(".")[0] for key in world.held()} == {"3", "4", "5"}
        await world.check()
    assert nth > 9


async def test_no_object_goes_before_the_manifest_that_names_it() -> None:
    world = World()
    await retired_and_hours_later(world)
    store = FaultyStore(world.store)
    await world.gc(store=store)
    deleted = [key for call, key in store.calls if call == "delete"]
    for number in (2, 1, 0):
        manifest, *objects = (key for key in deleted if key.startswith(f"p/r1/{number}."))
        assert manifest.endswith(".json")
        assert not any(key.endswith(".json") for key in objects)


@pytest.mark.parametrize("fault", list(LogFault))
@pytest.mark.parametrize("nth", [0, 1, 2])
async def test_one_fault_of_the_log_changes_no_outcome(fault: LogFault, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.operators.ledger.AGAIN_SECONDS", (0.01, 0.1))
    world = World()
    await world.publish("FFFFF")
    log = FaultyLog(world.log, script(*[LogFault.NONE] * nth, fault), slow=0.01)
    report = await world.gc(log=log)
    assert [held.ref.number for held in report.retired] == [2, 1, 0]
    await log.release()
    assert numbers(await world.policy(), retired=True) == {0, 1, 2}
    accepted = [event for event in await publications(world) if isinstance(event, VersionRetired)]
    assert len({event.event_id for event in accepted}) == 3, "the same event again, never another one"


async def test_an_outcome_that_stays_unknown_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.operators.ledger.AGAIN_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(Ledger.settle, "__defaults__", (0.2,))
    world = World()
    await world.publish("FFF")
    lost = FaultyLog(world.log, lambda stream, draft: LogFault.LOSE)
    with pytest.raises(OutcomeUnknown, match="may still count"):
        await world.gc(log=lost)
    refused = FaultyLog(world.log, lambda stream, draft: LogFault.REFUSE)
    with pytest.raises(Unavailable, match="nothing was appended"):
        await world.gc(log=refused)


async def test_on_sqlite_and_a_directory(tmp_path: Path) -> None:
    async with open_log(f"sqlite://{tmp_path / 'log.db'}") as log:
        await log.setup(create=True)
        world = World(DirectoryStore(tmp_path / "store"), log=log)
        await world.publish("FddFdd")
        await world.gc(grace_ms=0)
        assert {key.split("/")[2].split(".")[0] for key in world.held()} == {"3", "4", "5"}
        assert sorted(path.name for path in (tmp_path / "store" / "p" / "r1").iterdir() if path.is_dir()) == [
            "3.e1",
            "4.e1",
            "5.e1",
        ]
        await world.check()
