"""Anchors added without a trainer: joiners need less, pointers lead to them, and who dies or claims in between breaks nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stitch.core.errors import CorruptObject, OutcomeUnknown, Unavailable, VersionGone
from stitch.core.events import AnchorAdded
from stitch.core.manifest import Codec, Kind
from stitch.log.faulty import Fault as LogFault
from stitch.log.faulty import FaultyLog, script
from stitch.log.views import new_event_id
from stitch.operators.ledger import Ledger
from stitch.store.faulty import Fault, FaultyStore
from stitch.store.faulty import Kind as StoreFault
from stitch.store.manifests import read_manifest
from stitch.weights.staging import Staging
from tests.operators.published import POLICY
from tests.operators.world import World, before_first_decision, publications, ref, retirement

pytestmark = pytest.mark.unit


async def test_a_joiner_needs_one_anchor_and_few_deltas() -> None:
    world = World()
    await world.publish("Fdsdsdsdsd")
    before = await world.stage(9)
    report = await world.compact(every=4)
    assert [done.before.ref.number for done in report.anchored] == [4, 8]
    assert [done.before.deltas for done in report.anchored] == [4, 4], "the second one's chain ends at the first"
    after = await world.stage(9)
    assert after.weights_digest == before.weights_digest
    assert after.bytes_downloaded < before.bytes_downloaded
    anchor = (await world.policy()).versions[ref(8)].anchor
    assert anchor is not None
    files = (*read_manifest(world.store, anchor).weights, *world.made.manifest(9).weights, *world.made.manifest(9).files)
    assert after.bytes_downloaded == sum(file.size for file in files)
    await world.check()
    assert (await world.compact(every=4)).planned == ()


async def test_the_full_form_is_of_the_version_and_stands_on_its_own_feet() -> None:
    world = World(sharing=True)
    await world.publish("Fdd")
    await world.compact(2)
    version = (await world.policy()).versions[ref(2)]
    assert version.anchor is not None
    delta, full = read_manifest(world.store, version.manifest), read_manifest(world.store, version.anchor)
    assert delta.files[0].key.startswith("p/r1/0.e1/")
    assert all(file.key.startswith("p/r1/2.e1/") for file in (*full.weights, *full.files))
    assert (full.kind, full.codec, full.base, full.epoch) == (Kind.FULL, Codec.SAFETENSORS, None, 1)
    assert (full.ref, full.parent, full.tensors, full.probes) == (delta.ref, delta.parent, delta.tensors, delta.probes)
    assert version.anchor_size == sum(file.size for file in (*full.weights, *full.files))
    pointer = await world.latest_pointer()
    assert pointer is not None
    assert (pointer.anchor, pointer.anchor_manifest) == (ref(2), version.anchor), "who knows the pointer alone finds it"


async def test_after_compaction_and_retention_a_joiner_needs_nothing_that_went() -> None:
    """D6: the delta form of the anchored version still names a base that is gone, and nobody follows it there."""
    world = World(sharing=True)
    await world.publish("Fdsdsdsd")
    await world.compact(5)
    report = await world.gc(retain=2, grace_ms=0)
    assert [held.ref.number for held in report.retired] == [4, 3, 2, 1, 0]
    assert not any(key.startswith(tuple(f"p/r1/{n}.e1." for n in range(5))) for key in world.held())
    for number in (5, 6, 7):
        assert (await world.stage(number)).weights_digest == world.made.version(number).manifest.weights_digest
    await world.check()


async def test_who_knows_the_pointer_alone_needs_nothing_that_went_either(tmp_path: Path) -> None:
    world = World(sharing=True)
    await world.publish("Fdsdsds")
    await world.compact(4)
    await world.gc(retain=1, grace_ms=0)
    pointer = await world.latest_pointer()
    assert pointer is not None
    with Staging(tmp_path, world.store) as staging:
        staged = staging.stage(pointer.target.of(POLICY), pointer.manifest, anchors=[pointer.anchor_manifest])
    assert staged.weights_digest == world.made.version(6).manifest.weights_digest
    assert {held.split("/")[2].split(".")[0] for held in world.held()} >= {"4", "5", "6"}
    assert not any(key.startswith("p/r1/3.") for key in world.held())


async def test_a_dry_run_does_nothing() -> None:
    world = World()
    await world.publish("Fddd")
    before = world.held()
    report = await world.compact(every=2, dry_run=True)
    assert [(chain.ref.number, chain.deltas) for chain in report.planned] == [(2, 2)]
    assert report.anchored == []
    assert world.held() == before
    assert not any(isinstance(event, AnchorAdded) for event in await publications(world))


async def test_what_has_a_full_form_is_left() -> None:
    world = World()
    await world.publish("Fdd")
    world.made.anchor(2, world.made.weights[2])
    await world.flush()
    report = await world.compact(0, 1, 2)
    assert [done.before.ref.number for done in report.anchored] == [1]
    assert report.skipped == [(ref(0), "a full checkpoint already"), (ref(2), "anchored already")]


async def test_an_alias_is_anchored_where_its_bytes_are() -> None:
    world = World()
    await world.publish("Fdd")
    world.made.claim("r2", alias=ref(2))
    await world.publish()
    report = await world.compact(0, run="r2")
    assert [done.before.ref for done in report.anchored] == [ref(2)]
    anchor = (await world.policy()).versions[ref(2)].anchor
    assert anchor is not None
    assert anchor.key.startswith("p/r1/2.e2."), "under the version's own number, and the present epoch"
    assert (await world.stage(0, "r2")).weights_digest == world.made.version(2, "r1").manifest.weights_digest
    pointer = await world.latest_pointer()
    assert pointer is not None
    assert pointer.anchor_manifest == anchor


# --- races ------------------------------------------------------------------------------------------------------------------------


async def test_a_claim_meanwhile_makes_it_try_again_under_the_new_epoch() -> None:
    world = World()
    await world.publish("Fdd")

    async def claim() -> None:
        world.made.rewind(2)
        await world.flush()

    report = await world.compact(2, tap=before_first_decision(claim))
    assert [done.before.ref.number for done in report.anchored] == [2]
    assert report.anchored[0].manifest_key.startswith("p/r1/2.e2.")
    stale = {key for key in world.held() if key.startswith("p/r1/2.e1")} - set(world.made.keys(2))
    assert stale, "the first upload"
    await world.gc()
    assert not stale & world.held(), "its epoch is over, and no version names it"
    await world.check()


async def test_trainers_that_never_stop_claiming_are_said() -> None:
    world = World()
    await world.publish("Fdd")

    def claim(step: str, done: int, total: int) -> None:
        if step.endswith("deciding"):
            world.made.rewind(2)
            world.now(world.flush)

    with pytest.raises(Unavailable, match="claimed the policy 3 times"):
        await world.compact(2, progress=claim)
    assert (await world.policy()).versions[ref(2)].anchor is None


async def test_one_that_is_retired_meanwhile_is_said() -> None:
    world = World()
    await world.publish("FdddFF")
    report = await world.compact(3, tap=before_first_decision(lambda: world.say(retirement(3))))
    assert report.skipped == [(ref(3), "the anchor was refused: version_unusable")]

    world = World()
    await world.publish("FdddFF")

    def retire(step: str, done: int, total: int) -> None:
        if step.endswith("deciding"):
            world.now(lambda: world.say(retirement(3)))

    with pytest.raises(VersionGone, match="was retired"):
        await world.compact(2, 3, progress=retire)
    assert (await world.policy()).versions[ref(2)].anchor is not None


async def test_another_compactor_was_first() -> None:
    world = World()
    await world.publish("Fdd")
    report = await world.compact(2, tap=before_first_decision(lambda: world.compact(2)))
    assert report.skipped == [(ref(2), "the anchor was refused: nothing_to_do")]
    await world.check()


async def test_a_collector_meanwhile_takes_nothing_of_it() -> None:
    """Its bytes are of the present epoch, and no accepted version names them yet."""
    world = World()
    await world.publish("Fdd")
    report = await world.compact(2, tap=before_first_decision(lambda: world.gc(grace_ms=0)))
    assert len(report.anchored) == 1
    await world.check()


# --- deaths and faults ----------------------------------------------------------------------------------------------------


async def test_killed_after_the_upload_the_next_run_writes_the_same_keys() -> None:
    whole = World()
    await whole.publish("Fdd")
    await whole.compact(2)

    class Death(Exception):
        pass

    def die(step: str, done: int, total: int) -> None:
        if step.endswith("deciding"):
            raise Death

    world = World()
    await world.publish("Fdd")
    with pytest.raises(Death):
        await world.compact(2, progress=die)
    assert world.held() == whole.held()
    await world.gc(grace_ms=0)
    assert world.held() == whole.held()
    await world.compact(2)
    assert world.held() == whole.held()
    await world.check()


async def test_killed_at_any_put_nothing_is_decided_and_the_next_run_does_it() -> None:
    for nth in range(1, 20):
        world = World()
        await world.publish("Fdd")
        store = FaultyStore(world.store, Fault(call="put", kind=StoreFault.FAIL_BEFORE, nth=nth))
        try:
            await world.compact(2, store=store)
        except Unavailable:
            pass
        else:
            break
        assert (await world.policy()).versions[ref(2)].anchor is None
        await world.check()
        assert len((await world.compact(2)).anchored) == 1
        await world.check()
    assert nth > 3


async def test_damaged_bytes_make_no_anchor() -> None:
    world = World()
    await world.publish("Fdd")
    key = world.made.manifest(1).weights[0].key
    store = FaultyStore(world.store, Fault(call="download", kind=StoreFault.FLIP, key=key, at=900))
    with pytest.raises(CorruptObject):
        await world.compact(2, store=store)
    assert (await world.policy()).versions[ref(2)].anchor is None


@pytest.mark.parametrize("fault", list(LogFault))
async def test_one_fault_of_the_log_changes_no_outcome(fault: LogFault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.operators.ledger.AGAIN_SECONDS", (0.01, 0.1))
    world = World()
    await world.publish("Fdd")
    log = FaultyLog(world.log, script(fault), slow=0.01)
    report = await world.compact(2, log=log)
    assert len(report.anchored) == 1
    await log.release()
    assert len({event.event_id for event in await publications(world) if isinstance(event, AnchorAdded)}) == 1
    assert (await world.policy()).versions[ref(2)].anchor is not None


async def test_an_unknown_outcome_is_said_and_another_run_finds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.operators.ledger.AGAIN_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(Ledger.settle, "__defaults__", (0.2,))
    world = World()
    await world.publish("Fdd")
    log = FaultyLog(world.log, lambda stream, draft: LogFault.HOLD)
    with pytest.raises(OutcomeUnknown):
        await world.compact(2, log=log)
    await world.gc(grace_ms=0)
    await log.release()
    assert (await world.policy()).versions[ref(2)].anchor is not None, "it landed late, and its bytes were there"
    await world.check()
    assert (await world.compact(2)).skipped == [(ref(2), "anchored already")]


async def test_what_an_anchor_expects_has_passed_for_good_once_the_epoch_has() -> None:
    """So that is a definite no, although no copy was read back."""
    world = World()
    await world.publish("Fd")
    stale = anchor_of(world)
    world.made.rewind(1)
    await world.flush()
    async with world.ledger(FaultyLog(world.log, lambda stream, draft: LogFault.LOSE)) as ledger:
        await ledger.read_on()
        assert await ledger.settle(stale, 0.2) == "stale_epoch"


def anchor_of(world: World) -> AnchorAdded:
    probe = World()
    probe.made.forms("Fd")
    probe.made.anchor(1, probe.made.weights[1])
    added: Any = probe.made.decisions[-1]
    assert isinstance(added, AnchorAdded)
    return AnchorAdded(
        policy=added.policy,
        version=added.version,
        event_id=new_event_id(),
        writer=added.writer,
        epoch=world.made.policy.epoch,
        manifest=added.manifest,
        size=added.size,
    )
