"""The demo's books find a lie, and count what they should."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from stitch.cli.demo.ledger import Ledger, truthful
from stitch.cli.demo.view import render
from stitch.core.events import Phase, ReplicaState, Transition
from stitch.trainer.rollout_answer import Answer
from tests.support.examples import examples

pytestmark = pytest.mark.unit

DIGESTS = {0: "a", 1: "b", 2: "c"}


def _answer(spans: list[tuple[int, int, int]], engine: list[list[Any]], tokens: int = 4) -> Answer:
    return Answer(
        text="",
        output_ids=tuple(range(tokens)),
        version_start=spans[0][0],
        version_end=spans[-1][0],
        spans=tuple(spans),
        policy="demo",
        run="demo-1",
        replica="replica-0",
        request_id="q",
        raw={"meta_info": {"weights_digests": engine}},
    )


@pytest.mark.parametrize(
    ("spans", "engine", "holds"),
    [
        ([(1, 0, 4)], [["b", 0, 4]], True),
        ([(0, 0, 2), (1, 2, 4)], [["a", 0, 2], ["b", 2, 4]], True),
        ([(1, 0, 4)], [["a", 0, 4]], False),
        ([(0, 0, 2), (1, 2, 4)], [["a", 0, 3], ["b", 3, 4]], False),
        ([(1, 0, 4)], [["b", 0, 3]], False),
        ([(9, 0, 4)], [["b", 0, 4]], False),
        ([(1, 0, 3)], [["b", 0, 3]], False),
    ],
)
def test_an_answer_is_true_only_where_every_token_is_of_the_version_that_it_names(
    spans: list[tuple[int, int, int]], engine: list[list[Any]], holds: bool
) -> None:
    assert truthful(_answer(spans, engine), DIGESTS) is holds


def _ledger() -> Ledger:
    ledger = Ledger(steps=3)
    for number, digest in DIGESTS.items():
        ledger.published(number, digest)
    return ledger


def test_a_wrong_version_and_a_violation_are_counted() -> None:
    ledger = _ledger()
    ledger.answered(_answer([(2, 0, 4)], [["c", 0, 4]]), least=1)
    ledger.answered(_answer([(2, 0, 4)], [["b", 0, 4]]), least=1)
    ledger.answered(_answer([(0, 0, 2), (1, 2, 4)], [["a", 0, 2], ["b", 2, 4]]), least=1)
    result = ledger.result(1.0)
    assert (result["answers"], result["wrong_version_answers"], result["constraint_violations"]) == (3, 1, 1)
    assert result["staleness_max"] == 2


def test_an_answer_by_a_version_that_is_not_recorded_yet_waits_for_its_proof() -> None:
    ledger = _ledger()
    ledger.answered(_answer([(3, 0, 4)], [["d", 0, 4]]), least=1)
    ledger.prove()
    assert ledger.wrong == 0
    ledger.published(3, "d")
    assert ledger.result(1.0)["wrong_version_answers"] == 0


def test_an_answer_that_is_never_proved_counts_as_wrong() -> None:
    ledger = _ledger()
    ledger.answered(_answer([(3, 0, 4)], [["d", 0, 4]]), least=1)
    assert ledger.result(1.0)["wrong_version_answers"] == 1


def test_the_view_shows_what_is_counted() -> None:
    ledger = _ledger()
    state = examples()["replica_state"]
    assert isinstance(state, ReplicaState)
    assert (state.transition, state.phase) == (Transition.ACTIVATED, Phase.SERVING)
    ledger.heard(state)
    ledger.rewards += [0.1, 0.5]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(render(ledger, [], "demo"))
    shown = console.export_text()
    for said in ("reward per step", "wrong-version answers", "replica-0", "12.5 ms", "head version", "step 2"):
        assert said in shown
