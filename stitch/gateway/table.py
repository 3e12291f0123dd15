"""The replica table: who may be sent what, by the activation stream alone.

Leases run on a clock of the table's own, which only records move: a record advances it by the time since the record before, but by
no more than its writer may be silent between two heartbeats. So a member lapses when others were heard for a whole lease and it was
not; and no gap lapses anyone, whatever it came from: a log that fell silent for all, a paused process, a reader that was away.
A member that is gone for good while all are silent stays in the table until someone speaks; requests to it are refused a connection
and go elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from stitch.core.admission import Bounds, satisfies
from stitch.core.events import Event, Phase, ReplicaState, RunVersion
from stitch.core.fleet import Fleet, Member
from stitch.core.ids import ChannelName, Incarnation, PolicyId, PoolName, ReplicaId
from stitch.core.lineage import Lineage, Position
from stitch.log.follow import POLL_SECONDS, Follower

BEAT_SLACK: Final = 1.5
"""A heartbeat may come so many periods after the one before, before the time in between counts as a gap."""
STALE_PERIODS: Final = 3.0
"""Silence of so many heartbeat periods marks the table stale."""
STALE_POLLS: Final = 5.0
"""And so does a log that did not answer so many polls in a row."""
SUSPECT_SECONDS: Final = 1.0
"""How long a replica that refused a connection is passed over while another will do."""
SWEEP_SECONDS: Final = 0.25
"""Least time of the lease clock between two looks for lapsed leases."""
MAX_CACHED: Final = 1024
"""Distinct constraints whose candidates are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A replica in rotation. A change of anything here makes a new row, so identity tells whether a replica changed."""

    replica: ReplicaId
    incarnation: Incarnation
    policy: PolicyId
    channel: ChannelName
    url: str
    capacity: int
    serving: RunVersion | None
    activating: bool


class ReplicaTable:
    """Rows by replica, kept by listening to the follower. `on_change` is called whenever who may be sent what has changed."""

    def __init__(
        self,
        fleet: Follower[Fleet],
        lineage: Follower[Lineage],
        *,
        pool: PoolName | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet, self.lineage = fleet, lineage
        self.rows: dict[ReplicaId, Row] = {}
        self.on_change: list[Callable[[], None]] = []
        self.in_flight: dict[ReplicaId, int] = {}
        """Requests that this gateway has under way, by replica."""
        self._pool, self._clock = pool, clock
        self._lease_clock = 0.0
        self._swept = 0.0
        self._heard: dict[ReplicaId, float] = {}
        self._last_record: float | None = None
        self._suspects: dict[ReplicaId, float] = {}
        self._cache: dict[tuple[PolicyId, ChannelName | None, Bounds], tuple[Row, ...]] = {}
        fleet.listeners.append(self._take_state)
        lineage.listeners.append(self._take_decision)

    # --- asked ---------------------------------------------------------------------------------------------------------------

    def candidates(self, policy: PolicyId, channel: ChannelName | None, bounds: Bounds) -> tuple[Row, ...]:
        """The rows that satisfy a request, whether they have room or not."""
        key = (policy, channel, bounds)
        found = self._cache.get(key)
        if found is None:
            found = self._cached(key, tuple(self._satisfying(policy, channel, bounds)))
        return found

    def serving(self, policy: PolicyId, channel: ChannelName | None) -> RunVersion | None:
        """The newest version served for the policy: by the run that owns the head, then by number."""
        owner = self.lineage.state.policy(policy).owner
        served = [row.serving for row in self._of(policy, channel) if row.serving is not None]
        return max(served, key=lambda v: (owner is not None and v.run == owner.run, v.number), default=None)

    def members(self, policy: PolicyId | None = None) -> Iterator[Member]:
        """All that were heard of and have not left, of this table's pool."""
        for member in self.fleet.state.members.values():
            state = member.state
            if state.phase is Phase.LEFT or self._pool not in (None, state.pool):
                continue
            if policy in (None, state.policy):
                yield member

    def anyone(self, policy: PolicyId) -> bool:
        """Whether any replica of the policy is alive, in rotation or on its way there."""
        return any(m.state.phase is not Phase.FAILED and self.lease_left(m) > 0 for m in self.members(policy))

    def lapsed(self, replica: ReplicaId) -> bool:
        """Whether the replica's lease is over."""
        member = self.fleet.state.members.get(replica)
        return member is None or self.lease_left(member) <= 0

    def lease_left(self, member: Member) -> float:
        """Seconds of other replicas' records that the member may still be silent."""
        heard = self._heard.get(member.state.replica, self._lease_clock)
        return heard + member.lease_ms / 1000 - self._lease_clock

    @property
    def complete(self) -> bool:
        """Whether both streams were read to their end once. Before that nothing can be judged; a later gap makes it stale only."""
        return self.fleet.complete and self.lineage.complete

    @property
    def stale(self) -> bool:
        """Whether the table may be older than it looks: the log is away, or silent for all."""
        if not self.fleet.healthy or self._clock() - self.fleet.polled_at > STALE_POLLS * POLL_SECONDS:
            return True
        beats = [m.state.heartbeat_ms for m in self.members() if m.state.replica in self.rows]
        silence = self.silence
        return bool(beats) and silence is not None and silence > STALE_PERIODS * max(beats) / 1000

    @property
    def silence(self) -> float | None:
        """Seconds since any replica was heard; None before the first."""
        return None if self._last_record is None else self._clock() - self._last_record

    def suspected(self, replica: ReplicaId) -> bool:
        """Whether it refused a connection a moment ago."""
        until = self._suspects.get(replica)
        if until is None:
            return False
        if until > self._clock():
            return True
        del self._suspects[replica]
        return False

    # --- told ----------------------------------------------------------------------------------------------------------------

    def suspect(self, replica: ReplicaId) -> None:
        """The replica refused a connection: pass it over for a moment."""
        self._suspects[replica] = self._clock() + SUSPECT_SECONDS

    def take(self, row: Row) -> None:
        """A request goes to the replica."""
        self.in_flight[row.replica] = self.in_flight.get(row.replica, 0) + 1

    def give_back(self, row: Row) -> None:
        """A request to the replica is over."""
        left = self.in_flight.get(row.replica, 0) - 1
        if left > 0:
            self.in_flight[row.replica] = left
        else:
            self.in_flight.pop(row.replica, None)

    def _take_state(self, event: Event, at: Position) -> None:
        if not isinstance(event, ReplicaState):
            return
        now = self._clock()
        if self._last_record is not None:
            beat = BEAT_SLACK * event.heartbeat_ms / 1000
            self._lease_clock += min(now - self._last_record, beat)
        self._last_record = now
        member = self.fleet.state.members.get(event.replica)
        if member is not None and member.state is event:  # else the fold ignored it, and it renews nothing
            self._heard[event.replica] = self._lease_clock
        changed = self._refresh(event.replica)
        if self._lease_clock - self._swept >= SWEEP_SECONDS:
            self._swept = self._lease_clock
            for replica in [r for r in self.rows if self.lapsed(r)]:
                changed |= self._refresh(replica)
        if changed:
            self._changed()

    def _take_decision(self, event: Event, at: Position) -> None:
        self._changed()

    def _refresh(self, replica: ReplicaId) -> bool:
        """Brings one row up to date; whether anything that routing looks at has changed."""
        old, new = self.rows.get(replica), self._row(replica)
        if new is None:
            self.rows.pop(replica, None)
            return old is not None
        if old is not None and _same(old, new):
            return False
        self.rows[replica] = new
        return True

    def _row(self, replica: ReplicaId) -> Row | None:
        member = self.fleet.state.members.get(replica)
        if member is None or not member.state.phase.in_rotation or self.lapsed(replica):
            return None
        state = member.state
        if self._pool not in (None, state.pool):
            return None
        return Row(
            replica=replica,
            incarnation=member.incarnation,
            policy=state.policy,
            channel=state.channel,
            url=state.url.rstrip("/"),
            capacity=state.capacity,
            serving=state.serving,
            activating=state.phase is Phase.ACTIVATING,
        )

    def _changed(self) -> None:
        self._cache.clear()
        for tell in self.on_change:
            tell()

    def _of(self, policy: PolicyId, channel: ChannelName | None) -> Iterator[Row]:
        return (row for row in self.rows.values() if row.policy == policy and channel in (None, row.channel))

    def _satisfying(self, policy: PolicyId, channel: ChannelName | None, bounds: Bounds) -> Iterator[Row]:
        lineage = self.lineage.state.policy(policy)
        judged: dict[RunVersion | None, bool] = {}
        for row in self._of(policy, channel):
            if row.serving not in judged:
                judged[row.serving] = satisfies(lineage, bounds, row.serving)
            if judged[row.serving]:
                yield row

    def _cached(self, key: tuple[PolicyId, ChannelName | None, Bounds], found: tuple[Row, ...]) -> tuple[Row, ...]:
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        self._cache[key] = found
        return found


def _same(first: Row, second: Row) -> bool:
    return all(getattr(first, name) == getattr(second, name) for name in Row.__slots__)
