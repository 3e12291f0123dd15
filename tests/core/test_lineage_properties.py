"""Laws of the fold that hold for every log, whatever was appended to it by whom."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core import lineage as folds
from stitch.core import pointers
from stitch.core.admission import Constraint, Gone, resolve, satisfies
from stitch.core.events import Decision, RunClaimed, RunVersion, VersionPublished
from stitch.core.ids import EventId, Generation, Offset, RunId, VersionNumber, WriterId
from stitch.core.lineage import Lineage, PolicyLineage, Position, Verdict
from stitch.core.replay import plain, state_digest
from tests.core.builders import POLICY, History, version

pytestmark = pytest.mark.unit

RUNS = ("a", "b", "c")
EXAMPLES = settings(max_examples=100, deadline=None)


def _number(draw: Any) -> int:
    return draw(st.integers(0, 6))  # type: ignore[no-any-return]


def _decision(draw: Any, history: History) -> Decision:
    """One decision that may count now or not; most of the time it is close to counting."""
    policy = history.policy
    known = sorted(policy.versions, key=str)
    a_version = str(draw(st.sampled_from([f"{v.run}/{v.number}" for v in known] or ["a/0"])))
    run = draw(st.sampled_from(RUNS))
    owner = policy.owner.run if policy.owner else run
    greatest = policy.greatest(owner)
    match draw(st.sampled_from(["claim", "publish", "publish", "publish", "anchor", "move", "quarantine", "retire"])):
        case "claim":
            how = draw(st.sampled_from(["boot", "boot", "empty", "alias", "base"]))
            if how == "boot":
                ref = version(a_version)
                return history.claim(ref.run, ref.number, writer=f"w{len(history.log)}")
            if how == "alias":
                return history.claim(run, _number(draw), alias=a_version, writer=f"w{len(history.log)}")
            if how == "base":
                return history.claim(run, _number(draw), base=f"base-{len(history.log)}", writer=f"w{len(history.log)}")
            return history.claim(run, writer=f"w{len(history.log)}")
        case "publish":
            number = draw(st.sampled_from([0 if greatest is None else greatest + 1, _number(draw)]))
            base = draw(st.sampled_from([None, a_version]))
            slips: dict[str, Any] = draw(
                st.sampled_from([{}, {}, {}, {"epoch": 1}, {"expected_head": EventId("e0")}, {"run": RunId(run)}])
            )
            return history.publication(f"{owner}/{number}", base=base, **slips)
        case "anchor":
            return history.anchor(a_version)
        case "move":
            return history.move(draw(st.sampled_from(["stable", "canary", "latest"])), a_version)
        case "quarantine":
            return history.quarantine(a_version)
        case _:
            return history.retirement(a_version)


@st.composite
def logs(draw: Any, max_size: int = 24) -> list[Decision]:
    """A log of one policy, with late and doubled copies of earlier records here and there."""
    history = History()
    if draw(st.integers(0, 9)):  # mostly a run with some versions to begin with
        history.claimed("a", 0, base="first")
        for number in range(1, 1 + draw(st.integers(0, 3))):
            history.published(f"a/{number}", base=draw(st.sampled_from([None, f"a/{number - 1}"])))
    late: list[Decision] = []
    for _ in range(draw(st.integers(0, max_size))):
        match draw(st.sampled_from(["now", "now", "now", "now", "late", "again", "land"])):
            case "now":
                history.append(_decision(draw, history))
            case "late":
                decision = _decision(draw, history)
                if all(decision.event_id != d.event_id for d in late):
                    late.append(decision)
                    history.append(history.move("late", "a/9", sequence=99))  # keeps ids unique
            case "again" if history.log:
                history.append(draw(st.sampled_from(history.log)))
            case "land" if late:
                history.append(late.pop(draw(st.integers(0, len(late) - 1))))
            case _:
                pass
    return history.log


def fold(log: list[Decision], start: Lineage | None = None, first: int = 0) -> tuple[Lineage, list[Verdict]]:
    lineage, verdicts = start or Lineage(), []
    for n, decision in enumerate(log, first):
        lineage, verdict = folds.apply(lineage, decision, Position(offset=Offset(n), time_ms=n))
        verdicts.append(verdict)
    return lineage, verdicts


def prefixes(log: list[Decision]) -> list[PolicyLineage]:
    lineage, states = Lineage(), [Lineage().policy(POLICY)]
    for n, decision in enumerate(log):
        lineage, _ = folds.apply(lineage, decision, Position(offset=Offset(n), time_ms=n))
        states.append(lineage.policy(POLICY))
    return states


@EXAMPLES
@given(logs(), st.integers(0, 30))
def test_prefix_then_suffix_is_the_whole(log: list[Decision], cut: int) -> None:
    cut = min(cut, len(log))
    whole, _ = fold(log)
    first, _ = fold(log[:cut])
    second, _ = fold(log[cut:], first, cut)
    assert second == whole
    assert state_digest(second) == state_digest(whole)


@EXAMPLES
@given(logs(), st.data())
def test_a_copy_anywhere_later_changes_nothing(log: list[Decision], data: st.DataObject) -> None:
    """Up to the positions of what comes after it, which moves by one: so the copy takes no position of its own here."""
    if not log:
        return
    at = data.draw(st.integers(0, len(log) - 1))
    later = data.draw(st.integers(at + 1, len(log)))
    lineage, _ = fold(log[:later])
    copied, verdict = folds.apply(lineage, log[at], Position(offset=Offset(later), time_ms=later))
    assert verdict is Verdict.DUPLICATE
    assert copied == lineage


@EXAMPLES
@given(logs())
def test_what_is_refused_changes_nothing_but_its_own_verdict(log: list[Decision]) -> None:
    _, verdicts = fold(log)
    for before, after, decision, verdict in zip(prefixes(log), prefixes(log)[1:], log, verdicts, strict=False):
        if verdict is Verdict.ACCEPTED:
            assert after.verdicts[decision.event_id] is Verdict.ACCEPTED
        else:
            assert (before.head, before.tip, before.runs) == (after.head, after.tip, after.runs)
            assert (before.versions, before.channels, before.owner) == (after.versions, after.channels, after.owner)


@EXAMPLES
@given(logs())
def test_writers_that_were_fenced_never_count(log: list[Decision]) -> None:
    _, verdicts = fold(log)
    epoch = 0
    for decision, verdict in zip(log, verdicts, strict=True):
        if verdict is Verdict.ACCEPTED and isinstance(decision, RunClaimed):
            epoch += 1
        if isinstance(decision, VersionPublished) and decision.epoch != epoch:
            assert verdict is not Verdict.ACCEPTED


@EXAMPLES
@given(logs())
def test_what_was_decided_stands_for_good(log: list[Decision]) -> None:
    states = prefixes(log)
    for before, after in itertools.pairwise(states):
        assert after.epoch >= before.epoch
        for ref, was in before.versions.items():
            now = after.versions[ref]
            assert (now.manifest, now.parent, now.base, now.alias_of) == (was.manifest, was.parent, was.base, was.alias_of)
            assert now.abandoned >= was.abandoned
            assert now.quarantined >= was.quarantined
            assert was.retired is None or now.retired == was.retired
            assert was.anchor is None or now.anchor == was.anchor
        for run, known in before.runs.items():
            assert after.runs[run].superseded >= known.superseded
            assert (after.runs[run].greatest or 0) >= (known.greatest or 0)


@EXAMPLES
@given(logs())
def test_state_is_sound_at_every_prefix(log: list[Decision]) -> None:
    for policy in prefixes(log):
        living = [v.ref for v in policy.versions.values() if policy.living(v.ref)]
        on_path = {v.ref for v in policy.path(policy.tip)}
        assert set(living) <= on_path
        for v in policy.versions.values():
            if v.retired is None:
                links = list(policy.chain(v.ref))
                assert all(link.retired is None for link in links)
                assert links[-1].kind.value == "full" or links[-1].anchor is not None
        for name, channel in policy.channels.items():
            assert channel.target is None or policy.eligible(channel.target)
            if name == "latest":
                assert channel.target == policy.latest_target()
        if policy.owner is not None:
            assert [run for run, known in policy.runs.items() if not known.superseded] == [policy.owner.run]


@EXAMPLES
@given(logs())
def test_dependents_are_the_unretired_versions_built_on_each(log: list[Decision]) -> None:
    for policy in prefixes(log):
        links = [v.link for v in policy.versions.values() if v.retired is None and v.link is not None]
        assert dict(policy.dependents) == {link: links.count(link) for link in links}
        assert "dependents" not in plain(policy), "derived: digests of earlier releases stand"


@EXAMPLES
@given(logs())
def test_pointers_of_each_channel_only_grow(log: list[Decision]) -> None:
    """And one sequence names one target."""
    newest: dict[str, Any] = {}
    for policy in prefixes(log):
        for name, channel in policy.channels.items():
            made = pointers.pointer(policy, name, event_id=EventId("x"), generation=Generation(0))
            assert (made is None) == (channel.target is None)
            if made is None:
                continue
            last = newest.get(name)
            if last is not None:
                assert made.order >= last.order
                if made.sequence == last.sequence:
                    assert made.target == last.target
                if made.order == last.order:
                    assert made == last
                assert pointers.is_behind(last, made) == (made != last)
            newest[name] = made
    final = folds.Lineage(policies=folds.Map({POLICY: prefixes(log)[-1]}))
    written = {pointers.pointer_key(POLICY, name): made for name, made in newest.items()}
    stale = {name for _, name in pointers.stale_channels(final, written)}
    assert not stale


# --- admission -------------------------------------------------------------------------------------------------------------


def oracle(policy: PolicyLineage, constraint: Constraint, serving: RunVersion) -> bool:
    """Whether a known version satisfies a constraint that names its run, said by the words of the design."""
    owner = policy.owner.run if policy.owner else None
    version = policy.versions[serving]
    lags = [v.ref for v in policy.path(policy.tip)]
    return (
        serving.run == constraint.run == owner
        and version.retired is None
        and policy.eligible(serving)
        and serving in lags
        and (constraint.min_version is None or serving.number >= constraint.min_version)
        and (constraint.exact_version is None or serving.number == constraint.exact_version)
        and (constraint.max_lag is None or lags.index(serving) <= constraint.max_lag)
    )


numbers = st.one_of(st.none(), st.integers(0, 8))
constraints = st.builds(
    lambda run, least, exact, max_lag: Constraint(run=RunId(run), min_version=least, exact_version=exact, max_lag=max_lag),
    st.sampled_from(RUNS),
    numbers,
    numbers,
    st.one_of(st.none(), st.integers(0, 4)),
)


def holds(policy: PolicyLineage, constraint: Constraint, serving: RunVersion) -> bool:
    bounds = resolve(policy, constraint)
    return not isinstance(bounds, Gone) and satisfies(policy, bounds, serving)


@EXAMPLES
@given(logs(), st.lists(constraints, min_size=1, max_size=8))
def test_admission_agrees_with_the_words_of_the_design(log: list[Decision], asked: list[Constraint]) -> None:
    for policy in prefixes(log)[:: max(1, len(log) // 4)]:
        for constraint in asked:
            for serving in policy.versions:
                assert holds(policy, constraint, serving) == oracle(policy, constraint, serving), (constraint, serving)


@EXAMPLES
@given(logs(), st.lists(constraints, min_size=1, max_size=8))
def test_gone_is_for_good(log: list[Decision], asked: list[Constraint]) -> None:
    """410 is only for facts that no later record changes: it stays, and no version ever satisfies it."""
    states = prefixes(log)
    for constraint in asked:
        gone = False
        for policy in states:
            now = isinstance(resolve(policy, constraint), Gone)
            assert now or not gone, constraint
            gone = now
            if gone:
                assert not any(holds(policy, constraint, serving) for serving in policy.versions)


@EXAMPLES
@given(logs(), st.builds(lambda n: Constraint(exact_version=VersionNumber(n)), st.integers(0, 8)))
def test_without_a_run_the_answer_is_that_of_the_owning_run(log: list[Decision], constraint: Constraint) -> None:
    for policy in prefixes(log):
        if policy.owner is not None:
            named = Constraint(run=policy.owner.run, exact_version=constraint.exact_version)
            assert resolve(policy, constraint) == resolve(policy, named)


def test_fenced_writer_of_the_same_run_is_told_by_writer_not_by_run() -> None:
    history = History()
    history.claimed("a", writer="w0")
    late = history.publication("a/0", writer="w0", event_id="late")
    history.claimed("a", writer="w1")
    assert history.append(late) is Verdict.STALE_EPOCH
    assert history.policy.owner is not None
    assert history.policy.owner.writer == WriterId("w1")
