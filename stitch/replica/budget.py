"""When a replica may activate: the budget of its pool, and versions that are held back.

A rolling update takes no more of the fleet away than its budget, because whoever wants to activate says so on the stream, reads it
back, and goes only among the first in the log's order. A version that ended as many replicas as the budget allows, and serves on
none, is held: the others keep what they have.
"""

from __future__ import annotations

import time
from typing import Final

from stitch.core.events import Phase, RunVersion
from stitch.core.fleet import Fleet, may_activate, slots
from stitch.core.ids import PoolName, ReplicaId
from stitch.replica.announcer import Announcer

LOOK_SECONDS: Final = 0.5
"""Between two looks where the stream brings nothing: leases and bounds run out without a record."""


class Budget:
    """`slot_seconds` bounds an activation's length."""

    def __init__(self, announcer: Announcer, *, replica: ReplicaId, pool: PoolName, slot_seconds: float) -> None:
        self._announcer, self._replica, self._pool, self._slot_seconds = announcer, replica, pool, slot_seconds

    @property
    def fleet(self) -> Fleet:
        return self._announcer.fleet.state

    def held(self, target: RunVersion) -> bool:
        """Whether the version failed on so many of the pool, and succeeded on none, that no other shall try it.

        As the fleet fold judges it, and for a replica that is yet to load its first version too. A failure counts until that
        replica serves the version, since a supervisor restarts who failed, and the new life's records replace the old ones:
        else each restart would send the next of the fleet to its end.
        """
        if any(m.state.serving == target and m.state.phase.in_rotation for m in self.fleet.pool(self._pool)):
            return False
        failed = sum(1 for each in self._announcer.failures.values() if each == target)
        return failed >= slots(self.fleet, self._pool)

    async def acquire(self) -> None:
        """Wants to activate, and returns once it may. `release` afterwards, whatever came of it."""
        self._announcer.want()
        blind_since: float | None = None
        while True:
            if self._announcer.readable:
                blind_since = None
                if self._announcer.state.want is not None and may_activate(self.fleet, self._replica):
                    return
            else:
                blind_since = time.monotonic() if blind_since is None else blind_since
                if time.monotonic() - blind_since >= self._slot_seconds * self._rank():
                    return
            await self._announcer.changed(LOOK_SECONDS)

    def release(self) -> None:
        """The slot is free with the next record."""
        self._announcer.unwant()

    def _rank(self) -> int:
        """1 for the first of the pool by replica id, as far as is known: nobody goes before a slot given last has ended."""
        others = {m.state.replica for m in self.fleet.pool(self._pool) if m.state.phase not in (Phase.LEFT, Phase.FAILED)}
        return sorted(others | {self._replica}).index(self._replica) + 1
