"""Which version a text means, and what is said where it means none."""

from __future__ import annotations

import pytest

from stitch.core.errors import InvalidRequest, VersionGone
from stitch.core.ids import PolicyId
from stitch.core.lineage import Lineage, PolicyLineage
from stitch.operators.versions import find, known_policy, unretired, with_chains
from tests.core.builders import History, chain_of, version

pytestmark = pytest.mark.unit


@pytest.fixture
def policy() -> PolicyLineage:
    """r1 with 0, 1 and 2; `stable` at 1."""
    history = chain_of("r1/0", "r1/1", "r1/2")
    history.accepted(history.move("stable", "r1/1"))
    return history.policy


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("2", "r1/2"),
        ("0002", "r1/2"),
        ("r1/weight_v000001", "r1/1"),
        ("r1/weight_v1", "r1/1"),
        ("latest", "r1/2"),
        ("stable", "r1/1"),
    ],
)
def test_the_forms(policy: PolicyLineage, text: str, means: str) -> None:
    assert find(policy, text).ref == version(means)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9", "there is no r1/weight_v000009 of policy p; the run's greatest number is 2"),
        ("r2/weight_v000001", "there is no such run, but r1"),
        ("canary", "has the channels latest, stable"),
        ("r1/1", "is not of the form run/weight_v000007"),
        ("", "give a number (41)"),
        ("9" * 40, "is not a whole number"),
        ("٣", "give a number"),
    ],
)
def test_what_means_nothing(policy: PolicyLineage, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find(policy, text)
    assert said in str(caught.value)
    assert caught.value.field == "version"


def test_a_retired_version_says_when() -> None:
    history = History()
    history.claimed("r1")
    history.published("r1/0", "r1/1", "r1/2")
    history.accepted(history.retirement("r1/1"))
    with pytest.raises(VersionGone, match="r1/weight_v000001 was retired at offset"):
        find(history.policy, "1")
    assert [v.ref for v in unretired(history.policy)] == [version("r1/0"), version("r1/2")]


def test_a_channel_without_a_target() -> None:
    history = chain_of("r1/0")
    history.accepted(history.quarantine("r1/0"))
    with pytest.raises(InvalidRequest, match="names no version at present"):
        find(history.policy, "latest")


def test_chains_are_listed_once_oldest_first(policy: PolicyLineage) -> None:
    asked = (find(policy, "2"), find(policy, "1"))
    members = with_chains(policy, asked)
    assert len({member.ref for member in members}) == len(members)
    assert list(members) == sorted(members, key=lambda member: member.position.offset)


def test_a_policy_that_nobody_knows_names_those_there_are(policy: PolicyLineage) -> None:
    lineage = Lineage(policies=Lineage().policies.set(policy.policy, policy))
    assert known_policy(lineage, policy.policy) is policy
    with pytest.raises(InvalidRequest, match="the log has p"):
        known_policy(lineage, PolicyId("q"))
    with pytest.raises(InvalidRequest, match="none yet"):
        known_policy(Lineage(), PolicyId("q"))
