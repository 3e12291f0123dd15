"""What a writer decides, and the traces of the protocol's review that concern it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from stitch.core import writer
from stitch.core.errors import Fenced, VersionConflict
from stitch.core.events import RunClaimed
from stitch.core.ids import Digest, Epoch, EventId, RunId, VersionNumber, WriterId
from stitch.core.lineage import Verdict
from stitch.core.manifest import Kind
from stitch.core.writer import BaseOffer, Candidate, Fate, Opening, Session
from tests.core.builders import POLICY, History, hexdigest, manifest_ref, version

pytestmark = pytest.mark.unit


_count = itertools.count()


def fresh_id(kind: str) -> EventId:
    return EventId(f"{kind}-{next(_count)}")


def opening(run: str, **fields: Any) -> Opening:
    return Opening(**{"policy": POLICY, "run": RunId(run), "writer": WriterId("w1"), **fields})


def plan(history: History, run: str, **fields: Any) -> RunClaimed:
    return writer.plan_claim(history.policy, opening(run, **fields), fresh_id("claim"))


def opened(history: History, run: str, **fields: Any) -> Session:
    """Claims as the publisher does, and the claim lands at once."""
    claim = plan(history, run, **fields)
    assert history.append(claim) is Verdict.ACCEPTED
    session = writer.session_of(claim, history.policy)
    assert session is not None
    return session


def candidate(number: int, *, parent: int | None, base: str | None = None) -> Candidate:
    return Candidate(
        number=VersionNumber(number),
        kind=Kind.FULL if base is None else Kind.DELTA,
        base=None if base is None else version(base),
        parent=None if parent is None else VersionNumber(parent),
        manifest=manifest_ref(f"m{number}"),
        size=1,
    )


def publish(history: History, session: Session, number: int, **fields: Any) -> Any:
    """The planned publication; not appended."""
    tip = history.policy.tip
    made = candidate(number, parent=tip.number if tip else None, **fields)
    return writer.plan_publication(history.policy, session, made, fresh_id("publication"))


@pytest.fixture
def line() -> History:
    history = History()
    history.claimed("a")
    history.published("a/0", "a/1", "a/2")
    return history


# --- claims ------------------------------------------------------------------------------------------------------------------


def test_opening_an_empty_policy(line: History) -> None:
    claim = plan(History(), "a")
    assert (claim.expected_head, claim.boot, claim.alias, claim.base) == (None, None, None, None)


def test_opening_with_a_base(line: History) -> None:
    offer = BaseOffer(number=VersionNumber(4), manifest=manifest_ref("base"))
    history = History()
    session = opened(history, "a", base=offer)
    assert (session.epoch, history.policy.tip) == (1, version("a/4"))


def test_boot_none_means_the_tip(line: History) -> None:
    assert plan(line, "a").boot == 2
    assert plan(line, "a", boot=VersionNumber(1)).boot == 1


@pytest.mark.parametrize("boot", [3, 99])
def test_boot_ahead_of_what_was_accepted_is_a_conflict(line: History, boot: int) -> None:
    with pytest.raises(VersionConflict, match="never accepted"):
        plan(line, "a", boot=VersionNumber(boot))


def test_boot_in_an_abandoned_or_retired_part_is_a_conflict(line: History) -> None:
    line.accepted(line.retirement("a/0"))
    line.claimed("a", 1)
    for boot in (0, 2):
        with pytest.raises(VersionConflict, match="abandoned or retired"):
            plan(line, "a", boot=VersionNumber(boot))


def test_another_run_needs_take_over_and_the_error_names_the_owner(line: History) -> None:
    with pytest.raises(Fenced, match=r"writer w0 owns it with run a since 1970-01-01T00:00:00"):
        plan(line, "b")
    assert plan(line, "b", take_over=True).run == "b"
    assert plan(line, "a", take_over=False).run == "a"


def test_a_superseded_run_cannot_be_opened_at_all(line: History) -> None:
    opened(line, "b", take_over=True)
    with pytest.raises(Fenced, match="superseded"):
        plan(line, "a", take_over=True)


def test_alias_gets_the_boot_number_or_zero(line: History) -> None:
    claim = plan(line, "b", alias=version("a/1"), take_over=True)
    assert (claim.boot, claim.alias) == (0, version("a/1"))
    assert plan(line, "b", alias=version("a/1"), boot=VersionNumber(7), take_over=True).boot == 7
    line.accepted(line.retirement("a/1"))
    with pytest.raises(VersionConflict, match="retired"):
        plan(line, "b", alias=version("a/1"), take_over=True)
    with pytest.raises(VersionConflict, match="unknown"):
        plan(line, "b", alias=version("a/9"), take_over=True)


def test_boot_of_a_run_without_versions_is_a_conflict(line: History) -> None:
    with pytest.raises(VersionConflict, match="no version yet"):
        plan(line, "b", boot=VersionNumber(3), take_over=True)


def test_base_offered_again_must_be_the_one_that_is_there(line: History) -> None:
    """A restarted trainer gives the same base as before; it counts only where the run has no version yet."""
    history = History()
    offer = BaseOffer(number=VersionNumber(0), manifest=manifest_ref("base"))
    session = opened(history, "a", base=offer)
    history.accepted(publish(history, session, 1))
    again = plan(history, "a", base=offer)
    assert (again.boot, again.base) == (1, None)
    with pytest.raises(VersionConflict, match="other weights"):
        plan(history, "a", base=BaseOffer(number=VersionNumber(0), manifest=manifest_ref("other")))
    with pytest.raises(VersionConflict, match="none of them"):
        plan(history, "a", base=BaseOffer(number=VersionNumber(5), manifest=manifest_ref("base")))


def test_every_planned_claim_is_accepted_on_the_lineage_that_it_was_planned_on(line: History) -> None:
    plans = [
        plan(line, "a"),
        plan(line, "a", boot=VersionNumber(0)),
        plan(line, "b", take_over=True),
        plan(line, "b", take_over=True, alias=version("a/1")),
        plan(line, "b", take_over=True, base=BaseOffer(number=VersionNumber(3), manifest=manifest_ref("base"))),
    ]
    for claim in plans:
        history = History(lineage=line.lineage, log=[*line.log])
        assert history.append(claim) is Verdict.ACCEPTED


# --- publications --------------------------------------------------------------------------------------------------------------


def test_publication_of_the_owner_is_accepted(line: History) -> None:
    session = opened(line, "a")
    line.accepted(publish(line, session, 3, base="a/2"))
    assert line.policy.tip == version("a/3")


@pytest.mark.parametrize("number", [0, 2])
def test_publication_of_a_number_that_is_not_greater_is_a_conflict(line: History, number: int) -> None:
    session = opened(line, "a")
    with pytest.raises(VersionConflict, match="not above 2"):
        publish(line, session, number)


@pytest.mark.parametrize("run", ["a", "b"])
def test_publication_of_a_fenced_writer_is_refused_before_anything_is_sent(line: History, run: str) -> None:
    session = opened(line, "a")
    opened(line, run, writer=WriterId("w2"), take_over=True)
    with pytest.raises(Fenced, match="writer w2 owns it"):
        publish(line, session, 3)
    with pytest.raises(Fenced):
        writer.check_owned(line.policy, session)


def test_a_new_life_under_the_same_run_fences_the_old_one(line: History) -> None:
    old = opened(line, "a", writer=WriterId("w1.0"))
    new = opened(line, "a", writer=WriterId("w1.1"))
    writer.check_owned(line.policy, new)
    with pytest.raises(Fenced):
        writer.check_owned(line.policy, old)


def test_session_of_nobody_is_fenced() -> None:
    nobody = Session(policy=POLICY, run=RunId("a"), writer=WriterId("w"), epoch=Epoch(0))
    with pytest.raises(Fenced, match="nobody owns it"):
        writer.check_owned(History().policy, nobody)


def test_publishing_the_same_weights_again_returns_what_is_there(line: History) -> None:
    session = opened(line, "a")
    known = line.policy.versions[version("a/2")]
    weights = known.manifest.weights_digest
    assert writer.already_published(line.policy, session, VersionNumber(2), weights) == known
    assert writer.already_published(line.policy, session, VersionNumber(3), weights) is None


def test_other_weights_under_an_accepted_number_are_a_conflict(line: History) -> None:
    session = opened(line, "a")
    with pytest.raises(VersionConflict, match="use 3"):
        writer.already_published(line.policy, session, VersionNumber(2), hexdigest("others"))


def test_the_same_weights_under_an_abandoned_number_are_a_conflict(line: History) -> None:
    """D19: the trainer's counter said 1 after a rewind to 0; it must take a number above all."""
    weights = line.policy.versions[version("a/1")].manifest.weights_digest
    session = opened(line, "a", boot=VersionNumber(0))
    with pytest.raises(VersionConflict, match="publish it as 3"):
        writer.already_published(line.policy, session, VersionNumber(1), weights)


def test_d19_number_below_the_greatest_says_which_to_use(line: History) -> None:
    history = History()
    session = opened(history, "a")
    history.accepted(publish(history, session, 5))
    with pytest.raises(VersionConflict, match="use 6 or more"):
        writer.already_published(history.policy, session, VersionNumber(3), Digest("0" * 64))


# --- fate: rule 4 and the first defects of the review --------------------------------------------------------------------------


def test_fate_is_open_while_the_head_stands(line: History) -> None:
    session = opened(line, "a")
    event = publish(line, session, 3)
    assert writer.fate(line.policy, event) is Fate.OPEN
    line.accepted(line.move("stable", "a/1"))
    assert writer.fate(line.policy, event) is Fate.OPEN
    line.accepted(event)
    assert writer.fate(line.policy, event) is Fate.ACCEPTED


def test_fate_is_a_no_once_the_head_moved_and_stays_one(line: History) -> None:
    session = opened(line, "a")
    event = publish(line, session, 3)
    opened(line, "a", writer=WriterId("w2"))
    assert writer.fate(line.policy, event) is Fate.REFUSED
    assert line.append(event) is not Verdict.ACCEPTED
    assert writer.fate(line.policy, event) is Fate.REFUSED


def test_fate_of_a_refusal_under_a_standing_head(line: History) -> None:
    session = opened(line, "a")
    event = publish(line, session, 3, base="a/1")
    line.accepted(line.retirement("a/1"))
    assert line.append(event) is Verdict.BASE_UNUSABLE
    assert writer.fate(line.policy, event) is Fate.REFUSED
    writer.check_owned(line.policy, session)  # still the owner: publishes in full
    line.accepted(publish(line, session, 3))


def test_d1a_slow_copies_of_one_claim_leave_the_writer_its_policy(line: History) -> None:
    """The same event again on each time-out: whichever copy lands first counts, and the writer reads that it owns."""
    claim = plan(line, "a")
    assert line.append(claim) is Verdict.ACCEPTED
    assert line.append(claim) is Verdict.DUPLICATE
    assert writer.fate(line.policy, claim) is Fate.ACCEPTED
    session = writer.session_of(claim, line.policy)
    assert session is not None
    writer.check_owned(line.policy, session)
    line.accepted(publish(line, session, 3))


def test_d1b_accepted_publication_is_told_as_accepted_though_another_owns_the_head_now(line: History) -> None:
    session = opened(line, "a")
    event = publish(line, session, 3)
    line.accepted(event)
    opened(line, "a", writer=WriterId("w2"))
    line.append(event)
    assert writer.fate(line.policy, event) is Fate.ACCEPTED
    with pytest.raises(Fenced):
        publish(line, session, 4)


def test_d1c_a_claim_names_its_writer(line: History) -> None:
    """Two claims of one run: each writer knows its own session, and whose claim fenced it."""
    mine, theirs = plan(line, "a", writer=WriterId("w1")), plan(line, "a", writer=WriterId("w2"))
    line.accepted(theirs)
    assert line.append(mine) is Verdict.STALE_HEAD
    assert writer.fate(line.policy, mine) is Fate.REFUSED
    assert writer.session_of(mine, line.policy) is None
    assert line.policy.owner is not None
    assert line.policy.owner.writer == "w2"


def test_d2a_claim_beaten_by_a_late_publication_of_the_old_epoch_is_planned_again(line: History) -> None:
    zombie = opened(line, "a", writer=WriterId("zombie"))
    late = publish(line, zombie, 3)
    claim = plan(line, "a", writer=WriterId("w2"))
    line.accepted(late)
    assert line.append(claim) is Verdict.STALE_HEAD
    assert writer.fate(line.policy, claim) is Fate.REFUSED
    session = opened(line, "a", writer=WriterId("w2"))
    assert line.policy.tip == version("a/3")
    line.accepted(publish(line, session, 4))


def test_d2b_claim_of_the_own_dead_life_only_delays_the_new_one(line: History) -> None:
    dead = plan(line, "a", writer=WriterId("w1.0"))
    new = plan(line, "a", writer=WriterId("w1.1"))
    line.accepted(dead)
    assert writer.fate(line.policy, new) is Fate.REFUSED
    line.append(new)
    session = opened(line, "a", writer=WriterId("w1.1"))
    writer.check_owned(line.policy, session)


def test_session_of_a_superseded_claim_is_none_and_its_fate_stays_accepted(line: History) -> None:
    claim = plan(line, "a")
    line.accepted(claim)
    opened(line, "a", writer=WriterId("w2"))
    assert writer.fate(line.policy, claim) is Fate.ACCEPTED
    assert writer.session_of(claim, line.policy) is None
