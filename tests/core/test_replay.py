"""The digest by which two readers compare what they know (I8)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from immutables import Map

from stitch.core import lineage as folds
from stitch.core.ids import Offset
from stitch.core.lineage import Lineage, Position
from stitch.core.replay import View, plain, state_digest
from tests.core.agents import Stream, serving
from tests.core.builders import History, version

pytestmark = pytest.mark.unit


def example() -> History:
    history = History()
    history.claimed("a")
    history.published("a/0")
    history.published("a/1", base="a/0")
    history.accepted(history.move("stable", "a/0"))
    history.accepted(history.quarantine("a/1"))
    history.append(history.move("stable", "a/1"))
    return history


def test_equal_prefixes_give_equal_digests_and_each_decision_another() -> None:
    seen = []
    lineage = Lineage()
    for n, decision in enumerate(example().log):
        lineage, _ = folds.apply(lineage, decision, Position(offset=Offset(n), time_ms=1000 * n))
        seen.append(View(lineage=lineage).digest)
    assert len(set(seen)) == len(seen)
    assert View(lineage=example().lineage).digest == seen[-1]


def test_fleet_counts_in_the_digest() -> None:
    stream = Stream()
    before = View(fleet=stream.fleet).digest
    serving(stream, "r")
    assert View(fleet=stream.fleet).digest != before


def test_digest_does_not_depend_on_the_order_in_which_a_map_was_filled() -> None:
    one = Map({"x": 1}).set("y", 2)
    other = Map({"y": 2}).set("x", 1)
    assert state_digest(one) == state_digest(other)


def test_plain_form() -> None:
    @dataclass(frozen=True)
    class Thing:
        number: int
        flag: bool
        ratio: float | None
        ref: object

    made = Thing(number=1, flag=True, ratio=None, ref=(version("a/1"), Map({version("a/2"): "x"})))
    assert plain(made) == {
        "number": 1,
        "flag": True,
        "ratio": None,
        "ref": [{"run": "a", "number": 1}, {"a/weight_v000002": "x"}],
    }


def test_plain_form_of_a_lineage() -> None:
    plain_state = plain(example().lineage)
    assert set(plain_state) == {"level", "policies"}
    policy = plain_state["policies"]["p"]
    assert policy["channels"]["stable"]["target"] == {"run": "a", "number": 0}
    assert policy["channels"]["latest"]["target"] == {"run": "a", "number": 0}
    assert policy["verdicts"] == {
        "e0": "accepted",
        "e1": "accepted",
        "e2": "accepted",
        "e3": "accepted",
        "e4": "accepted",
        "e5": "version_unusable",
    }
