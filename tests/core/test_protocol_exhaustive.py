"""The protocol in small scope: every order of events, on the real fold and the real decisions of a writer.

The default takes seconds. `STITCH_PROTOCOL_DEPTH=1` allows each fault once more and takes a minute; 2, twice more, needs many
minutes and some gigabytes.

The second half shows that the check can fail: with a rule taken away it finds what the rule is there for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from immutables import Map

from stitch.core import lineage as folds
from stitch.core import pointers, writer
from stitch.core.events import RunClaimed, VersionPublished, VersionRetired
from stitch.core.lineage import Lineage, Verdict
from stitch.core.writer import Fate
from tests.core.model.scopes import DEFAULT, MAX_STATES, deeper
from tests.core.model.search import Broken, Outcome, Step, explore
from tests.core.model.steps import Protocol
from tests.core.model.world import NONE, Following, Scope, State, Writer

pytestmark = pytest.mark.unit

DEPTH: Final = int(os.environ.get("STITCH_PROTOCOL_DEPTH", "0"))
SCOPES: Final = {scope.name: scope for scope in DEFAULT}


@pytest.mark.parametrize("name", SCOPES)
def test_protocol_holds(name: str) -> None:
    system = Protocol(deeper(SCOPES[name], DEPTH))
    outcome = explore(system, max_states=MAX_STATES * 20**DEPTH)
    assert outcome.broken is None, f"\n{outcome}"
    assert outcome.complete, f"more states than the bound: {outcome}"
    assert outcome.quiescent > 0, f"no run ever ends: {outcome}"


# --- the check finds what each rule is there for -------------------------------------------------------------------------------


def found(system: Protocol) -> Outcome:
    outcome = explore(system, max_states=MAX_STATES)
    assert outcome.broken is not None, f"the broken rule was not noticed: {outcome}"
    assert outcome.trace
    return outcome


def replaced(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Puts `change(the real function)` in the place of the real one."""
    monkeypatch.setattr(module, name, change(getattr(module, name)))


def test_finds_a_publisher_that_leaves_an_unknown_outcome_unsettled() -> None:
    """Rule 4 (P8): the next publish settles the old event first, else a version counts that its writer was never told of."""

    class Unsettled(Protocol):
        def _how_given_up(self, state: State, index: int, one: Writer) -> Step[State]:
            after = one._replace(at="ready", event=NONE)
            given_up = state._replace(writers=(*state.writers[:index], after, *state.writers[index + 1 :]))
            return Step("gives up, settles nothing", self._spend(given_up, "giveups"), True)

    assert "I6" in str(found(Unsettled(SCOPES["two-publications"])).broken)


def test_finds_what_expected_head_of_claims_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An opener that was told that its claim was beaten owns the policy all the same, and fences its own successor."""

    def without(judge: Any) -> Any:
        return lambda policy, claim: judge(policy, replace(claim, expected_head=policy.head))

    replaced(monkeypatch, folds, "_judge_claim", without)
    assert "I6" in str(found(Protocol(SCOPES["unreduced"])).broken)


def test_finds_what_epoch_and_head_of_publications_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either alone fences; with neither, a zombie's publication counts after it was told no."""

    def without(judge: Any) -> Any:
        def judged(policy: Any, decision: VersionPublished) -> Verdict:
            tip = policy.tip.number if policy.tip else None
            return judge(  # type: ignore[no-any-return]
                policy, replace(decision, epoch=policy.epoch, expected_head=policy.head, parent=tip)
            )

        return judged

    replaced(monkeypatch, folds, "_judge_publication", without)
    assert "I6" in str(found(Protocol(SCOPES["unreduced"])).broken)


def test_finds_what_the_first_copy_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold that forgets what it judged takes a doubled record as a new one."""

    def forgetting(apply: Any) -> Any:
        def applied(lineage: Lineage, decision: Any, at: Any) -> Any:
            policy = lineage.policy(decision.policy)
            forgot = replace(policy, verdicts=Map(), head=getattr(decision, "expected_head", policy.head))
            return apply(replace(lineage, policies=lineage.policies.set(decision.policy, forgot)), decision, at)

        return applied

    replaced(monkeypatch, folds, "apply", forgetting)
    found(Protocol(SCOPES["two-runs"]))


def test_finds_what_the_number_rule_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that counts on from its boot version uses a number twice (P3)."""
    monkeypatch.setattr(folds.PolicyLineage, "greatest", lambda self, run: self.tip.number if self.tip else None)
    assert "two publications" in str(found(Protocol(SCOPES["two-publications"])).broken)


def test_finds_a_new_id_on_a_time_out() -> None:
    """Rule 4: a decision that is sent again under another id is another decision."""

    class NewId(Protocol):
        def _how_again(self, state: State, index: int, one: Writer) -> tuple[int, Writer]:
            event = self.events[one.event]
            assert isinstance(event, RunClaimed | VersionPublished)
            number = self.events.number(replace(event, event_id=self.fresh(state, event.writer)))
            return number, one._replace(event=number)

    assert "I6" in str(found(NewId(SCOPES["one-run"])).broken)


def test_finds_a_writer_that_looks_at_the_owner_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """D1b: first ask whether the id was accepted, then who owns the head."""

    def owner_first(fate: Any) -> Any:
        def told(policy: Any, decision: Any) -> Fate:
            if policy.owner is not None and policy.owner.writer != decision.writer:
                return Fate.REFUSED
            return fate(policy, decision)  # type: ignore[no-any-return]

        return told

    replaced(monkeypatch, writer, "fate", owner_first)
    assert "reported as refused" in str(found(Protocol(SCOPES["one-run"])).broken)


def test_finds_openers_that_claim_again_after_they_were_superseded() -> None:
    """The last opener wins. Where a superseded one claims again, two of them go round for ever."""

    class Stubborn(Protocol):
        def _how_superseded(self, state: State, index: int, one: Writer) -> Step[State]:
            return self._claim(state, index, one._replace(at="idle", event=NONE), "superseded: claims again")

    assert "claimed more often" in str(found(Stubborn(Scope(name="stubborn"))).broken)


def test_finds_what_the_base_rule_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """D5: a version is retired while a delta on it is under way."""

    def without(judge: Any) -> Any:
        def judged(policy: Any, decision: VersionPublished) -> Verdict:
            verdict = judge(policy, decision)
            return Verdict.ACCEPTED if verdict is Verdict.BASE_UNUSABLE else verdict

        return judged

    replaced(monkeypatch, folds, "_judge_publication", without)
    assert "I1" in str(found(Protocol(SCOPES["retirement"])).broken)


def test_finds_what_the_retirement_rule_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """D5: the collector's own look is old by the time its retirement lands: the trainer went back to that version."""

    def careless(judge: Any) -> Any:
        def judged(policy: Any, decision: VersionRetired) -> Verdict:
            verdict = judge(policy, decision)
            return Verdict.ACCEPTED if verdict is Verdict.VERSION_NEEDED else verdict

        return judged

    replaced(monkeypatch, folds, "_judge_retirement", careless)
    assert "not eligible" in str(found(Protocol(SCOPES["retirement"])).broken)


def test_finds_a_collector_that_goes_by_grace_alone() -> None:
    """D3: bytes of a publication that has yet to land."""

    class ByGrace(Protocol):
        def _how_collected(self, state: State) -> frozenset[str]:
            needs = self.needs(state.lineage)
            return frozenset((needs.free & state.store) | (state.store - needs.named))

    assert "I1" in str(found(ByGrace(SCOPES["collector"])).broken)


def test_finds_a_collector_that_takes_a_base_before_its_claim_landed() -> None:
    class Hasty(Protocol):
        def _how_collected(self, state: State) -> frozenset[str]:
            return frozenset(key for key in state.store - self.needs(state.lineage).named if key.endswith(".base"))

    assert "I1" in str(found(Hasty(SCOPES["base-checkpoint"])).broken)


def test_finds_a_collector_that_forgets_that_aliases_share_bytes() -> None:
    class Careless(Protocol):
        def _how_collected(self, state: State) -> frozenset[str]:
            retired = (v for v in self.policy(state.lineage).versions.values() if v.retired is not None)
            return frozenset(v.manifest.key for v in retired) & state.store

    assert "I1" in str(found(Careless(SCOPES["alias-retirement"])).broken)


def test_finds_a_repair_that_looks_at_the_greatest_pointer_seen() -> None:
    """D7: a late pointer lands last, compaction keeps it, and every repairer has seen a greater one."""

    class SeesGreatest(Protocol):
        def _how_last(self, state: State) -> int:
            return max(state.topic, key=lambda n: self.pointers[n].order, default=NONE)

    assert "I5" in str(found(SeesGreatest(SCOPES["pointers"])).broken)


def test_finds_a_replica_that_takes_whatever_pointer_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointers, "greatest", lambda all_of_them: [None, *all_of_them][-1])

    class TakesAny(Protocol):
        def _how_further(self, offer: Following, following: Following) -> bool:
            return offer != following

    assert "I2" in str(found(TakesAny(SCOPES["pointers"])).broken)


def test_finds_an_anchor_that_no_pointer_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """D6: the chain below the anchor goes, and who knows the pointer alone looks for it."""

    def untold(take: Any) -> Any:
        return lambda policy, added, at: replace(take(policy, added, at), channels=policy.channels)

    replaced(monkeypatch, folds, "_take_anchor", untold)
    assert "cannot load" in str(found(Protocol(SCOPES["pointers-alone"])).broken)


def test_a_trace_is_a_shortest_one_and_reads_well() -> None:
    """The explorer itself, on a system of three numbers."""

    class Counter:
        def initial(self) -> int:
            return 0

        def steps(self, state: int) -> Any:
            yield Step("one", min(state + 1, 9), False)
            yield Step("two", min(state + 2, 9), False)

        def check(self, state: int) -> None:
            if state == 5:
                raise Broken("five")

        def check_quiescent(self, state: int) -> None: ...

    outcome = explore(Counter(), max_states=100)
    assert (outcome.broken, len(outcome.trace)) == ("five", 3)
    assert "five" in str(outcome)
    assert "3. " in str(outcome)
