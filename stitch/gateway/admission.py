"""Placing a request: which replica answers it, or what to say instead."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from stitch.core.admission import Bounds, Constraint, Gone, resolve
from stitch.core.errors import InvalidRequest
from stitch.core.ids import PolicyId, ReplicaId
from stitch.core.lineage import PolicyLineage
from stitch.core.routing import Candidate, choose
from stitch.gateway.config import GatewayConfig
from stitch.gateway.table import ReplicaTable, Row
from stitch.gateway.waiting import Lack, RoomClosed, RoomFull, WaitingRoom
from stitch.http import answers
from stitch.http.answers import Answer
from stitch.http.request import RequestSpec

REFUSED_SECONDS: Final = 0.5
"""How long a replica that refused a request is not asked again for it, unless it changes before."""


class Refusal(StrEnum):
    """How a replica said that it did not begin."""

    NOT_READY = "not_ready"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Refused:
    """A replica said no. That holds while its row is the same, for a moment."""

    row: Row
    reason: Refusal
    until: float


@dataclass(slots=True, kw_only=True)
class Pending:
    """A request on its way to a replica. It waits for a version until `version_until`, for room until `room_until`."""

    spec: RequestSpec
    policy: PolicyId
    request_id: str
    version_until: float
    room_until: float
    refused: dict[ReplicaId, Refused] = field(default_factory=dict)

    @property
    def constraint(self) -> Constraint:
        """As asked for, defaults filled in."""
        return self.spec.constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A place taken at a replica; it must be given back. `bounds` are what the constraint meant at that moment."""

    row: Row
    bounds: Bounds


class Admission:
    """Judges requests by the two folds. All methods belong to the gateway's event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        table: ReplicaTable,
        *,
        pick: Callable[[int], int] = random.randrange,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.table = config, table
        self.waiting: WaitingRoom[Placed | Gone] = WaitingRoom(config.max_waiting)
        self._pick, self._clock = pick, clock
        table.on_change.append(self.waiting.changed)

    def pending(self, spec: RequestSpec, request_id: str) -> Pending | Answer:
        """The request with the gateway's defaults. Raises InvalidRequest where it must name a policy and does not."""
        policy = spec.policy or self._only_policy()
        if policy is None:
            return answers.not_ready(
                policy=None,
                required=Bounds(),
                serving=None,
                tip=None,
                message="no policy is known yet: nothing was claimed, and no replica has joined",
                request_id=request_id,
            )
        constraint = spec.constraint
        if constraint.max_lag is None and constraint.exact_version is None and self.config.default_max_lag is not None:
            constraint = replace(constraint, max_lag=self.config.default_max_lag)
        wait = self.config.default_wait if spec.wait is None else spec.wait
        now = self._clock()
        return Pending(
            spec=replace(spec, policy=policy, constraint=constraint),
            policy=policy,
            request_id=request_id,
            version_until=now + wait,
            room_until=now + max(wait, self.config.deadline),
        )

    async def place(self, pending: Pending) -> Placed | Answer:
        """Takes a place, waiting as far as the request and the bounds allow, or gives the answer that refuses it."""
        while True:
            first = self._attempt(pending)
            if isinstance(first, Placed) and pending.refused and self._clock() > pending.room_until:
                self.give_back(first)
                return self._refuse(pending, Lack.VERSION)
            outcome = await self._wait(pending, first) if isinstance(first, Lack) else first
            if isinstance(outcome, Gone):
                return answers.gone(outcome.reason, policy=pending.policy, request_id=pending.request_id)
            if outcome is not None:
                return outcome

    def give_back(self, placed: Placed) -> None:
        """The request is over: its place goes to the first who waits for one."""
        self.table.give_back(placed.row)
        self.waiting.freed()

    def refused(self, pending: Pending, placed: Placed, reason: Refusal) -> None:
        """The replica said that it did not begin: another is tried, where there is one."""
        pending.refused[placed.row.replica] = Refused(placed.row, reason, self._clock() + REFUSED_SECONDS)
        if reason is Refusal.UNREACHABLE:
            self.table.suspect(placed.row.replica)

    def lineage(self, policy: PolicyId) -> PolicyLineage:
        """What was decided of the policy."""
        return self.table.lineage.state.policy(policy)

    def policies(self) -> list[PolicyId]:
        """All that a record names, sorted."""
        known = set(self.table.lineage.state.policies) | {member.state.policy for member in self.table.members()}
        return sorted(known)

    def _only_policy(self) -> PolicyId | None:
        if self.config.policy is not None:
            return self.config.policy
        known = self.policies()
        if len(known) > 1:
            raise InvalidRequest(f"policy: name one of {', '.join(known[:20])} (header X-Stitch-Policy, or model)", field="policy")
        return known[0] if known else None

    def _attempt(self, pending: Pending) -> Placed | Gone | Lack:
        # Resolved anew each time: what a request without a run means, and how far a bound on staleness reaches, moves with the tip.
        bounds = resolve(self.lineage(pending.policy), pending.constraint)
        if isinstance(bounds, Gone):
            return bounds
        rows = self.table.candidates(pending.policy, pending.spec.channel, bounds)
        if pending.refused:
            rows = self._unrefused(pending, rows)
            if not rows and Refusal.BUSY in self._reasons(pending):
                return Lack.ROOM
        if not rows:
            return Lack.VERSION
        row = self._choose(rows, pending.spec.session)
        if row is None:
            return Lack.ROOM
        self.table.take(row)
        return Placed(row=row, bounds=bounds)

    def _unrefused(self, pending: Pending, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        now = self._clock()
        refused = {no.row for no in pending.refused.values() if no.until > now}
        return tuple(row for row in rows if row not in refused)

    def _reasons(self, pending: Pending) -> set[Refusal]:
        """Why the replicas that still are what they were refused."""
        return {no.reason for no in pending.refused.values() if self.table.rows.get(no.row.replica) is no.row}

    def _choose(self, rows: tuple[Row, ...], session: str | None) -> Row | None:
        in_flight = self.table.in_flight
        candidates = [
            Candidate(replica=row.replica, load=in_flight.get(row.replica, 0), capacity=row.capacity, activating=row.activating)
            for row in rows
            if not self.table.suspected(row.replica)
        ]
        if not candidates:
            candidates = [
                Candidate(replica=row.replica, load=in_flight.get(row.replica, 0), capacity=row.capacity, activating=True)
                for row in rows
            ]
        chosen = choose(candidates, session=session, pick=self._pick)
        return None if chosen is None else self.table.rows.get(chosen.replica)

    async def _wait(self, pending: Pending, lack: Lack) -> Placed | Gone | Answer | None:
        """What came of waiting; None where it is worth another look."""
        left = (pending.version_until if lack is Lack.VERSION else pending.room_until) - self._clock()
        if left <= 0:
            return self._refuse(pending, lack)
        if pending.refused:
            left = min(left, REFUSED_SECONDS)  # then they may be asked again, whether they spoke or not
        try:
            return await self.waiting.wait(lambda: self._attempt(pending), lack, left, undo=self._undo)
        except RoomFull as error:
            return answers.busy(f"{error}; ask again", request_id=pending.request_id)
        except RoomClosed as error:
            return answers.unavailable(str(error), generation_started=False, request_id=pending.request_id)

    def _undo(self, outcome: Placed | Gone) -> None:
        if isinstance(outcome, Placed):
            self.give_back(outcome)

    def _refuse(self, pending: Pending, lack: Lack) -> Answer:
        policy, request_id = pending.policy, pending.request_id
        if lack is Lack.ROOM:
            return answers.busy(f"every replica that could answer is full ({policy})", request_id=request_id)
        bounds = resolve(self.lineage(policy), pending.constraint)
        if isinstance(bounds, Gone):
            return answers.gone(bounds.reason, policy=policy, request_id=request_id)
        reasons = self._reasons(pending)
        if reasons and Refusal.NOT_READY not in reasons:
            if Refusal.BUSY in reasons:
                return answers.busy(f"every replica that could answer is full ({policy})", request_id=request_id)
            message = f"no replica of {policy} that could answer was reached"
            return answers.unavailable(message, generation_started=False, request_id=request_id)
        lineage = self.lineage(policy)
        if lineage.owner is not None and not self.table.anyone(policy):
            message = f"no replica of {policy} is known"
            return answers.unavailable(message, generation_started=False, request_id=request_id)
        serving = self.table.serving(policy, pending.spec.channel)
        return answers.not_ready(
            policy=policy,
            required=bounds,
            serving=serving,
            tip=lineage.tip,
            message=None if lineage.owner else f"nothing was ever claimed for policy {policy}",
            request_id=request_id,
        )
