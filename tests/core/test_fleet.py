"""The fleet fold: whose records count, what a reader knows that begins in mid-stream, and who may activate."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core import fleet as folds
from stitch.core.events import Phase, ReplicaState, Transition
from stitch.core.fleet import Fleet, Heard
from stitch.core.ids import (
    Offset,
    PoolName,
    ReplicaId,
)
from stitch.core.lineage import Position
from tests.core.agents import HEARTBEAT_MS, POOL, Agent, Stream, serving

pytestmark = pytest.mark.unit

EXAMPLES = settings(max_examples=150, deadline=None)


# --- whose records count -----------------------------------------------------------------------------------------------------


def test_incarnation_is_the_offset_of_the_joined_record() -> None:
    stream = Stream()
    serving(stream, "r0")
    agent = Agent(stream, "r1")
    assert agent.join() is Heard.ACCEPTED
    assert stream.member("r1").incarnation == 2
    agent.say()
    assert stream.member("r1").incarnation == 2


def test_newest_join_wins_and_the_older_life_is_fenced() -> None:
    stream = Stream()
    old = Agent(stream, "r", "1")
    old.join()
    new = Agent(stream, "r", "2")
    new.join()
    assert old.say() is Heard.FENCED
    assert new.say() is Heard.ACCEPTED
    assert stream.member("r").state.life == new.state.life


def test_records_of_one_life_count_in_the_order_of_their_sequence() -> None:
    stream = Stream()
    (agent,) = serving(stream, "r")
    slow, fast = agent.next(in_flight=1), agent.next(in_flight=2)
    assert stream.append(fast) is Heard.ACCEPTED
    assert stream.append(slow) is Heard.OLD
    assert stream.append(fast) is Heard.DUPLICATE
    assert stream.member("r").state.in_flight == 2


def test_doubled_join_of_the_same_life_changes_nothing() -> None:
    stream = Stream()
    agent = Agent(stream, "r")
    joined = agent.state
    agent.join()
    agent.say()
    before = stream.fleet.members
    assert stream.append(joined) is Heard.DUPLICATE
    assert stream.fleet.members == before


def test_doubled_join_of_an_older_life_holds_until_the_replica_is_replaced_for_every_reader_alike() -> None:
    """Known and accepted: a fold without history cannot tell a late copy of an old join from a new one. Whoever lives then sees a
    newer join of its own name and leaves; a third life takes over."""
    stream = Stream()
    old = Agent(stream, "r", "1")
    joined = old.state
    old.join()
    new = Agent(stream, "r", "2")
    new.join()
    assert stream.append(joined) is Heard.ACCEPTED
    assert new.say() is Heard.FENCED
    third = Agent(stream, "r", "3")
    assert third.join() is Heard.ACCEPTED
    assert old.say() is Heard.FENCED


def test_time_is_that_of_the_newest_record_whatever_became_of_it() -> None:
    stream = Stream()
    (agent,) = serving(stream, "r")
    stream.append(agent.state, after_ms=5000)
    assert stream.fleet.now_ms == stream.now_ms


def test_a_clock_that_was_ahead_silences_nobody_for_longer_than_it_was() -> None:
    """Kafka's time is its leader's: one whose clock is an hour ahead leads, then one whose clock is right."""
    stream = Stream()
    a, b = serving(stream, "a", "b")
    hour, lease = 3_600_000, folds.LEASE_PERIODS * HEARTBEAT_MS
    b.say(Transition.ACTIVATION_STARTED, want=b.want(), phase=Phase.ACTIVATING, after_ms=hour)
    a.say()
    a.say(after_ms=-hour)
    assert stream.fleet.now_ms == stream.now_ms
    assert not any(map(stream.fleet.silent, stream.fleet.members.values()))
    a.say(after_ms=lease + 1000)
    assert [name for name, member in stream.fleet.members.items() if stream.fleet.silent(member)] == ["b"]
    b.say()
    a.say(after_ms=folds.SLOT_MS - lease)
    b.say()
    a.want()
    assert allowed(stream, "a", "b") == ["a"], "what holds a slot for too long loses it"


def test_lease_is_five_of_the_periods_that_the_replica_states() -> None:
    stream = Stream()
    (agent, other) = serving(stream, "r", "other")
    lease = folds.LEASE_PERIODS * HEARTBEAT_MS
    assert stream.member("r").lease_ms == lease
    other.say(after_ms=lease - 30)
    assert not stream.fleet.silent(stream.member("r"))
    other.say(after_ms=30)
    assert stream.fleet.silent(stream.member("r"))
    agent.say()
    assert not stream.fleet.silent(stream.member("r"))


# --- the budget (D11) --------------------------------------------------------------------------------------------------------


def allowed(stream: Stream, *replicas: str) -> list[str]:
    return [r for r in replicas if folds.may_activate(stream.fleet, ReplicaId(r))]


def test_d11_first_wants_in_log_order_go_up_to_a_quarter_of_the_serving_ones() -> None:
    stream = Stream()
    names = [f"r{n}" for n in range(9)]
    agents = serving(stream, *names)
    assert folds.slots(stream.fleet, POOL) == 2
    for agent in reversed(agents):
        agent.want()
    assert allowed(stream, *names) == ["r7", "r8"]


def test_at_least_one_may_go() -> None:
    stream = Stream()
    (agent,) = serving(stream, "r0")
    assert allowed(stream, "r0") == []
    agent.want()
    assert allowed(stream, "r0", "unknown") == ["r0"]


def test_record_without_the_want_takes_it_back() -> None:
    """Each record is the whole state. So an agent that has yet to read its want back wants anew instead of a heartbeat."""
    stream = Stream()
    first, second = serving(stream, "r0", "r1")
    first.want()
    second.want()
    first.say()
    assert allowed(stream, "r0", "r1") == ["r1"]
    first.want()
    assert allowed(stream, "r0", "r1") == ["r1"]


def test_older_want_that_was_not_told_of_for_a_while_takes_no_slot_that_is_held() -> None:
    """I9: a record that was under way when the want was appended carries none of it, and another goes meanwhile."""
    stream = Stream()
    first, second = serving(stream, "r0", "r1")
    offset = first.want()
    first.say(Transition.STAGE_STARTED)
    second_offset = second.want()
    assert allowed(stream, "r0", "r1") == ["r1"]
    second.say(Transition.ACTIVATION_STARTED, want=second_offset, phase=Phase.ACTIVATING)
    first.say(want=offset)
    assert allowed(stream, "r0", "r1") == ["r1"]
    second.say(Transition.ACTIVATED, want=None, phase=Phase.SERVING)
    assert allowed(stream, "r0", "r1") == ["r0"]


@pytest.mark.parametrize("end", [Transition.ACTIVATED, Transition.ACTIVATION_FAILED, Transition.LEFT])
def test_slot_ends_by_event(end: Transition) -> None:
    stream = Stream()
    first, second = serving(stream, "r0", "r1")
    offset = first.want()
    second.want()
    first.say(Transition.ACTIVATION_STARTED, want=offset, phase=Phase.ACTIVATING)
    assert allowed(stream, "r0", "r1") == ["r0"]
    first.say(end, want=None, phase=Phase.SERVING)
    assert allowed(stream, "r0", "r1") == ["r1"]


def test_slot_ends_by_the_bound_on_an_activation() -> None:
    stream = Stream()
    first, second = serving(stream, "r0", "r1")
    offset = first.want()
    waiting = second.want()
    first.say(Transition.ACTIVATION_STARTED, want=offset, phase=Phase.ACTIVATING)
    started = stream.now_ms
    while stream.now_ms + HEARTBEAT_MS <= started + folds.SLOT_MS:
        first.say(after_ms=HEARTBEAT_MS - 10)
        second.say(want=waiting)
    assert allowed(stream, "r0", "r1") == ["r0"]
    first.say(after_ms=HEARTBEAT_MS)
    assert allowed(stream, "r0", "r1") == ["r1"]


def test_slot_ends_by_silence_and_by_a_new_life() -> None:
    stream = Stream()
    first, second = serving(stream, "r0", "r1")
    first.want()
    second.want()
    for _ in range(folds.LEASE_PERIODS + 1):
        second.say(after_ms=HEARTBEAT_MS, want=Offset(5))
    assert allowed(stream, "r0", "r1") == ["r1"]
    Agent(stream, "r1", "2").join()
    assert allowed(stream, "r0", "r1") == []


def test_wants_of_another_pool_do_not_count() -> None:
    stream = Stream()
    first, second = serving(stream, "r0", "r1")
    first.say(pool=PoolName("other"))
    first.want()
    second.want()
    assert allowed(stream, "r0", "r1") == ["r0", "r1"]


@EXAMPLES
@given(st.data())
def test_d11_never_more_than_the_slots_are_activating(data: st.DataObject) -> None:
    """Agents that want, read back, go and end in any order; each looks at the stream's end before it goes."""
    stream = Stream()
    count = data.draw(st.integers(1, 9))
    agents = serving(stream, *(f"r{n}" for n in range(count)))
    wants: dict[int, Offset] = {}
    active: set[int] = set()
    budget = folds.slots(stream.fleet, POOL)
    for _ in range(data.draw(st.integers(0, 40))):
        n = data.draw(st.integers(0, count - 1))
        agent = agents[n]
        if n in active:
            if data.draw(st.booleans()):
                agent.say(Transition.ACTIVATED, phase=Phase.SERVING, want=None)
                active.discard(n)
                wants.pop(n)
            else:
                agent.say()
        elif n not in wants:
            wants[n] = agent.want()
        elif data.draw(st.booleans()):
            agent.say(want=data.draw(st.sampled_from([None, wants[n]])) if agent.state.want is None else wants[n])
        elif folds.may_activate(stream.fleet, agent.state.replica):
            active.add(n)
            agent.say(Transition.ACTIVATION_STARTED, phase=Phase.ACTIVATING, want=wants[n])
        assert len(active) <= budget
    assert all(folds.may_activate(stream.fleet, agents[n].state.replica) for n in active)


# --- laws of the fold ----------------------------------------------------------------------------------------------------------


@st.composite
def streams(draw: Any) -> list[tuple[ReplicaState, Position]]:
    """Two replicas, each of up to three lives, whose records land late, twice, or after their life is over. Joins land once."""
    stream = Stream()
    lives: list[Agent] = []
    late: list[ReplicaState] = []
    phases = st.sampled_from(list(Phase))
    transitions = st.sampled_from([t for t in Transition if t is not Transition.JOINED])
    for _ in range(draw(st.integers(1, 25))):
        step = draw(st.sampled_from(["join", "say", "say", "say", "late", "land", "again"]))
        if step == "join" or not lives:
            agent = Agent(stream, draw(st.sampled_from(["x", "y"])), str(len(lives)))
            agent.join()
            lives.append(agent)
        elif step == "say":
            transition, phase = draw(transitions), draw(phases)
            want = draw(st.one_of(st.none(), st.integers(0, 20)))
            draw(st.sampled_from(lives)).say(transition, phase=phase, want=want, after_ms=draw(st.integers(0, 4000)))
        elif step == "late":
            late.append(draw(st.sampled_from(lives)).next(draw(transitions)))
        elif step == "land" and late:
            stream.append(late.pop(draw(st.integers(0, len(late) - 1))))
        elif step == "again":
            said = [state for state, _ in stream.records if state.transition is not Transition.JOINED]
            if said:
                stream.append(draw(st.sampled_from(said)))
    return stream.records


def fold(records: list[tuple[ReplicaState, Position]], fleet: Fleet | None = None) -> tuple[Fleet, list[Heard]]:
    fleet, heard = fleet or Fleet(), []
    for state, at in records:
        fleet, one = folds.apply(fleet, state, at)
        heard.append(one)
    return fleet, heard


@EXAMPLES
@given(streams(), st.integers(0, 25))
def test_prefix_then_suffix_is_the_whole(records: list[tuple[ReplicaState, Position]], cut: int) -> None:
    first, _ = fold(records[:cut])
    assert fold(records[cut:], first)[0] == fold(records)[0]


@EXAMPLES
@given(streams())
def test_order_is_by_incarnation_then_sequence(records: list[tuple[ReplicaState, Position]]) -> None:
    fleet, newest = Fleet(), {}
    for state, at in records:
        before = fleet.members
        fleet, heard = folds.apply(fleet, state, at)
        order = (at.offset if state.incarnation is None else state.incarnation, state.sequence)
        if heard is Heard.ACCEPTED:
            assert order > newest.get(state.replica, (-1, -1))
            newest[state.replica] = order
        else:
            assert order <= newest[state.replica]
            assert fleet.members == before


@EXAMPLES
@given(streams(), st.integers(0, 25))
def test_begun_in_mid_stream_the_fold_is_right_about_all_that_spoke_since(
    records: list[tuple[ReplicaState, Position]], cut: int
) -> None:
    """Spoke: said something new, not a late copy. The start of an activation that was under way is not known then, so that slot
    ends no earlier than for others."""
    whole, heard = fold(records)
    begun, _ = fold(records[cut:])
    spoke = {s.replica for (s, _), h in zip(records[cut:], heard[cut:], strict=True) if h is Heard.ACCEPTED}
    for replica in spoke:
        full, partial = whole.members[replica], begun.members[replica]
        assert partial.state == full.state
        assert (partial.incarnation, partial.heard, partial.want) == (full.incarnation, full.heard, full.want)
        assert (partial.started is None) == (full.started is None)
        if full.started is not None and partial.started is not None:
            assert partial.started.offset >= full.started.offset
    if records[cut:]:
        assert begun.now_ms == whole.now_ms
