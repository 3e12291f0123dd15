"""Which versions satisfy a request, and what is gone for good (D9, D10, D17)."""

from __future__ import annotations

from typing import Any

import pytest

from stitch.core.admission import Bounds, Constraint, Gone, lag, resolve, satisfies
from stitch.core.ids import RunId, VersionNumber
from tests.core.builders import History, version

pytestmark = pytest.mark.unit


@pytest.fixture
def line() -> History:
    history = History()
    history.claimed("a")
    history.published("a/0", "a/1", "a/2", "a/5")
    return history


def asked(**fields: Any) -> Constraint:
    return Constraint(**fields)


def holds(history: History, serving: str, **fields: Any) -> bool:
    bounds = resolve(history.policy, asked(**fields))
    return not isinstance(bounds, Gone) and satisfies(history.policy, bounds, version(serving))


def gone(history: History, **fields: Any) -> str | None:
    bounds = resolve(history.policy, asked(**fields))
    return bounds.reason if isinstance(bounds, Gone) else None


def test_no_constraint_is_met_by_whatever_serves(line: History) -> None:
    assert asked().empty
    assert holds(line, "a/0")
    assert holds(line, "elsewhere/9")
    assert not satisfies(line.policy, Bounds(), None)


@pytest.mark.parametrize(("least", "met"), [(0, True), (5, True), (6, False)])
def test_min_version(line: History, least: int, met: bool) -> None:
    assert holds(line, "a/5", min_version=least) == met
    assert gone(line, min_version=least) is None


def test_exact_version(line: History) -> None:
    assert holds(line, "a/2", exact_version=2)
    assert not holds(line, "a/1", exact_version=2)
    assert not holds(line, "a/5", exact_version=2)


def test_min_and_exact_together(line: History) -> None:
    assert not holds(line, "a/2", exact_version=2, min_version=3)
    assert holds(line, "a/5", exact_version=5, min_version=3)


@pytest.mark.parametrize(("max_lag", "least"), [(0, 5), (1, 2), (2, 1), (3, 0), (99, 0)])
def test_max_lag_counts_versions_on_the_living_path(line: History, max_lag: int, least: int) -> None:
    assert resolve(line.policy, asked(max_lag=max_lag)) == Bounds(run=RunId("a"), least=VersionNumber(least))


def test_d10_lag_after_a_rewind_is_not_a_difference_of_numbers(line: History) -> None:
    line.claimed("a", 1)
    line.published("a/11")
    assert lag(line.policy, version("a/1")) == 1
    assert lag(line.policy, version("a/11")) == 0
    assert lag(line.policy, version("a/5")) is None
    assert holds(line, "a/1", max_lag=1)
    assert not holds(line, "a/0", max_lag=1)


def test_d10_abandoned_versions_satisfy_no_minimum(line: History) -> None:
    line.claimed("a", 2)
    assert not holds(line, "a/5", min_version=2)
    assert holds(line, "a/2", min_version=2)


def test_d9_numbers_of_two_runs_are_not_compared(line: History) -> None:
    line.claimed("b", 0, alias="a/5", writer="w1")
    assert not holds(line, "a/5", min_version=1)
    assert not holds(line, "a/5", run="b", min_version=0)
    assert holds(line, "b/0", min_version=0)
    line.published("b/60")
    assert gone(line, run="a", min_version=5) == "run a was superseded by run b"


def test_d17_above_the_known_tip_is_not_gone(line: History) -> None:
    assert gone(line, exact_version=6) is None
    assert gone(line, min_version=600) is None
    assert gone(line, run="never-claimed", exact_version=3) is None


def test_version_that_this_reader_has_not_heard_of_counts_above_all_that_it_knows(line: History) -> None:
    assert holds(line, "a/6", min_version=6)
    assert holds(line, "new-run/0", run="new-run", min_version=0)
    assert not holds(line, "a/4", min_version=3)


@pytest.mark.parametrize("number", [3, 4])
def test_number_that_was_left_out_is_gone(line: History, number: int) -> None:
    reason = gone(line, exact_version=number)
    assert reason is not None
    assert "never published" in reason
    assert f"a/weight_v00000{number}" in reason


def test_abandoned_retired_and_quarantined_exact_versions_are_gone(line: History) -> None:
    line.accepted(line.retirement("a/0"))
    line.accepted(line.quarantine("a/1"))
    line.claimed("a", 2)
    for number, why in ((0, "retired"), (1, "quarantined"), (5, "abandoned")):
        assert why in (gone(line, exact_version=number) or "")
        assert not holds(line, f"a/{number}", min_version=0)


def test_alias_of_a_quarantined_version_is_gone(line: History) -> None:
    line.claimed("b", 7, alias="a/5", writer="w1")
    assert holds(line, "b/7", exact_version=7)
    line.accepted(line.quarantine("a/5"))
    assert "quarantined" in (gone(line, run="b", exact_version=7) or "")


def test_before_any_claim_nothing_serves_and_nothing_is_gone() -> None:
    history = History()
    for fields in ({"min_version": 0}, {"exact_version": 3}, {"max_lag": 0}):
        assert gone(history, **fields) is None
        assert not holds(history, "a/9", **fields)
    assert holds(history, "a/9", run="a", min_version=3)


def test_max_lag_over_a_boundary_of_runs_takes_all_of_the_new_run(line: History) -> None:
    line.claimed("b", 3, alias="a/5", writer="w1")
    line.published("b/4")
    assert resolve(line.policy, asked(max_lag=3)) == Bounds(run=RunId("b"), least=VersionNumber(3))


def test_max_lag_on_a_run_without_versions_asks_for_its_run_alone() -> None:
    history = History()
    history.claimed("a")
    assert resolve(history.policy, asked(max_lag=2)) == Bounds(run=RunId("a"))


def test_bounds_read_as_a_sentence(line: History) -> None:
    texts = [
        str(resolve(line.policy, asked(**fields)))
        for fields in ({}, {"run": "a"}, {"exact_version": 2}, {"min_version": 2}, {"max_lag": 0})
    ]
    assert texts == [
        "any version",
        "any version of run a",
        "version 2 of run a",
        "version 2 or newer of run a",
        "version 5 or newer of run a",
    ]
