"""The fleet fold: what each replica last said of itself, and who may activate.

A record of the activation stream is a replica's whole state, so the fold needs no history: begun anywhere, it is right about
every replica that spoke since. An incarnation is the log's own offset of the `joined` record. The newest join of a replica id
wins, and what an older life still writes is ignored by all.

Nothing here ends by the reader's clock. Leases are the gateway's, on its own monotonic clock; slots end by broker time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from immutables import Map

from stitch.core.events import Phase, ReplicaState, Transition
from stitch.core.frozen import maker
from stitch.core.ids import Incarnation, Offset, PoolName, ReplicaId
from stitch.core.lineage import Position

LEASE_PERIODS: Final = 5
"""Heartbeats that may be missed before a replica counts as gone."""
SERVING_PER_SLOT: Final = 4
"""One replica in so many may be activating at a time."""
SLOT_MS: Final = 120_000
"""Bound on the length of an activation, by broker time; what holds a slot longer has lost it."""


class Heard(StrEnum):
    """What became of a record, for every reader alike."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    FENCED = "fenced"
    OLD = "old"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A replica as the stream tells it. `want` is the offset of its open `activation_wanted`,
    `started` when it was first heard to be activating."""

    state: ReplicaState
    incarnation: Incarnation
    heard: Position
    want: Offset | None = None
    started: Position | None = None

    @property
    def lease_ms(self) -> int:
        """How long the replica may be silent."""
        return LEASE_PERIODS * self.state.heartbeat_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All replicas that were heard of, also those that left. `now_ms` is the broker time of the newest record; no member was heard
    later than that."""

    members: Map[ReplicaId, Member] = field(default_factory=Map)
    now_ms: int = 0

    def pool(self, pool: PoolName) -> Iterable[Member]:
        """The members of a pool, in no order."""
        return (m for m in self.members.values() if m.state.pool == pool)

    def silent(self, member: Member) -> bool:
        """Whether the member's lease is over by broker time."""
        return member.heard.time_ms + member.lease_ms < self.now_ms


_member: Final = maker(Member)
_fleet: Final = maker(Fleet)


def apply(fleet: Fleet, state: ReplicaState, at: Position) -> tuple[Fleet, Heard]:
    """The fleet after the record, and what became of the record."""
    members = fleet.members if at.time_ms >= fleet.now_ms else _set_back(fleet.members, at.time_ms)
    old = members.get(state.replica)
    heard = _judge(old, state, at)
    if heard is not Heard.ACCEPTED:
        return _fleet(members=members, now_ms=at.time_ms), heard
    same_life = old if old is not None and old.state.life == state.life else None
    member = _member(
        state=state,
        incarnation=Incarnation(at.offset) if state.incarnation is None else state.incarnation,
        heard=at,
        want=_want(state, at),
        started=_started(same_life, state, at),
    )
    return _fleet(members=members.set(state.replica, member), now_ms=at.time_ms), heard


def _set_back(members: Map[ReplicaId, Member], now_ms: int) -> Map[ReplicaId, Member]:
    """The members where the clock went back, as it does with a leader whose clock is behind that of the one before.

    Who was heard later than now was heard now: a clock that was ahead for a moment leaves nobody silent, and no slot held, for as
    long as it was ahead.
    """

    def by_now(at: Position) -> Position:
        return replace(at, time_ms=min(at.time_ms, now_ms))

    def set_back(member: Member) -> Member:
        started = None if member.started is None else by_now(member.started)
        return replace(member, heard=by_now(member.heard), started=started)

    return Map({replica: set_back(member) for replica, member in members.items()})


def _judge(old: Member | None, state: ReplicaState, at: Position) -> Heard:
    if old is None:
        return Heard.ACCEPTED
    if old.state.life == state.life:
        if state.transition is Transition.JOINED or state.event_id == old.state.event_id:
            return Heard.DUPLICATE
        return Heard.ACCEPTED if state.sequence > old.state.sequence else Heard.OLD
    incarnation = at.offset if state.incarnation is None else state.incarnation
    return Heard.ACCEPTED if incarnation > old.incarnation else Heard.FENCED


def _want(state: ReplicaState, at: Position) -> Offset | None:
    return at.offset if state.transition is Transition.ACTIVATION_WANTED else state.want


def _started(same_life: Member | None, state: ReplicaState, at: Position) -> Position | None:
    if state.phase is not Phase.ACTIVATING:
        return None
    return same_life.started if same_life is not None and same_life.started is not None else at


# --- the activation budget --------------------------------------------------------------------------------------------------


def slots(fleet: Fleet, pool: PoolName) -> int:
    """How many of the pool may activate at a time: a quarter of the serving ones, at least one."""
    serving = sum(1 for m in fleet.pool(pool) if m.state.phase.in_rotation and not fleet.silent(m))
    return max(1, serving // SERVING_PER_SLOT)


def open_wants(fleet: Fleet, pool: PoolName) -> list[Member]:
    """The members that activate, then those that want to, in log order. One that is silent or holds a slot for too long has none.

    Who holds a slot comes first: an older want that the records did not tell of for a while gives no right to it.
    """
    wants = [m for m in fleet.pool(pool) if m.want is not None and not fleet.silent(m) and not _overdue(fleet, m)]
    return sorted(wants, key=lambda m: (m.started is None, m.want or 0))


def may_activate(fleet: Fleet, replica: ReplicaId) -> bool:
    """Whether the replica's own want, read back, is among the first slots."""
    me = fleet.members.get(replica)
    if me is None:
        return False
    first = open_wants(fleet, me.state.pool)[: slots(fleet, me.state.pool)]
    return any(m.state.replica == replica for m in first)


def _overdue(fleet: Fleet, member: Member) -> bool:
    return member.started is not None and member.started.time_ms + SLOT_MS < fleet.now_ms
