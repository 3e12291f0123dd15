"""The one rule that says where a chain should have a full form."""

from __future__ import annotations

import pytest

from stitch.core.anchors import AnchorRule, source_of
from tests.core.builders import History, chain_of, version

pytestmark = pytest.mark.unit
BY_LENGTH = AnchorRule(every=4, ratio=1e9)


def chain(length: int) -> History:
    return chain_of(*(f"a/{number}" for number in range(length)))


def test_the_next_version_is_full_once_a_chain_has_all_that_it_may() -> None:
    history = chain(3)
    assert not BY_LENGTH.wants_after(history.policy, version("a/2"))
    history.published("a/3", base="a/2")
    assert BY_LENGTH.wants_after(history.policy, version("a/3"))
    history.accepted(history.anchor("a/2"))
    assert not BY_LENGTH.wants_after(history.policy, version("a/3"))


def test_or_once_its_deltas_weigh_more_than_a_full_form() -> None:
    history = chain(4)  # each weighs 10
    assert AnchorRule(ratio=2.9).wants_after(history.policy, version("a/3"))
    assert not AnchorRule(ratio=3.0).wants_after(history.policy, version("a/3"))


def test_overdue_versions_are_those_at_which_a_trainer_would_have_anchored() -> None:
    history = chain(14)
    assert [ref.number for ref in BY_LENGTH.overdue(history.policy)] == [4, 8, 12]
    assert AnchorRule(every=14, ratio=1e9).overdue(history.policy) == ()
    assert [ref.number for ref in AnchorRule(every=1, ratio=1e9).overdue(history.policy)] == list(range(1, 14))


def test_by_weight_planned_anchors_count_as_well() -> None:
    assert [ref.number for ref in AnchorRule(every=99, ratio=2.0).overdue(chain(10).policy)] == [4, 8]


@pytest.mark.parametrize("every", range(1, 8))
def test_once_anchored_no_chain_is_too_long(every: int) -> None:
    rule = AnchorRule(every=every, ratio=1e9)
    history = chain(20)
    for ref in rule.overdue(history.policy):
        history.accepted(history.anchor(f"{ref.run}/{ref.number}"))
    assert rule.overdue(history.policy) == ()
    for known in history.policy.versions:
        assert len(list(history.policy.chain(known))) <= every


def test_abandoned_versions_are_no_matter_unless_a_channel_names_them() -> None:
    history = chain(9)
    history.claimed("a", 2)
    assert BY_LENGTH.overdue(history.policy) == ()
    history.accepted(history.move("stable", "a/8"))
    assert [ref.number for ref in BY_LENGTH.overdue(history.policy)] == [8], "one anchor ends its chain"


def test_an_alias_is_served_by_an_anchor_of_what_it_is() -> None:
    history = chain(6)
    history.claimed("b", 0, alias="a/5")
    assert source_of(history.policy, history.policy.versions[version("b/0")]).ref == version("a/5")
    assert BY_LENGTH.overdue(history.policy) == (version("a/5"),)
    history.accepted(history.anchor("a/5"))
    assert BY_LENGTH.overdue(history.policy) == ()
