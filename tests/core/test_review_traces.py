"""Traces of the protocol's review that need a word of their own; docs/reliability.md lists where each of the others is held."""

from __future__ import annotations

import pytest

from stitch.core import lineage as folds
from stitch.core.events import Decision
from stitch.core.ids import Offset
from stitch.core.lineage import Lineage, Position, Verdict
from tests.core.builders import POLICY, History, chain_of

pytestmark = pytest.mark.unit


def test_d3_a_publication_in_flight_may_land_for_as_long_as_its_epoch_lasts() -> None:
    """Its writer may be dead for days: no age tells that its bytes are free. A claim does."""
    history = chain_of("r1/0", "r1/1", "r1/2")
    late = history.publication("r1/3", base="r1/2", event_id="late")
    history.accepted(history.quarantine("r1/1"))
    history.accepted(history.move("stable", "r1/2"))
    history.accepted(history.anchor("r1/2"))
    history.accepted(history.retirement("r1/1"))
    waited = History(lineage=history.lineage, log=list(history.log))
    assert waited.append(late) is Verdict.ACCEPTED, "so the collector must have kept its bytes"

    history.claimed("r1", 2, writer="w1")
    assert history.append(late) is Verdict.STALE_EPOCH
    assert history.append(late) is Verdict.DUPLICATE, "for good, so its bytes may go"


def test_d3_an_anchor_in_flight_is_bounded_by_its_epoch_too() -> None:
    history = chain_of("r1/0", "r1/1")
    late = history.anchor("r1/1", event_id="late")
    history.claimed("r1", 1, writer="w1")
    assert history.append(late) is Verdict.STALE_EPOCH


def _fold(log: list[Decision]) -> Lineage:
    lineage = Lineage()
    for offset, decision in enumerate(log):
        lineage, _ = folds.apply(lineage, decision, Position(offset=Offset(offset), time_ms=offset))
    return lineage


def test_d13_a_reader_that_skipped_one_decision_would_part_from_the_others() -> None:
    """Why none is ever skipped: two writers race, and who skips the winner's claim accepts what all others refuse."""
    history = chain_of("r1/0")
    loser = history.publication("r1/1", base="r1/0", writer="w0", event_id="loser")
    winner = history.claimed("r1", 0, writer="w1")
    assert history.append(loser) is Verdict.STALE_EPOCH
    history.published("r1/2", base="r1/0", writer="w1")

    everyone = _fold(history.log).policy(POLICY)
    skipping = _fold([decision for decision in history.log if decision is not winner]).policy(POLICY)
    assert {ref.number for ref in everyone.versions} == {0, 2}
    assert {ref.number for ref in skipping.versions} == {0, 1}
