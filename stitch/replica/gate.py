"""The admission gate: no request reaches the engine but through here, and none is admitted that its constraint forbids.

The gate knows what serves, which requests are in flight and which versions may have computed their tokens. Looking at the
constraint and taking the request in is one step without an await, so a request is never admitted to another version than the one
that was looked at. Of one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stitch.core.admission import Bounds, Constraint, Gone, resolve, satisfies
from stitch.core.errors import Rejected, Unavailable, VersionGone, WeightVersionNotReady
from stitch.core.events import RunVersion
from stitch.core.lineage import PolicyLineage
from stitch.replica.targets import Serving

NOT_READY_RETRY_S: Final = 1.0
"""What a refused client is told to wait: about what staging and activating a small delta takes."""


class Full(Rejected):
    """The replica answers as many requests as it takes at a time; nothing was started."""


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One admitted request.

    `versions` are all that may have computed its tokens, oldest first: the one at admission, and each that was activated since.
    `tells` says whether the engine tells versions per token for it; where not, it never lives across an activation.
    """

    request_id: str
    bounds: Bounds
    tells: bool
    versions: list[RunVersion]
    era: int = 0
    """The gate's at admission."""
    tip: RunVersion | None = None
    """The newest version known at admission, against which a bound on staleness was judged."""
    admitted_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where an activation could not wait for the request any longer."""
    reason: str = ""
    """Why it was given up, for the client."""


class Gate:
    """Closed until `open`. `lineage` gives what is known of the policy at the moment of the call."""

    def __init__(self, lineage: Callable[[], PolicyLineage], *, capacity: int, wait_seconds: float) -> None:
        self.serving: Serving | None = None
        self.era = 0
        """How often a version took over that was not newer than the one before: of another run, or of a lower number."""
        self.in_flight: set[Ticket] = set()
        self.waiting = 0
        self._lineage, self._capacity, self._wait_seconds = lineage, capacity, wait_seconds
        self._closed_at: float | None = time.monotonic()
        self._leaving_for: RunVersion | None = None
        self._shut: str | None = None
        self._pulse = asyncio.Event()

    # --- requests ----------------------------------------------------------------------------------------------------------

    async def admit(self, request_id: str, constraint: Constraint, *, tells: bool, wait: float = 0.0) -> Ticket:
        """Takes the request in; `release` it afterwards. `wait` is how many seconds it waits for a version that will do.

        Raises WeightVersionNotReady, VersionGone, Full, or Unavailable where the gate stayed closed or is shut: nothing was
        started then.
        """
        found = self._look(request_id, constraint, tells=tells)
        if isinstance(found, Ticket):
            return found
        if isinstance(found, Full) or self.waiting >= self._capacity:
            raise found
        start = time.monotonic()
        self.waiting += 1
        try:
            while True:
                # A version is waited for as the client asked; the gate, and a place behind it, as long as an activation lasts.
                bound = wait if isinstance(found, WeightVersionNotReady) else max(wait, self._wait_seconds)
                remaining = start + bound - time.monotonic()
                if remaining <= 0:
                    raise found
                await self._changed(remaining)
                found = self._look(request_id, constraint, tells=tells)
                if isinstance(found, Ticket):
                    return found
        finally:
            self.waiting -= 1

    def release(self, ticket: Ticket) -> None:
        """The request ended, however it did."""
        self.in_flight.discard(ticket)
        self._ring()

    def _look(self, request_id: str, constraint: Constraint, *, tells: bool) -> Ticket | WeightVersionNotReady | Unavailable | Full:
        """The ticket, or why not now; what waiting cannot mend is raised."""
        if self._shut is not None:
            raise Unavailable(self._shut)
        bounds = resolve(self._lineage(), constraint)
        if isinstance(bounds, Gone):
            raise VersionGone(bounds.reason)
        serving = self.serving
        if serving is None or not self._accepts(bounds, serving.ref):
            return WeightVersionNotReady(self._not_ready(bounds), retry_after=NOT_READY_RETRY_S)
        if self.closed:
            return Unavailable("the replica is taking a new version; the request was not started")
        if len(self.in_flight) >= self._capacity:
            return Full(f"the replica answers {self._capacity} requests already; the request was not started")
        tip = self._lineage().tip
        ticket = Ticket(request_id=request_id, bounds=bounds, tells=tells, versions=[serving.ref], era=self.era, tip=tip)
        self.in_flight.add(ticket)
        return ticket

    def _accepts(self, bounds: Bounds, serving: RunVersion) -> bool:
        lineage = self._lineage()
        if not satisfies(lineage, bounds, serving):
            return False
        return self._leaving_for is None or satisfies(lineage, bounds, self._leaving_for)

    def _not_ready(self, bounds: Bounds) -> str:
        serving = self.serving.ref if self.serving is not None else None
        if serving is not None and self._leaving_for is not None and satisfies(self._lineage(), bounds, serving):
            return f"asked for {bounds}; this replica serves {serving} and is about to take {self._leaving_for}"
        return f"asked for {bounds}; this replica serves {serving or 'no version yet'}"

    # --- activations -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed_at is not None

    @property
    def shut(self) -> bool:
        """Whether nothing more will be admitted in this life."""
        return self._shut is not None

    def leave_for(self, target: RunVersion | None) -> None:
        """From here on only what `target` satisfies too is admitted; None ends that."""
        self._leaving_for = target
        self._ring()

    def close(self) -> None:
        """Requests wait here from now on. Those in flight go on."""
        if self._closed_at is None:
            self._closed_at = time.monotonic()

    def open(self) -> float:
        """Lets requests through. Returns how long the gate was closed, in milliseconds."""
        if self._closed_at is None:
            return 0.0
        closed_ms = 1000 * (time.monotonic() - self._closed_at)
        self._closed_at = None
        self._leaving_for = None
        self._ring()
        return closed_ms

    def shut_for(self, reason: str) -> None:
        """Admits nothing more; who waits is refused."""
        self._shut = reason
        self._ring()

    def expect(self, ref: RunVersion) -> None:
        """The engine may compute with this version from now on: what is in flight may get tokens of it."""
        for ticket in self.in_flight:
            if ticket.versions[-1] != ref:
                ticket.versions.append(ref)

    def flip(self, serving: Serving) -> None:
        """The reported version is now this one."""
        old = self.serving
        if old is not None and (old.ref.run != serving.ref.run or serving.ref.number < old.ref.number):
            self.era += 1
        self.serving = serving
        self.expect(serving.ref)
        self._ring()

    def must_end(self, target: RunVersion, *, everything: bool) -> set[Ticket]:
        """The requests in flight that cannot live on when `target` takes over.

        Those whose constraint it fails, those for which the engine tells no versions, and all where `everything` is set.
        """
        lineage = self._lineage()
        return {t for t in self.in_flight if everything or not t.tells or not satisfies(lineage, t.bounds, target)}

    async def ended(self, tickets: set[Ticket], timeout: float) -> set[Ticket]:
        """Waits until they have ended; what is left after `timeout` seconds is returned."""
        deadline = time.monotonic() + timeout
        while (left := tickets & self.in_flight) and (remaining := deadline - time.monotonic()) > 0:
            await self._changed(remaining)
        return left

    def give_up(self, tickets: set[Ticket], reason: str) -> None:
        """Tells whoever answers them to end them, retryable."""
        for ticket in tickets:
            ticket.reason = reason
            ticket.given_up.set()

    # --- waking ------------------------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def _changed(self, timeout: float) -> None:
        if timeout <= 0:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._pulse.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        """What the lineage says may have changed: who waits looks again."""
        self._ring()
