"""The fold, rule by rule, and the traces of the protocol's review that concern it (D1 to D21)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stitch.core import lineage as folds
from stitch.core.events import Decision, FormatRaised
from stitch.core.ids import LATEST, ChannelName, EventId, RunId, VersionNumber, WriterId
from stitch.core.lineage import Lineage, Position, Verdict
from stitch.core.manifest import Kind
from tests.core.builders import History, chain_of, version

pytestmark = pytest.mark.unit

STABLE = ChannelName("stable")


@pytest.fixture
def history() -> History:
    return History()


@pytest.fixture
def line() -> History:
    """Run a with the full versions 0, 1 and 2."""
    history = History()
    history.claimed("a")
    history.published("a/0", "a/1", "a/2")
    return history


# --- rule 1: claims --------------------------------------------------------------------------------------------------------


def test_first_claim_opens_an_empty_run(history: History) -> None:
    claim = history.claimed("a")
    policy = history.policy
    assert (policy.head, policy.epoch, policy.tip, history.latest()) == (claim.event_id, 1, None, None)
    assert policy.owner is not None
    assert (policy.owner.run, policy.owner.writer) == ("a", "w0")


def test_claim_with_a_stale_head_is_ignored(history: History) -> None:
    history.claimed("a")
    assert history.append(history.claim("a", expected_head=None)) is Verdict.STALE_HEAD
    assert history.append(history.claim("a", expected_head=EventId("no-such-event"))) is Verdict.STALE_HEAD
    assert history.policy.epoch == 1


def test_claim_of_the_tip_goes_on_and_raises_the_epoch(line: History) -> None:
    line.claimed("a", 2)
    assert (line.policy.epoch, line.policy.tip) == (2, version("a/2"))
    assert line.latest() == version("a/2")
    assert not any(v.abandoned for v in line.policy.versions.values())


def test_claim_of_an_older_living_version_abandons_what_lay_beyond_for_good(line: History) -> None:
    line.claimed("a", 0)
    policy = line.policy
    assert policy.tip == version("a/0")
    assert {str(v.ref): v.abandoned for v in policy.versions.values()} == {
        "a/weight_v000000": False,
        "a/weight_v000001": True,
        "a/weight_v000002": True,
    }
    assert line.append(line.claim("a", 1)) is Verdict.BOOT_NOT_LIVING
    line.published("a/3")
    assert not line.policy.living(version("a/1"))
    assert line.policy.living(version("a/3"))


def test_claim_of_a_retired_boot_is_ignored(line: History) -> None:
    line.accepted(line.retirement("a/0"))
    assert line.append(line.claim("a", 0)) is Verdict.BOOT_NOT_LIVING


def test_claim_ahead_of_every_accepted_version_is_ignored(line: History) -> None:
    assert line.append(line.claim("a", 3)) is Verdict.BOOT_NOT_LIVING


def test_claim_of_a_known_run_must_name_its_boot(line: History) -> None:
    assert line.append(line.claim("a")) is Verdict.BOOT_MISSING


@pytest.mark.parametrize("fields", [{"alias": "a/1"}, {"base": "base"}])
def test_known_run_takes_neither_alias_nor_base(line: History, fields: dict[str, str]) -> None:
    assert line.append(line.claim("a", 2, **fields)) is Verdict.BOOT_MISSING


def test_new_run_supersedes_the_old_one_for_good(line: History) -> None:
    line.claimed("b", writer="w1")
    assert line.policy.runs[RunId("a")].superseded
    assert not line.policy.living(version("a/2"))
    assert line.append(line.claim("a", 2)) is Verdict.RUN_SUPERSEDED
    line.claimed("c")
    assert line.append(line.claim("b")) is Verdict.RUN_SUPERSEDED


def test_new_run_without_versions_may_be_claimed_again(history: History) -> None:
    history.claimed("a")
    history.claimed("a", writer="w1")
    assert history.policy.epoch == 2
    assert history.append(history.claim("a", 0)) is Verdict.BOOT_MISSING
    history.claimed("a", 0, base="base", writer="w2")
    assert history.policy.tip == version("a/0")


def test_base_checkpoint_becomes_a_version(history: History) -> None:
    claim = history.claimed("a", 7, base="base")
    known = history.policy.versions[version("a/7")]
    assert (known.kind, known.base, known.parent, known.alias_of, known.epoch) == (Kind.FULL, None, None, None, 1)
    assert known.manifest == claim.base
    assert history.latest() == version("a/7")
    assert history.policy.greatest(RunId("a")) == 7


def test_base_needs_a_number_and_a_number_needs_a_base(history: History) -> None:
    assert history.append(history.claim("a", base="base")) is Verdict.BOOT_MISSING
    assert history.append(history.claim("a", 3)) is Verdict.BOOT_MISSING


def test_alias_takes_a_version_of_another_run_under_its_own_number() -> None:
    history = chain_of("a/4", "a/5")
    history.claimed("b", 0, alias="a/5", writer="w1")
    policy = history.policy
    source, alias = policy.versions[version("a/5")], policy.versions[version("b/0")]
    assert alias.manifest == source.manifest
    assert (alias.alias_of, alias.link, alias.parent) == (source.ref, source.ref, source.parent)
    assert policy.tip == alias.ref
    assert [str(v.ref) for v in policy.chain(alias.ref)] == ["b/weight_v000000", "a/weight_v000005", "a/weight_v000004"]
    assert policy.nearest_anchor(alias.ref)[0] == version("a/4")


def test_alias_of_an_abandoned_version_is_allowed(line: History) -> None:
    """To go on from what was abandoned, open a new run on it."""
    line.claimed("a", 0)
    line.claimed("b", 9, alias="a/2", writer="w1")
    assert line.policy.living(version("b/9"))


def test_alias_must_be_accepted_unretired_and_alone(line: History) -> None:
    assert line.append(line.claim("b", 0, alias="a/9")) is Verdict.SOURCE_UNUSABLE
    assert line.append(line.claim("b", alias="a/2")) is Verdict.SOURCE_UNUSABLE
    assert line.append(line.claim("b", 0, alias="a/2", base="base")) is Verdict.SOURCE_UNUSABLE
    line.accepted(line.retirement("a/1"))
    assert line.append(line.claim("b", 0, alias="a/1")) is Verdict.SOURCE_UNUSABLE


def test_every_accepted_claim_changes_latest(line: History) -> None:
    before = line.policy.channels[LATEST].sequence
    line.claimed("a", 2)
    assert line.policy.channels[LATEST].sequence == before + 1
    line.claimed("b", writer="w1")
    assert (line.policy.channels[LATEST].sequence, line.latest()) == (before + 2, None)


# --- rule 3: publications --------------------------------------------------------------------------------------------------


def test_publication_moves_head_tip_and_latest(history: History) -> None:
    history.claimed("a")
    published = history.published("a/0")
    assert (history.policy.head, history.policy.tip) == (published.event_id, version("a/0"))
    assert history.latest() == version("a/0")


def test_numbers_may_have_gaps(history: History) -> None:
    history.claimed("a")
    history.published("a/3", "a/10")
    assert history.policy.greatest(RunId("a")) == 10


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"epoch": 0}, Verdict.STALE_EPOCH),
        ({"epoch": 2}, Verdict.STALE_EPOCH),
        ({"run": RunId("b")}, Verdict.RUN_NOT_CURRENT),
        ({"expected_head": EventId("e0")}, Verdict.STALE_HEAD),
        ({"parent": VersionNumber(1)}, Verdict.PARENT_NOT_TIP),
        ({"parent": None}, Verdict.PARENT_NOT_TIP),
        ({"number": VersionNumber(2)}, Verdict.NUMBER_NOT_GREATER),
        ({"number": VersionNumber(0)}, Verdict.NUMBER_NOT_GREATER),
        ({"kind": Kind.DELTA}, Verdict.BASE_UNUSABLE),
        ({"base": "a/2", "kind": Kind.FULL}, Verdict.BASE_UNUSABLE),
        ({"base": "a/9"}, Verdict.BASE_UNUSABLE),
        ({"base": "a/1"}, Verdict.ACCEPTED),
    ],
)
def test_publication_is_accepted_only_where_all_that_it_expects_holds(
    line: History, fields: dict[str, Any], verdict: Verdict
) -> None:
    before = line.policy
    assert line.append(line.publication("a/3", **fields)) is verdict
    if verdict is not Verdict.ACCEPTED:
        assert replace(line.policy, verdicts=before.verdicts) == before


def test_publication_before_any_claim_is_ignored(history: History) -> None:
    assert history.append(history.publication("a/0", expected_head=EventId("e"))) is Verdict.STALE_EPOCH


def test_publication_on_a_retired_base_is_ignored(line: History) -> None:
    line.accepted(line.retirement("a/0"))
    assert line.append(line.publication("a/3", base="a/0")) is Verdict.BASE_UNUSABLE


def test_publication_on_a_quarantined_base_counts(line: History) -> None:
    line.accepted(line.quarantine("a/2"))
    line.published("a/3", base="a/2")
    assert line.latest() == version("a/3")


def test_number_is_above_every_accepted_one_not_only_the_tip(line: History) -> None:
    """D19, P3: after a rewind the numbers of the abandoned versions stay taken."""
    line.claimed("a", 0)
    assert line.append(line.publication("a/1")) is Verdict.NUMBER_NOT_GREATER
    assert line.append(line.publication("a/2")) is Verdict.NUMBER_NOT_GREATER
    line.published("a/3")


def test_first_number_of_a_run_after_a_base_is_above_it(history: History) -> None:
    history.claimed("a", 5, base="base")
    assert history.append(history.publication("a/5")) is Verdict.NUMBER_NOT_GREATER
    history.published("a/6", base="a/5")


# --- rule 4: the first copy decides ----------------------------------------------------------------------------------------


def test_later_copies_of_an_accepted_decision_are_duplicates(line: History) -> None:
    published = line.published("a/3")
    before = line.lineage
    assert line.append(published) is Verdict.DUPLICATE
    assert line.lineage == before
    line.published("a/4")
    assert line.append(published) is Verdict.DUPLICATE


def test_a_refused_decision_stays_refused_though_it_would_hold_now(line: History) -> None:
    """The first copy decides, also where it decides no."""
    move = line.move("stable", "a/1", sequence=1, event_id="the-move")
    assert line.append(move) is Verdict.STALE_SEQUENCE
    line.accepted(line.move("stable", "a/2"))
    assert line.append(move) is Verdict.DUPLICATE
    assert line.policy.channels[STABLE].target == version("a/2")


@pytest.mark.parametrize("kind", ["claim", "publication", "anchor", "move", "quarantine", "retirement"])
def test_every_kind_of_decision_counts_once(kind: str) -> None:
    history = chain_of("a/0", "a/1", "a/2")
    decision: Decision = {
        "claim": lambda: history.claim("a", 2),
        "publication": lambda: history.publication("a/3"),
        "anchor": lambda: history.anchor("a/1"),
        "move": lambda: history.move("stable", "a/1"),
        "quarantine": lambda: history.quarantine("a/1"),
        "retirement": lambda: history.retirement("a/1"),
    }[kind]()
    if kind == "retirement":
        history.accepted(history.anchor("a/2", event_id="so that a/1 is not needed"))
    history.accepted(decision)
    before = history.lineage
    assert history.append(decision) is Verdict.DUPLICATE
    assert history.lineage == before


def test_ids_are_of_one_policy() -> None:
    """One trainer's id in another policy's log order is no duplicate."""
    history = History()
    claim = history.claimed("a")
    other, verdict = folds.apply(history.lineage, replace(claim, policy="other"), Position(offset=folds.Offset(9), time_ms=0))
    assert verdict is Verdict.ACCEPTED
    assert set(other.policies) == {"p", "other"}


# --- FormatRaised ----------------------------------------------------------------------------------------------------------


def test_format_level_only_rises_and_is_of_the_namespace(line: History) -> None:
    def raised(level: int) -> FormatRaised:
        return FormatRaised(level=level, event_id=EventId(f"format-{level}"), writer=WriterId("operator"))

    policies = line.lineage.policies
    assert line.append(raised(1)) is Verdict.NOTHING_TO_DO
    assert line.append(raised(3)) is Verdict.ACCEPTED
    assert line.append(raised(3)) is Verdict.NOTHING_TO_DO
    assert line.append(raised(2)) is Verdict.NOTHING_TO_DO
    assert line.lineage == Lineage(level=3, policies=policies)


# --- more traces of the review ---------------------------------------------------------------------------------------------


def test_d5_i_version_is_retired_while_a_trainer_goes_back_to_it(line: History) -> None:
    retirement = line.retirement("a/1", event_id="late-retirement")
    line.claimed("a", 1, writer="w1")
    assert line.append(retirement) is Verdict.VERSION_NEEDED
    assert line.latest() == version("a/1")


def test_d5_ii_base_is_retired_while_a_delta_on_it_is_under_way(line: History) -> None:
    publication = line.publication("a/3", base="a/1", event_id="slow")
    line.accepted(line.retirement("a/1"))
    assert line.append(publication) is Verdict.BASE_UNUSABLE


def test_d5_iii_target_is_retired_while_a_channel_is_moved_to_it(line: History) -> None:
    move = line.move("stable", "a/1", event_id="slow")
    line.accepted(line.retirement("a/1"))
    assert line.append(move) is Verdict.VERSION_UNUSABLE


def test_d8_two_operators_move_one_channel_and_the_later_one_learns_that_it_lost(line: History) -> None:
    first = line.move("stable", "a/1", event_id="first")
    second = line.move("stable", "a/2", event_id="second")
    line.accepted(second)
    assert line.append(first) is Verdict.STALE_SEQUENCE
    assert line.policy.channels[STABLE].target == version("a/2")


def test_d9_a_new_run_moves_latest_so_that_replicas_learn_of_it(line: History) -> None:
    before = line.policy.channels[LATEST].sequence
    line.claimed("b", 0, alias="a/2", writer="w1")
    assert (line.policy.channels[LATEST].sequence, line.latest()) == (before + 1, version("b/0"))


def test_d14_claim_on_a_fresh_log_does_not_meet_an_old_head(history: History) -> None:
    """A publication that expects what the log no longer holds is refused, never accepted by accident."""
    history.claimed("a")
    assert history.append(history.publication("a/7", expected_head=EventId("of-the-lost-log"))) is Verdict.STALE_HEAD


def test_long_chains_and_paths_are_walked_without_recursion(history: History) -> None:
    history.claimed("a")
    history.published(*(f"a/{n}" for n in range(3)))
    before = "a/2"
    for n in range(3, 1500):
        history.published(f"a/{n}", base=before)
        before = f"a/{n}"
    assert history.policy.nearest_anchor(version("a/1499"))[0] == version("a/2")
    assert sum(1 for _ in history.policy.path(version("a/1499"))) == 1500
