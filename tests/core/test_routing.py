"""The choice among the replicas that satisfy a request."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.ids import ReplicaId
from stitch.core.routing import Candidate, choose

pytestmark = pytest.mark.unit
EXAMPLES = settings(max_examples=200, deadline=None)

candidates = st.lists(
    st.builds(
        lambda name, load, activating: Candidate(replica=ReplicaId(name), load=load, capacity=4, activating=activating),
        st.sampled_from([f"r{n}" for n in range(12)]),
        st.integers(0, 6),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda c: c.replica,
)
sessions = st.one_of(st.none(), st.text(max_size=8))


def free(*names: str) -> list[Candidate]:
    return [Candidate(replica=ReplicaId(name), load=0, capacity=4, activating=False) for name in names]


@EXAMPLES
@given(candidates, sessions, st.randoms(use_true_random=False))
def test_never_a_full_one_and_an_activating_one_only_where_no_other_has_room(
    among: list[Candidate], session: str | None, chance: object
) -> None:
    chosen = choose(among, session=session, pick=chance.randrange)  # type: ignore[attr-defined]
    roomy = [c for c in among if c.load < c.capacity]
    if chosen is None:
        assert not roomy
        return
    assert chosen in roomy
    assert not chosen.activating or all(c.activating for c in roomy)


@EXAMPLES
@given(candidates, st.text(max_size=8), st.permutations(range(8)))
def test_a_session_stays_while_its_replica_has_room_in_whatever_order_they_are_listed(
    among: list[Candidate], session: str, order: list[int]
) -> None:
    shuffled = [among[n] for n in order if n < len(among)]
    everywhere = [Candidate(replica=c.replica, load=0, capacity=4, activating=False) for c in among]
    home = choose(everywhere, session=session, pick=lambda _: 0)
    for pick in (0, 1):
        chosen = choose(shuffled, session=session, pick=lambda n, pick=pick: pick % n)
        at_home = next((c for c in among if home is not None and c.replica == home.replica), None)
        if at_home is not None and at_home.has_room:
            assert chosen == at_home


@EXAMPLES
@given(candidates.filter(lambda c: len(c) > 1), st.text(max_size=8), st.data())
def test_a_replica_that_leaves_moves_only_its_own_sessions(among: list[Candidate], session: str, data: st.DataObject) -> None:
    everywhere = [Candidate(replica=c.replica, load=0, capacity=4, activating=False) for c in among]
    home = choose(everywhere, session=session, pick=lambda _: 0)
    gone = data.draw(st.sampled_from(everywhere))
    after = choose([c for c in everywhere if c != gone], session=session, pick=lambda _: 0)
    assert after is not None
    if gone != home:
        assert after == home


def test_sessions_spread_over_the_replicas() -> None:
    among = free("r0", "r1", "r2", "r3")
    homes = Counter(choose(among, session=f"s{n}", pick=lambda _: 0) for n in range(400))
    assert len(homes) == 4
    assert min(homes.values()) > 50


def test_the_less_loaded_of_two_drawn() -> None:
    busy, idle = (Candidate(replica=ReplicaId(n), load=load, capacity=4, activating=False) for n, load in (("b", 3), ("i", 1)))
    draws = iter([0, 1])
    assert choose([busy, idle], session=None, pick=lambda _: next(draws)) == idle
    draws = iter([0, 0])
    assert choose([busy, idle], session=None, pick=lambda _: next(draws)) == busy


def test_nobody_to_choose_from() -> None:
    assert choose([], session=None, pick=lambda _: 0) is None
    assert choose([], session="s", pick=lambda _: 0) is None
    full = Candidate(replica=ReplicaId("r"), load=4, capacity=4, activating=False)
    assert choose([full], session="s", pick=lambda _: 0) is None
