"""What the replica says of itself on the activation stream, in order, and without ever making anything else wait.

A record is the whole state, so a record that could not be written is not missed: once the log is away only the newest is kept.
While it answers, every transition is written. A heartbeat is written where nothing else was for a period.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from stitch.core.errors import Rejected, StitchError
from stitch.core.events import Event, Phase, ReplicaState, RunVersion, Transition
from stitch.core.fleet import LEASE_PERIODS, Fleet
from stitch.core.ids import Digest, Incarnation, Offset, ReplicaId, Sequence
from stitch.core.lineage import Position
from stitch.log.events import append
from stitch.log.follow import Follower
from stitch.log.port import EventLog
from stitch.log.views import GENERATION, fleet_follower, new_event_id
from stitch.replica.config import ReplicaConfig

log = logging.getLogger(__name__)

APPEND_SECONDS: Final = 10.0
"""Bound on one attempt to append a record."""
RETRY_SECONDS: Final = (0.2, 5.0)
"""First and longest pause after an attempt failed."""
QUEUE: Final = 64
"""Transitions that may wait while the log is slow; beyond it the oldest go, as later records hold all that they said."""
SILENT_SECONDS: Final = 5.0
"""A log that answered no poll for so long cannot be read: polls wait one second at most."""
FRESH_PERIODS: Final = LEASE_PERIODS - 2
"""And one that answered none for so many heartbeats may have given this replica's place in line away: it was stopped, say, and
goes on. Its own heartbeats wake the poll, so a reader that is abreast is never so old."""
READ_BACK_SECONDS: Final = 10.0
"""How long a record that was written may take to be read again; then the reader is not to be relied on."""


@dataclass(slots=True, kw_only=True)
class Self:
    """The replica's present state, as far as records tell it. The agent changes it; every record is made from it."""

    phase: Phase = Phase.JOINING
    following: Sequence | None = None
    serving: RunVersion | None = None
    weights_digest: Digest | None = None
    staged: RunVersion | None = None
    target: RunVersion | None = None
    want: Offset | None = None
    pause_ms: float | None = None
    error: str | None = None
    """What keeps it from its target; until an activation."""
    labels: dict[str, str] = field(default_factory=dict)


class Announcer:
    """Writes the records of one life, and follows the stream for what others say.

    `in_flight` tells the number of requests at the moment. `state` is to be changed before `announce`. Of one event loop.
    """

    def __init__(self, events: EventLog, config: ReplicaConfig, url: Callable[[], str], in_flight: Callable[[], int]) -> None:
        self.state = Self(labels=dict(config.labels))
        self.fleet: Follower[Fleet] = fleet_follower(events)
        self.incarnation: Incarnation | None = None
        self.fenced_by: Incarnation | None = None
        """A newer life of the same replica id, once one was seen."""
        self.failures: dict[ReplicaId, RunVersion] = {}
        """What each replica id of the pool last failed on and has not served since, whatever life of it speaks now: who is
        restarted after a failure says nothing of it any more."""
        self.error: str | None = None
        """What the last attempt to append failed with."""
        self.written = asyncio.Event()
        """Set while nothing waits to be written."""
        self.life = new_event_id()
        self._events, self._config, self._url, self._in_flight = events, config, url, in_flight
        self._sequence = 0
        self._queue: deque[ReplicaState] = deque()
        self._ring = asyncio.Event()
        self._changed = asyncio.Event()
        self._wanted: str | None = None
        self._others: dict[str, int] = {}
        self.fleet.listeners.append(self._hear)

    async def run(self) -> None:
        """Joins, then writes what is announced, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.fleet.run(), name="activations")
            tasks.create_task(self._write_all(), name="announcer")

    def announce(self, transition: Transition) -> None:
        """Queues a record of the present state."""
        self._queue.append(self._record(transition))
        if len(self._queue) > QUEUE:
            self._queue.popleft()
        self.written.clear()
        self._ring.set()

    def want(self) -> None:
        """Queues `activation_wanted`; `state.want` is set once it was read back. Until then it is wanted anew in place of each
        heartbeat, since a record without the want would take it back."""
        self.state.want = None
        self.announce(Transition.ACTIVATION_WANTED)
        self._wanted = self._queue[-1].event_id

    def unwant(self) -> None:
        """The want is over, or was never read back."""
        self.state.want = None
        self._wanted = None

    async def changed(self, timeout: float) -> None:
        """Returns when the stream brought something, or after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return

    async def flushed(self, timeout: float) -> bool:
        """Whether all that was announced got written within the time."""
        try:
            async with asyncio.timeout(timeout):
                await self.written.wait()
        except TimeoutError:
            return False
        return True

    @property
    def waiting(self) -> int:
        """Records that are yet to be written."""
        return len(self._queue)

    @property
    def readable(self) -> bool:
        """Whether the stream can be trusted to tell who wants to activate."""
        answered = time.monotonic() - self.fleet.polled_at < min(SILENT_SECONDS, FRESH_PERIODS * self._config.heartbeat_seconds)
        return self.fleet.healthy and self.fleet.error is None and self.incarnation is not None and answered

    # --- reading -----------------------------------------------------------------------------------------------------------

    def _hear(self, event: Event, at: Position) -> None:
        if isinstance(event, ReplicaState) and event.pool == self._config.pool:
            self._note_failure(event)
        if isinstance(event, ReplicaState) and event.replica == self._config.replica:
            if event.life == self.life:
                self._hear_myself(event, at)
            else:
                incarnation = at.offset if event.incarnation is None else event.incarnation
                self._others[event.life] = max(incarnation, self._others.get(event.life, 0))
            newest = max(self._others.values(), default=-1)
            if self.incarnation is not None and newest > self.incarnation:
                self.fenced_by = Incarnation(newest)
        self._changed.set()
        self._changed = asyncio.Event()

    def _note_failure(self, event: ReplicaState) -> None:
        if event.phase is Phase.FAILED and event.target is not None:
            self.failures[event.replica] = event.target
        elif event.phase.in_rotation and event.serving == self.failures.get(event.replica):
            self.failures.pop(event.replica, None)

    def _hear_myself(self, event: ReplicaState, at: Position) -> None:
        if event.transition is Transition.JOINED and self.incarnation is None:
            self.incarnation = Incarnation(at.offset)
        if event.event_id == self._wanted:
            self._wanted = None
            self.state.want = at.offset

    # --- writing -----------------------------------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        await self._join()
        next_beat = 0.0
        while True:
            if self._queue:
                await self._write_one(self._queue[0])
                next_beat = time.monotonic() + self._config.heartbeat_seconds
                continue
            self.written.set()
            self._ring.clear()
            try:
                async with asyncio.timeout(max(next_beat - time.monotonic(), 0.0)):
                    await self._ring.wait()
            except TimeoutError:
                if self._wanted is None:
                    self.announce(Transition.HEARTBEAT)
                else:
                    self.want()

    async def _join(self) -> None:
        """The joined record, until it was read back: no other may be written before, since its offset is the incarnation."""
        joined = replace(self._record(Transition.JOINED), event_id=self.life, incarnation=None, sequence=0)
        pause = RETRY_SECONDS[0]
        while self.incarnation is None:
            if await self._try_append(joined):
                await self._read_back()
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
        # What was announced meanwhile did not know the incarnation yet.
        self._queue = deque(replace(each, incarnation=self.incarnation) for each in self._queue)

    async def _read_back(self) -> None:
        due = time.monotonic() + READ_BACK_SECONDS
        while self.incarnation is None and (remaining := due - time.monotonic()) > 0:
            await self.changed(remaining)

    async def _write_one(self, record: ReplicaState) -> None:
        pause = RETRY_SECONDS[0]
        while not await self._try_append(record):
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 # jitter, no secret
            pause = min(2 * pause, RETRY_SECONDS[1])
            newest = self._queue[-1]
            if newest is not record:
                self._queue = deque([newest])
                record = newest
        if self._queue and self._queue[0] is record:
            self._queue.popleft()

    async def _try_append(self, record: ReplicaState) -> bool:
        """Whether it was written. The same record may land twice: its sequence number tells.

        Raises InvalidRequest where the log refuses a replica that has not joined yet. Later that is said, and tried again:
        permissions and certificates are changed while processes run, and no rollout ends by it.
        """
        try:
            await append(self._events, record, source=self._config.source, timeout=APPEND_SECONDS)
        except StitchError as error:
            if isinstance(error, Rejected) and self.incarnation is None:
                raise
            self._note(error)
            return False
        self.error = None
        return True

    def _note(self, error: StitchError) -> None:
        if self.error is None:
            log.warning("activation stream: %s", error)
        self.error = str(error)

    def _record(self, transition: Transition) -> ReplicaState:
        config, state = self._config, self.state
        self._sequence += 1
        return ReplicaState(
            replica=config.replica,
            life=self.life,
            incarnation=self.incarnation,
            sequence=self._sequence,
            transition=transition,
            event_id=new_event_id(),
            phase=state.phase,
            policy=config.policy,
            channel=config.channel,
            pool=config.pool,
            url=self._url(),
            engine=config.engine,
            capacity=config.capacity,
            heartbeat_ms=round(1000 * config.heartbeat_seconds),
            generation=GENERATION,
            following=state.following,
            serving=state.serving,
            weights_digest=state.weights_digest,
            staged=state.staged,
            target=state.target,
            want=state.want,
            in_flight=self._in_flight(),
            pause_ms=state.pause_ms,
            error=state.error,
            labels=dict(state.labels),
        )
