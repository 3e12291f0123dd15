"""The fold: channels, quarantine, retirement and anchors (rules 6 and 7)."""

from __future__ import annotations

import pytest

from stitch.core import lineage as folds
from stitch.core.events import ChannelMoved
from stitch.core.ids import LATEST, ChannelName, Sequence
from stitch.core.lineage import Position, Verdict
from stitch.core.manifest import ManifestRef
from tests.core.builders import History, chain_of, hexdigest, version

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


# --- rule 6: channels and quarantine ---------------------------------------------------------------------------------------


def test_channel_moves_by_its_own_count(line: History) -> None:
    line.accepted(line.move("stable", "a/1"))
    line.accepted(line.move("stable", "a/0"))
    channel = line.policy.channels[STABLE]
    assert (channel.sequence, channel.target, channel.history) == (2, version("a/0"), (version("a/1"),))


@pytest.mark.parametrize("sequence", [0, 2])
def test_move_with_another_sequence_is_ignored(line: History, sequence: int) -> None:
    line.accepted(line.move("stable", "a/1"))
    assert line.append(line.move("stable", "a/2", sequence=sequence)) is Verdict.STALE_SEQUENCE


def test_latest_is_not_moved_by_operators(line: History) -> None:
    assert line.append(line.move("latest", "a/1")) is Verdict.CHANNEL_NOT_MOVABLE


def test_channel_names_only_what_is_accepted_unretired_and_not_quarantined(line: History) -> None:
    assert line.append(line.move("stable", "a/9")) is Verdict.VERSION_UNUSABLE
    line.accepted(line.retirement("a/0"))
    assert line.append(line.move("stable", "a/0")) is Verdict.VERSION_UNUSABLE
    line.accepted(line.quarantine("a/1"))
    assert line.append(line.move("stable", "a/1")) is Verdict.VERSION_UNUSABLE


def test_operators_do_not_move_the_head(line: History) -> None:
    publication = line.publication("a/3", event_id="planned-before")
    line.accepted(line.move("stable", "a/1"))
    line.accepted(line.quarantine("a/0"))
    line.accepted(publication)


def test_quarantine_of_the_tip_moves_latest_to_the_nearest_eligible_ancestor(line: History) -> None:
    line.accepted(line.quarantine("a/2"))
    assert (line.policy.tip, line.latest()) == (version("a/2"), version("a/1"))
    line.accepted(line.quarantine("a/1"))
    assert line.latest() == version("a/0")
    line.published("a/3", base="a/2")
    assert line.latest() == version("a/3")


def test_quarantine_passes_over_retired_ancestors(line: History) -> None:
    line.accepted(line.retirement("a/1"))
    line.accepted(line.quarantine("a/2"))
    assert line.latest() == version("a/0")


def test_quarantine_of_the_only_version_leaves_no_target(history: History) -> None:
    history.claimed("a")
    history.published("a/0")
    history.accepted(history.quarantine("a/0"))
    assert (history.latest(), history.policy.channels[LATEST].sequence) == (None, 3)


def test_quarantine_moves_a_channel_to_its_newest_earlier_target_that_is_eligible(line: History) -> None:
    for target in ("a/0", "a/1", "a/2"):
        line.accepted(line.move("stable", target))
    line.accepted(line.quarantine("a/1"))
    assert line.policy.channels[STABLE].target == version("a/2")
    line.accepted(line.quarantine("a/2"))
    assert line.policy.channels[STABLE].target == version("a/0")
    assert line.policy.channels[STABLE].sequence == 4


def test_quarantine_moves_every_channel_that_names_the_version_and_no_other(line: History) -> None:
    line.accepted(line.move("stable", "a/0"))
    line.accepted(line.move("canary", "a/0"))
    line.accepted(line.move("canary", "a/2"))
    line.accepted(line.quarantine("a/2"))
    channels = line.policy.channels
    assert (channels[STABLE].target, channels[STABLE].sequence) == (version("a/0"), 1)
    assert (channels[ChannelName("canary")].target, channels[ChannelName("canary")].sequence) == (version("a/0"), 3)


def test_quarantine_of_unknown_and_quarantined_versions_does_nothing(line: History) -> None:
    assert line.append(line.quarantine("a/9")) is Verdict.VERSION_UNKNOWN
    line.accepted(line.quarantine("a/1"))
    assert line.append(line.quarantine("a/1")) is Verdict.NOTHING_TO_DO


def test_quarantine_of_a_source_reaches_its_aliases_through_a_chain_of_them(line: History) -> None:
    line.claimed("b", 0, alias="a/2", writer="w1")
    line.claimed("c", 5, alias="b/0", writer="w2")
    line.accepted(line.quarantine("a/2"))
    assert not line.policy.eligible(version("c/5"))
    assert line.latest() == version("a/1")


def test_quarantine_of_an_alias_reaches_what_it_is_an_alias_of(line: History) -> None:
    """The weights are bad under every name: a channel that names the source moves as well."""
    line.accepted(line.move("stable", "a/1"))
    line.accepted(line.move("stable", "a/2"))
    line.claimed("b", 0, alias="a/2", writer="w1")
    line.accepted(line.quarantine("b/0"))
    assert not line.policy.eligible(version("a/2"))
    assert line.policy.channels[STABLE].target == version("a/1")


def test_quarantined_version_may_still_be_booted_from(line: History) -> None:
    line.accepted(line.quarantine("a/2"))
    line.claimed("a", 2)
    assert line.latest() == version("a/1")


def test_channel_history_is_bounded(line: History) -> None:
    for n in range(folds.CHANNEL_HISTORY + 10):
        line.accepted(line.move("stable", f"a/{n % 2}"))
    assert len(line.policy.channels[STABLE].history) == folds.CHANNEL_HISTORY


def test_move_to_the_same_target_is_a_move(line: History) -> None:
    line.accepted(line.move("stable", "a/1"))
    line.accepted(line.move("stable", "a/1"))
    channel = line.policy.channels[STABLE]
    assert (channel.sequence, channel.history) == (Sequence(2), ())


def test_move_needs_no_owner_of_the_target_run(line: History) -> None:
    """An operator may keep `stable` on a version of a superseded run."""
    line.claimed("b", writer="w1")
    move = line.move("stable", "a/2")
    assert isinstance(move, ChannelMoved)
    line.accepted(move)


# --- rule 7: retirement and anchors ----------------------------------------------------------------------------------------


def test_retirement_of_what_nothing_needs(line: History) -> None:
    line.accepted(line.retirement("a/0"))
    retired = line.policy.versions[version("a/0")].retired
    assert retired == Position(offset=folds.Offset(4), time_ms=4000)
    assert line.append(line.retirement("a/0")) is Verdict.NOTHING_TO_DO
    assert line.append(line.retirement("a/9")) is Verdict.VERSION_UNKNOWN


def test_retirement_of_the_tip_and_of_a_channel_target_is_ignored(line: History) -> None:
    assert line.append(line.retirement("a/2")) is Verdict.VERSION_NEEDED
    line.accepted(line.move("stable", "a/0"))
    assert line.append(line.retirement("a/0")) is Verdict.VERSION_NEEDED


def test_retirement_of_a_quarantined_tip_is_ignored(line: History) -> None:
    line.accepted(line.quarantine("a/2"))
    assert line.append(line.retirement("a/2")) is Verdict.VERSION_NEEDED


def test_retirement_of_a_chain_goes_from_its_end_only() -> None:
    history = chain_of("a/0", "a/1", "a/2")
    for needed in ("a/0", "a/1"):
        assert history.append(history.retirement(needed)) is Verdict.VERSION_NEEDED
    history.published("a/3")
    assert history.append(history.retirement("a/1")) is Verdict.VERSION_NEEDED
    for free in ("a/2", "a/1", "a/0"):
        history.accepted(history.retirement(free))


def test_retirement_of_the_source_of_an_alias_is_ignored(line: History) -> None:
    line.claimed("b", 0, alias="a/2", writer="w1")
    assert line.append(line.retirement("a/2")) is Verdict.VERSION_NEEDED
    line.published("b/1")
    line.accepted(line.retirement("b/0"))
    line.accepted(line.retirement("a/2"))


def test_anchor_frees_the_chain_below_it() -> None:
    history = chain_of("a/0", "a/1", "a/2")
    history.accepted(history.anchor("a/1"))
    assert history.policy.nearest_anchor(version("a/2")) == (version("a/1"), history.policy.versions[version("a/1")].anchor)
    history.accepted(history.retirement("a/0"))
    assert history.append(history.retirement("a/1")) is Verdict.VERSION_NEEDED


def test_anchor_of_an_alias_frees_its_source() -> None:
    history = chain_of("a/0", "a/1")
    history.claimed("b", 0, alias="a/1", writer="w1")
    history.accepted(history.anchor("b/0"))
    history.accepted(history.retirement("a/1"))
    history.accepted(history.retirement("a/0"))
    assert [v.ref for v in history.policy.chain(version("b/0"))] == [version("b/0")]


def test_anchor_counts_only_in_its_epoch() -> None:
    """D3: bytes of an anchor that has yet to land may be collected once its epoch is over."""
    history = chain_of("a/0", "a/1")
    late = history.anchor("a/1", event_id="late")
    history.claimed("a", 1)
    assert history.append(late) is Verdict.STALE_EPOCH
    assert history.append(history.anchor("a/1", epoch=3)) is Verdict.STALE_EPOCH
    history.accepted(history.anchor("a/1"))


def test_anchor_is_of_a_delta_with_the_same_weights() -> None:
    history = chain_of("a/0", "a/1", "a/2")
    assert history.append(history.anchor("a/9")) is Verdict.VERSION_UNKNOWN
    assert history.append(history.anchor("a/0")) is Verdict.NOTHING_TO_DO
    other = ManifestRef(key="k", digest=hexdigest("k"), weights_digest=hexdigest("others"))
    assert history.append(history.anchor("a/1", manifest=other)) is Verdict.WEIGHTS_DIFFER
    history.accepted(history.anchor("a/1"))
    assert history.append(history.anchor("a/1")) is Verdict.NOTHING_TO_DO
    history.published("a/3")
    history.accepted(history.retirement("a/2"))
    assert history.append(history.anchor("a/2")) is Verdict.VERSION_UNUSABLE


def test_anchor_of_a_channels_chain_stands_behind_the_channel_without_moving_it() -> None:
    """D6: pointers carry the nearest anchor, so they must be written again."""
    history = chain_of("a/0", "a/1", "a/2")
    history.accepted(history.move("stable", "a/0"))
    before = history.policy.channels
    added = history.anchor("a/1")
    history.accepted(added)
    latest, was = history.policy.channels[LATEST], before[LATEST]
    assert (latest.sequence, latest.target, latest.history) == (was.sequence, was.target, was.history)
    assert (latest.source, latest.position.offset) == (added.event_id, len(history.log) - 1)
    assert history.policy.channels[STABLE] == before[STABLE]
