"""Which of the replicas that satisfy a request shall answer it. Pure: chance and load are handed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from stitch.core.ids import ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that satisfies the request's bounds. `load` is the number of requests that it answers now."""

    replica: ReplicaId
    load: int
    capacity: int
    activating: bool

    @property
    def has_room(self) -> bool:
        """Whether it takes a request at once."""
        return self.load < self.capacity and not self.activating


def choose(candidates: Sequence[Candidate], *, session: str | None, pick: Callable[[int], int]) -> Candidate | None:
    """The session's own replica while it has room, else the less loaded of two drawn by chance.

    One that is activating is taken only where no other has room, a full one never: None then. `pick(n)` draws a whole number
    from 0 to n-1.
    """
    if session is not None and candidates:
        pinned = max(candidates, key=lambda c: _affinity(session, c.replica))
        if pinned.has_room:
            return pinned
    pool = [c for c in candidates if c.has_room] or [c for c in candidates if c.load < c.capacity]
    if not pool:
        return None
    first, second = pool[pick(len(pool))], pool[pick(len(pool))]
    return first if first.load <= second.load else second


def _affinity(session: str, replica: ReplicaId) -> bytes:
    """Rendezvous hashing: a replica that comes or goes moves only its own sessions."""
    return blake3(f"{session}\0{replica}".encode()).digest(8)
