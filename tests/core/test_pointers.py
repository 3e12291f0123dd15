"""Pointers: derived from the lineage, ordered, and written again where the last one is behind (rule 5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stitch.core.events import ChannelPointer
from stitch.core.ids import LATEST, ChannelName, EventId, Generation, Offset, Sequence
from stitch.core.pointers import greatest, is_behind, pointer, pointer_key, stale_channels
from tests.core.builders import POLICY, History, version

pytestmark = pytest.mark.unit


def derived(history: History, channel: str = "latest", generation: int = 0) -> ChannelPointer:
    made = pointer(history.policy, ChannelName(channel), event_id=EventId("x"), generation=Generation(generation))
    assert made is not None
    return made


@pytest.fixture
def chain() -> History:
    history = History()
    history.claimed("a")
    history.published("a/0")
    history.published("a/1", base="a/0")
    history.published("a/2", base="a/1")
    return history


def test_pointer_carries_what_it_takes_to_load_the_target(chain: History) -> None:
    made = derived(chain)
    target = chain.policy.versions[version("a/2")]
    full = chain.policy.versions[version("a/0")]
    assert (made.target, made.manifest, made.epoch) == (target.ref, target.manifest, 1)
    assert (made.anchor, made.anchor_manifest) == (full.ref, full.manifest)
    assert (made.sequence, made.offset, made.source) == (4, 3, target.event_id)
    assert pointer_key(made.policy, made.channel) == "p/latest"


def test_no_pointer_where_there_is_no_target() -> None:
    history = History()
    assert pointer(history.policy, LATEST, event_id=EventId("x"), generation=Generation(0)) is None
    history.claimed("a")
    assert pointer(history.policy, LATEST, event_id=EventId("x"), generation=Generation(0)) is None
    assert stale_channels(history.lineage, {}) == []


def test_pointer_of_an_alias_names_the_shared_manifest_and_its_anchor(chain: History) -> None:
    chain.claimed("b", 0, alias="a/2", writer="w1")
    made = derived(chain)
    assert (made.target, made.anchor) == (version("b/0"), version("a/0"))
    assert made.manifest == chain.policy.versions[version("a/2")].manifest


def test_d6_anchor_makes_every_pointer_over_it_stale_and_later_than_the_old_one(chain: History) -> None:
    before = derived(chain)
    chain.accepted(chain.anchor("a/1"))
    after = derived(chain)
    assert (after.sequence, after.target) == (before.sequence, before.target)
    assert after.anchor == version("a/1")
    assert is_behind(before, after)
    assert stale_channels(chain.lineage, {"p/latest": before}) == [(POLICY, LATEST)]
    assert greatest([after, before]) == after
    assert stale_channels(chain.lineage, {"p/latest": after}) == []


def test_anchor_that_the_target_does_not_need_writes_nothing_again(chain: History) -> None:
    chain.accepted(chain.move("stable", "a/0"))
    before = derived(chain, "stable")
    chain.accepted(chain.anchor("a/2"))
    assert derived(chain, "stable") == before


def test_d7_repair_looks_at_the_last_record_not_at_the_greatest(chain: History) -> None:
    new = derived(chain)
    old = replace(new, sequence=Sequence(2), offset=Offset(1))
    assert greatest([new, old]) == new
    assert is_behind(old, new)
    assert is_behind(None, new)
    assert not is_behind(new, new)
    assert not is_behind(new, old)


def test_generation_goes_before_sequence_and_sequence_before_offset(chain: History) -> None:
    first = derived(chain)
    orders = [
        first,
        replace(first, offset=Offset(9)),
        replace(first, sequence=Sequence(5), offset=Offset(0)),
        replace(first, generation=Generation(1), sequence=Sequence(0), offset=Offset(0)),
    ]
    assert sorted(orders, key=lambda p: p.order) == orders
    assert greatest(reversed(orders)) == orders[-1]
    assert greatest([]) is None


def test_stale_channels_names_each_channel_that_is_behind(chain: History) -> None:
    chain.accepted(chain.move("stable", "a/0"))
    written = {"p/latest": derived(chain), "p/stable": derived(chain, "stable")}
    assert stale_channels(chain.lineage, written) == []
    chain.accepted(chain.move("stable", "a/1"))
    assert stale_channels(chain.lineage, written) == [(POLICY, "stable")]
    assert stale_channels(chain.lineage, {}) == [(POLICY, "latest"), (POLICY, "stable")]
