"""What is kept, retired and free: by example, and for every log whatever was appended to it (I1, I7)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core import lineage as folds
from stitch.core import retention
from stitch.core.errors import Unavailable
from stitch.core.events import AnchorAdded, Decision, Phase, RunClaimed, VersionPublished, VersionRetired
from stitch.core.fleet import Fleet
from stitch.core.ids import Epoch, EventId, Offset, WriterId
from stitch.core.lineage import Lineage, PolicyLineage, Position, Verdict
from stitch.core.manifest import ManifestRef
from stitch.core.retention import Attempt, Fate
from tests.core.agents import Agent, Stream
from tests.core.builders import POLICY, History, chain_of, version
from tests.core.test_lineage_properties import logs

pytestmark = pytest.mark.unit

EXAMPLES = settings(max_examples=150, deadline=None)
HOUR_MS = 3_600_000


def kept(history: History, fleet: Fleet | None = None, *, retain: int = 1) -> set[str]:
    return {f"{ref.run}/{ref.number}" for ref in retention.plan(history.policy, fleet or Fleet(), retain=retain).kept}


def fleet_of(**serving: str) -> Stream:
    stream = Stream()
    for replica, text in serving.items():
        agent = Agent(stream, replica)
        agent.join(phase=Phase.SERVING, serving=version(text), target=version(text))
        agent.say()
    return stream


# --- versions ---------------------------------------------------------------------------------------------------------------------


def full_versions(count: int) -> History:
    history = History()
    history.claimed("a")
    history.published(*(f"a/{number}" for number in range(count)))
    return history


def test_without_a_view_of_the_fleet_nothing_is_planned() -> None:
    with pytest.raises(Unavailable, match="not caught up"):
        retention.plan(full_versions(3).policy, None)


def test_the_newest_are_kept_and_the_rest_goes_newest_first() -> None:
    history = full_versions(5)
    plan = retention.plan(history.policy, Fleet(), retain=2)
    assert [ref.number for ref in plan.kept] == [4, 3]
    assert [ref.number for ref in plan.retire] == [2, 1, 0]
    assert plan.kept[version("a/4")] == ("the tip", "channel latest names it", "among the 2 newest")


def test_a_chain_is_kept_down_to_its_full_form_and_an_anchor_shortens_it() -> None:
    history = chain_of("a/0", "a/1", "a/2", "a/3")
    assert kept(history) == {"a/0", "a/1", "a/2", "a/3"}
    assert retention.plan(history.policy, Fleet(), retain=1).kept[version("a/0")] == ("a/weight_v000001 is built from it",)
    history.accepted(history.anchor("a/2"))
    assert kept(history) == {"a/2", "a/3"}


def test_what_a_channel_names_and_would_fall_back_to() -> None:
    history = full_versions(6)
    for target in ("a/0", "a/1", "a/2"):
        history.accepted(history.move("stable", target))
    assert kept(history) == {"a/5", "a/4", "a/2", "a/1"}
    for each in retention.plan(history.policy, Fleet(), retain=1).retire:
        history.accepted(history.retirement(f"a/{each.number}"))
    history.accepted(history.quarantine("a/2"))
    history.accepted(history.quarantine("a/5"))
    targets = {name: channel.target for name, channel in history.policy.channels.items()}
    assert targets == {"stable": version("a/1"), "latest": version("a/4")}


def test_the_way_back_is_not_the_same_weights_under_another_name() -> None:
    history = full_versions(3)
    history.claimed("b", 0, alias="a/2")
    # b/0 is a/2: a quarantine of the one takes the other, and `latest` goes to a/1.
    assert kept(history) == {"b/0", "a/2", "a/1"}
    history.accepted(history.quarantine("b/0"))
    assert history.latest() == version("a/1")


def test_what_replicas_serve_hold_or_want_is_kept_with_its_chain() -> None:
    history = full_versions(8)
    stream = fleet_of(one="a/1", two="a/1")
    agent = Agent(stream, "three")
    agent.join(phase=Phase.SERVING, serving=version("a/2"), staged=version("a/3"), target=version("a/4"))
    agent.say()
    assert kept(history, stream.fleet) == {"a/7", "a/6", "a/1", "a/2", "a/3", "a/4"}
    plan = retention.plan(history.policy, stream.fleet, retain=1)
    assert plan.kept[version("a/1")] == ("in use by replica one and 1 other",)


@pytest.mark.parametrize("phase", [Phase.LEFT, Phase.FAILED])
def test_who_left_or_failed_uses_nothing(phase: Phase) -> None:
    history = full_versions(3)
    stream = Stream()
    agent = Agent(stream, "gone")
    agent.join(phase=phase, target=version("a/0"))
    agent.say()
    assert "a/0" not in kept(history, stream.fleet)


def test_who_fell_silent_counts_as_long_as_the_view_has_it() -> None:
    history = full_versions(3)
    stream = fleet_of(silent="a/0")
    other = Agent(stream, "other")
    other.join()
    other.say(after_ms=HOUR_MS)
    assert stream.fleet.silent(stream.member("silent"))
    assert "a/0" in kept(history, stream.fleet)


def test_replicas_of_another_policy_and_versions_unknown_yet_are_no_matter() -> None:
    history = full_versions(3)
    stream = fleet_of(ahead="a/77")
    assert kept(history, stream.fleet) == {"a/2", "a/1"}


def test_abandoned_versions_go() -> None:
    history = full_versions(4)
    history.claimed("a", 1)
    history.published("a/4")
    assert kept(history, retain=2) == {"a/4", "a/1"}


# --- bytes ------------------------------------------------------------------------------------------------------------------------


def fate(history: History, text: str, *, due: Collection[str] = (), **told: bool) -> Fate:
    """`a/3.e2` or `a/3.base-x`."""
    place, _, how = text.partition(".")
    ref = version(place)
    epoch = Epoch(int(how[1:])) if how.startswith("e") else None
    attempt = Attempt(run=ref.run, number=ref.number, epoch=epoch, base=None if epoch is not None else how)
    return retention.judge(history.policy, attempt, due={version(each) for each in due}, **{"named": False, **told}).fate


def test_losing_attempts_go_once_their_epoch_is_over() -> None:
    history = full_versions(2)
    assert fate(history, "a/2.e1") is Fate.KEPT, "its event may still land"
    history.claimed("a", 1)
    assert fate(history, "a/2.e1") is Fate.FREE
    assert fate(history, "a/2.e2") is Fate.KEPT
    assert fate(history, "a/2.e3") is Fate.UNKNOWN, "another log's, or this view is old"
    assert fate(history, "x/0.e1") is Fate.UNKNOWN


def test_an_anchor_that_was_not_accepted_goes_with_its_epoch() -> None:
    history = chain_of("a/0", "a/1")
    assert fate(history, "a/1.e1") is Fate.KEPT
    history.claimed("a", 1)
    assert fate(history, "a/1.e1") is Fate.FREE
    assert fate(history, "a/1.e1", named=True) is Fate.KEPT


def test_bytes_of_a_retired_version_wait_until_it_is_due_whatever_their_epoch() -> None:
    history = full_versions(3)
    history.accepted(history.retirement("a/0"))
    assert fate(history, "a/0.e1") is Fate.WAITING
    assert fate(history, "a/0.e1", due={"a/0"}) is Fate.FREE
    assert fate(history, "a/0.e1", due={"a/0"}, named=True) is Fate.KEPT, "a later version shares a file of it"
    assert fate(history, "a/0.e1", due={"a/0"}, lingers=True) is Fate.WAITING, "one does that is not due itself"


def test_a_base_goes_only_when_no_claim_can_name_it() -> None:
    history = History()
    assert fate(history, "a/0.base-x") is Fate.KEPT, "an opener uploads before it claims"
    history.claimed("a")
    assert fate(history, "a/0.base-x") is Fate.KEPT, "the run has no version yet: another opener may bring it"
    history.published("a/0")
    assert fate(history, "a/0.base-x") is Fate.FREE
    history.claimed("b", 0, base="theirs")
    assert fate(history, "b/0.base-x") is Fate.FREE
    assert fate(history, "b/0.base-x", named=True) is Fate.KEPT


def test_a_superseded_run_without_versions_gets_none() -> None:
    history = History()
    history.claimed("a")
    history.claimed("b")
    assert fate(history, "a/0.base-x") is Fate.FREE


def test_due_is_told_by_the_log_s_clock_alone_and_never_while_a_replica_uses_it() -> None:
    history = full_versions(3)
    history.accepted(history.retirement("a/0"))
    retired = history.policy.versions[version("a/0")].retired
    assert retired is not None
    at = retired.time_ms
    assert retention.due(history.policy, Fleet(), now_ms=at + HOUR_MS - 1) == frozenset()
    assert retention.due(history.policy, Fleet(), now_ms=at + HOUR_MS) == {version("a/0")}
    assert retention.due(history.policy, fleet_of(r="a/0").fleet, now_ms=at + HOUR_MS) == frozenset()


# --- for every log ----------------------------------------------------------------------------------------------------------------


def fold(log: list[Decision], start: Lineage | None = None, first: int = 0) -> Iterator[tuple[PolicyLineage, Decision, Verdict]]:
    lineage = start or Lineage()
    for n, decision in enumerate(log, first):
        lineage, verdict = folds.apply(lineage, decision, Position(offset=Offset(n), time_ms=n))
        yield lineage.policy(POLICY), decision, verdict


def last(log: list[Decision]) -> PolicyLineage:
    policy = Lineage().policy(POLICY)
    for after, _, _ in fold(log):
        policy = after
    return policy


@st.composite
def fleets(draw: Any) -> Fleet:
    stream = Stream()
    refs = st.one_of(
        st.none(), st.builds(lambda run, number: version(f"{run}/{number}"), st.sampled_from("abc"), st.integers(0, 6))
    )
    for replica in draw(st.lists(st.sampled_from("xyz"), max_size=4)):
        agent = Agent(stream, replica, life=str(stream.now_ms))
        agent.join(phase=draw(st.sampled_from(list(Phase))), serving=draw(refs), staged=draw(refs), target=draw(refs))
        agent.say(after_ms=draw(st.integers(0, 20_000)))
    return stream.fleet


@EXAMPLES
@given(logs(), fleets(), st.integers(1, 5))
def test_every_retirement_of_a_plan_counts_and_then_nothing_is_left_to_retire(
    log: list[Decision], fleet: Fleet, retain: int
) -> None:
    plan = retention.plan(last(log), fleet, retain=retain)
    retirements: list[Decision] = [
        VersionRetired(policy=POLICY, version=ref, event_id=EventId(f"gc{n}"), writer=WriterId("gc"))
        for n, ref in enumerate(plan.retire)
    ]
    outcome = list(fold([*log, *retirements]))[len(log) :]
    assert all(verdict is Verdict.ACCEPTED for _, _, verdict in outcome)
    policy = last([*log, *retirements])
    again = retention.plan(policy, fleet, retain=retain)
    assert again.retire == ()
    assert again.kept == plan.kept
    looked_ahead = retention.after(last(log), plan, Position(offset=Offset(0), time_ms=0))
    assert {v.ref for v in policy.versions.values() if v.retired} == {v.ref for v in looked_ahead.versions.values() if v.retired}


@EXAMPLES
@given(logs(), fleets(), st.integers(1, 5))
def test_whatever_anybody_needs_is_kept(log: list[Decision], fleet: Fleet, retain: int) -> None:
    policy = last(log)
    plan = retention.plan(policy, fleet, retain=retain)
    unretired = {v.ref for v in policy.versions.values() if v.retired is None}
    assert set(plan.kept) | set(plan.retire) == unretired
    assert not set(plan.kept) & set(plan.retire)
    roots = {channel.target for channel in policy.channels.values()} | {policy.tip}
    roots |= {v.ref for v in itertools.islice((v for v in policy.path(policy.tip) if v.retired is None), retain)}
    for member in fleet.members.values():
        if member.state.phase not in (Phase.LEFT, Phase.FAILED):
            roots |= {member.state.serving, member.state.staged, member.state.target} & unretired
    needed = {link.ref for ref in roots - {None} for link in policy.chain(ref)}  # type: ignore[arg-type]
    assert needed <= set(plan.kept)
    assert all(why and all(why) for why in plan.kept.values())


def attempt_of(decision: Decision) -> Attempt | None:
    """Where the bytes lie that the decision names."""
    match decision:
        case VersionPublished():
            return Attempt(run=decision.run, number=decision.number, epoch=decision.epoch)
        case AnchorAdded():
            return Attempt(run=decision.version.run, number=decision.version.number, epoch=decision.epoch)
        case RunClaimed() if decision.base is not None and decision.boot is not None:
            return Attempt(run=decision.run, number=decision.boot, epoch=None, base="0" * 16)
        case _:
            return None


def with_bytes_of_its_own(decision: Decision) -> Decision:
    """The decision with a manifest that no other names, under the id of its event."""

    def own(ref: ManifestRef) -> ManifestRef:
        return replace(ref, key=decision.event_id)

    match decision:
        case VersionPublished() | AnchorAdded():
            return replace(decision, manifest=own(decision.manifest))
        case RunClaimed() if decision.base is not None:
            return replace(decision, base=own(decision.base))
        case _:
            return decision


def named_by(policy: PolicyLineage) -> set[str]:
    kept = [v for v in policy.versions.values() if v.retired is None]
    return {ref.key for v in kept for ref in (v.manifest, v.anchor) if ref is not None}


@settings(max_examples=400, deadline=None)
@given(logs(), st.data())
def test_what_is_free_stays_free_whatever_is_decided_later(log: list[Decision], data: st.DataObject) -> None:
    """I1 and I7: all bytes of the whole log lie there already, those of decisions still in flight too. A collector comes at any
    moment, with a view of any age, deletes what is free in it, and no version that is accepted and unretired ever lacks a
    manifest that it needs."""
    log = [with_bytes_of_its_own(decision) for decision in log]
    states = [Lineage().policy(POLICY), *(policy for policy, _, _ in fold(log))]
    seen = data.draw(st.integers(0, len(log)))
    policy = states[seen]
    due = retention.due(policy, Fleet(), now_ms=len(log), grace_ms=data.draw(st.integers(0, len(log))))
    named = named_by(policy)
    gone = {
        decision.event_id
        for decision in log
        if (attempt := attempt_of(decision)) is not None
        and retention.judge(policy, attempt, named=decision.event_id in named, due=due).fate is Fate.FREE
    }
    for state in states[seen:]:
        for v in state.versions.values():
            if v.retired is None:
                needed = {link.anchor.key if link.anchor else link.manifest.key for link in state.chain(v.ref)} | {v.manifest.key}
                assert not needed & gone, f"{v.ref} lost {needed & gone}"
