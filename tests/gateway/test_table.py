"""The replica table: what is heard puts a replica in or out, what is not heard only slowly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stitch.core.admission import Bounds
from stitch.core.events import Event, Phase, ReplicaState, RunVersion, Transition
from stitch.core.fleet import LEASE_PERIODS
from stitch.core.ids import LATEST, EventId, Generation, Incarnation, Offset, PoolName, ReplicaId
from stitch.core.lineage import Position
from stitch.gateway.table import STALE_PERIODS, SUSPECT_SECONDS, ReplicaTable
from stitch.log.memory import MemoryLog
from stitch.log.views import fleet_follower, fold_fleet, fold_lineage, lineage_follower, new_event_id
from tests.gateway.scene import P, version

pytestmark = pytest.mark.unit

BEAT = 2.0
LEASE = BEAT * LEASE_PERIODS


class Heard:
    """A table that is told records by hand, on a clock that the test moves."""

    def __init__(self, pool: str | None = None) -> None:
        self.now, self.offset, self.changes = 100.0, 0, 0
        log = MemoryLog()
        self.fleet, self.lineage = fleet_follower(log), lineage_follower(log)
        self.table = ReplicaTable(self.fleet, self.lineage, pool=PoolName(pool) if pool else None, clock=lambda: self.now)
        self.table.on_change.append(self.count)
        self.fleet.caught_up = self.lineage.caught_up = True
        self.fleet.complete = self.lineage.complete = True

    def count(self) -> None:
        self.changes += 1

    def tell(self, event: Event) -> int:
        follower: Any = self.fleet if isinstance(event, ReplicaState) else self.lineage
        fold: Any = fold_fleet if isinstance(event, ReplicaState) else fold_lineage
        at = Position(offset=Offset(self.offset), time_ms=int(self.now * 1000))
        self.offset += 1
        follower.state = fold(follower.state, event, at)
        for listener in follower.listeners:
            listener(event, at)
        self.fleet.polled_at = self.now
        return at.offset

    def names(self, bounds: Bounds | None = None) -> list[str]:
        return sorted(row.replica for row in self.table.candidates(P, None, bounds or Bounds()))


class Voice:
    """A replica's records."""

    def __init__(self, heard: Heard, name: str, beat: float = BEAT, **fields: Any) -> None:
        self.heard = heard
        life = new_event_id()
        self.state = ReplicaState(
            replica=ReplicaId(name),
            life=life,
            incarnation=None,
            sequence=0,
            transition=Transition.JOINED,
            event_id=life,
            phase=Phase.JOINING,
            policy=P,
            channel=LATEST,
            pool=PoolName("main"),
            url=f"http://{name}/",
            engine="e",
            capacity=4,
            heartbeat_ms=int(beat * 1000),
            generation=Generation(0),
            **fields,
        )
        offset = heard.tell(self.state)
        self.state = replace(self.state, incarnation=Incarnation(offset))

    def say(self, transition: Transition = Transition.HEARTBEAT, **fields: Any) -> None:
        changed = {"sequence": self.state.sequence + 1, "transition": transition, "event_id": EventId(new_event_id())}
        self.state = replace(self.state, **{**changed, **fields})
        self.heard.tell(self.state)

    def serve(self, serving: RunVersion) -> Voice:
        self.say(Transition.ACTIVATED, phase=Phase.SERVING, serving=serving)
        return self


def both(pool: str | None = None) -> tuple[Heard, Voice, Voice]:
    heard = Heard(pool)
    return heard, Voice(heard, "a").serve(version(1)), Voice(heard, "b").serve(version(1))


def test_joined_is_not_serving() -> None:
    heard = Heard()
    voice = Voice(heard, "a")
    assert heard.names() == []
    voice.say(Transition.STAGE_STARTED, phase=Phase.LOADING)
    assert heard.names() == []
    voice.serve(version(1))
    assert heard.names() == ["a"]
    assert heard.table.rows[ReplicaId("a")].url == "http://a"


@pytest.mark.parametrize(
    ("transition", "phase"),
    [(Transition.DRAINING, Phase.DRAINING), (Transition.LEFT, Phase.LEFT), (Transition.ACTIVATION_FAILED, Phase.FAILED)],
)
def test_leaves_at_once(transition: Transition, phase: Phase) -> None:
    heard, a, _ = both()
    before = heard.changes
    a.say(transition, phase=phase)
    assert heard.names() == ["b"]
    assert heard.changes == before + 1


def test_heartbeats_change_nothing() -> None:
    heard, a, _ = both()
    before, row = heard.changes, heard.table.rows[ReplicaId("a")]
    a.say(in_flight=3)
    assert heard.changes == before
    assert heard.table.rows[ReplicaId("a")] is row
    a.serve(version(2))
    assert heard.changes == before + 1
    assert heard.table.rows[ReplicaId("a")] is not row


def test_a_lease_lapses_while_others_are_heard() -> None:
    heard, a, b = both()
    for _ in range(LEASE_PERIODS):
        heard.now += BEAT
        b.say()
    assert heard.names() == ["a", "b"] or heard.table.lease_left(heard.fleet.state.members[ReplicaId("a")]) <= 0
    heard.now += BEAT
    b.say()
    assert heard.names() == ["b"]
    assert heard.table.lapsed(ReplicaId("a"))
    a.say()
    assert heard.names() == ["a", "b"]


def test_a_silent_log_keeps_the_table_and_marks_it_stale() -> None:
    heard, _, b = both()
    assert not heard.table.stale
    heard.now += BEAT * STALE_PERIODS + 1
    heard.fleet.polled_at = heard.now
    assert heard.table.stale
    assert heard.names() == ["a", "b"]
    heard.now += 3600
    b.say()  # the first after an hour: the other gets a whole lease from here
    assert not heard.table.stale
    assert heard.names() == ["a", "b"]
    for _ in range(LEASE_PERIODS):
        heard.now += BEAT
        b.say()
    assert heard.names() == ["b"]


def test_repeated_gaps_do_not_lapse_those_who_speak() -> None:
    heard, a, b = both()
    for _ in range(20):
        heard.now += 600
        b.say()
        a.say()
        assert heard.names() == ["a", "b"]


def test_a_slow_heartbeat_does_not_keep_a_quick_one_alive_for_long() -> None:
    heard = Heard()
    Voice(heard, "quick", beat=1.0).serve(version(1))
    slow = Voice(heard, "slow", beat=10.0).serve(version(1))
    for _ in range(2):
        heard.now += 10
        slow.say()
    assert heard.names() == ["slow"]


def test_what_an_older_life_says_renews_nothing() -> None:
    heard = Heard()
    old = Voice(heard, "a").serve(version(1))
    new = Voice(heard, "a")
    old.serve(version(2))
    assert heard.names() == []  # the newest join wins, and it serves nothing yet
    new.serve(version(3))
    old.say(Transition.LEFT, phase=Phase.LEFT)
    assert heard.names() == ["a"]
    assert heard.table.rows[ReplicaId("a")].serving == version(3)
    other = Voice(heard, "b").serve(version(3))
    for _ in range(LEASE_PERIODS + 1):
        heard.now += BEAT
        other.say()
        old.say()
    assert heard.names() == ["b"]


def test_other_pools_are_not_seen() -> None:
    heard = Heard("main")
    Voice(heard, "a").serve(version(1))
    voice = Voice(heard, "b")
    voice.say(pool=PoolName("other"))
    voice.serve(version(1))
    assert heard.names() == ["a"]
    assert [m.state.replica for m in heard.table.members()] == ["a"]


def test_bounds_choose_among_rows() -> None:
    heard, a, _ = both()
    a.serve(version(2))
    assert heard.names(Bounds(run=version(2).run, least=version(2).number)) == ["a"]
    assert heard.table.serving(P, None) == version(2)


def test_suspicion_passes() -> None:
    heard, _, _ = both()
    heard.table.suspect(ReplicaId("a"))
    assert heard.table.suspected(ReplicaId("a"))
    heard.now += SUSPECT_SECONDS + 0.1
    assert not heard.table.suspected(ReplicaId("a"))


def test_places_are_counted() -> None:
    heard, _, _ = both()
    row = heard.table.rows[ReplicaId("a")]
    heard.table.take(row)
    heard.table.take(row)
    heard.table.give_back(row)
    assert heard.table.in_flight == {"a": 1}
    heard.table.give_back(row)
    assert heard.table.in_flight == {}


def test_stale_while_the_log_is_away() -> None:
    heard, _, _ = both()
    heard.fleet.caught_up = False
    assert heard.table.stale
    assert heard.table.complete  # for good: the last table serves on
    heard.fleet.caught_up = True
    heard.now += 60
    heard.tell(replace(Voice(heard, "c").state, transition=Transition.HEARTBEAT, sequence=1))
    heard.fleet.polled_at = heard.now - 30
    assert heard.table.stale
