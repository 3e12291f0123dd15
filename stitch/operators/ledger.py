"""The log as an operator's command sees it: views that are caught up, and decisions appended until their fate is known (rule 4).

    async with open_ledger(log, policy, source="/stitch/gc") as ledger:
        verdict = await ledger.settle(decision)

An operator's decision moves no head. What it expects (an epoch, a channel's sequence) never returns once it has passed, so the
first copy that is read back decides for it as for all others.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from stitch.core.errors import OutcomeUnknown, StitchError, Unavailable
from stitch.core.events import AnchorAdded, ChannelMoved, Event, VersionQuarantined, VersionRetired
from stitch.core.fleet import Fleet
from stitch.core.ids import PolicyId, WriterId
from stitch.core.lineage import Lineage, PolicyLineage, Position, Verdict
from stitch.log.events import append
from stitch.log.follow import Follower, while_following
from stitch.log.port import EventLog, Stream
from stitch.log.views import fleet_follower, lineage_follower, pointers_follower, write_pointers

SETTLE_SECONDS: Final = 120.0
"""For one decision: a cluster that elects new leaders, twice."""
READ_SECONDS: Final = 60.0
"""For reading a stream to its end: a long history takes seconds."""
APPEND_SECONDS: Final = 30.0
"""For one append; within it a Kafka cluster elects a new leader."""
CONFIRMED_SECONDS: Final = 15.0
"""For a decision to be read back that the log confirmed, before another copy is appended."""
AGAIN_SECONDS: Final = (0.25, 10.0)
"""First and longest pause before a decision of unknown outcome is appended again."""

_logger = logging.getLogger(__name__)
T = TypeVar("T")
Decision = AnchorAdded | ChannelMoved | VersionQuarantined | VersionRetired


def new_operator() -> WriterId:
    """Unique to one command."""
    return WriterId(f"operator-{socket.gethostname()}-{uuid.uuid4().hex[:12]}")


def fate(policy: PolicyLineage, decision: Decision) -> Verdict | None:
    """What became of an appended decision, as far as the lineage tells; None while it may still count.

    A refusal may be known before any copy was read: what the decision expects has passed for good.
    """
    verdict = policy.verdicts.get(decision.event_id)
    if verdict is not None:
        return verdict
    if isinstance(decision, AnchorAdded) and policy.epoch > decision.epoch:
        return Verdict.STALE_EPOCH
    if isinstance(decision, ChannelMoved):
        channel = policy.channels.get(decision.channel)
        if channel is not None and channel.sequence > decision.expected_sequence:
            return Verdict.STALE_SEQUENCE
    return None


class Ledger:
    """Of one policy and one event loop; use `open_ledger`. One decision at a time."""

    def __init__(self, log: EventLog, policy: PolicyId, source: str) -> None:
        self._log, self._policy, self._source = log, policy, source
        self._lineage: Follower[Lineage] = lineage_follower(log)
        self._lineage.listeners.append(self._hear)
        self._fleet: Follower[Fleet] = fleet_follower(log)
        self._pointers = pointers_follower(log)
        self._running: dict[Stream, asyncio.Task[None]] = {}
        self._retired: VersionRetired | None = None

    @property
    def policy(self) -> PolicyLineage:
        """As far as it was read."""
        return self._lineage.state.policy(self._policy)

    async def aclose(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def read_on(self, timeout: float = READ_SECONDS) -> PolicyLineage:
        """The policy once all was read that the log held at the call. Raises Unavailable, LogDiverged, UnreadableEvent."""
        await self._following(self._lineage, self._lineage.catch_up(timeout))
        return self.policy

    async def read_fleet(self, timeout: float = READ_SECONDS) -> Fleet:
        """What the replicas said, caught up at the call. Raises as `read_on` does; also where a record could not be read: what it
        said of a replica is not known then."""
        fleet = await self._following(self._fleet, self._fleet.catch_up(timeout))
        if self._fleet.skipped:
            raise Unavailable(f"{self._log.url}: replicas of a later release speak; upgrade this one to know what they use")
        return fleet

    async def settle(self, decision: Decision, timeout: float = SETTLE_SECONDS) -> Verdict:
        """Appends the decision, again and again where its outcome is unknown, until the first copy of it was read back.

        At the deadline it raises Unavailable where nothing can have been appended, else OutcomeUnknown: it may still count.
        """
        until = time.monotonic() + timeout
        pause = AGAIN_SECONDS[0]
        sent = False
        why = ""
        while (found := fate(self.policy, decision)) is None:
            if self._lineage.frozen is not None:
                raise self._lineage.frozen  # who cannot read what counts decides nothing
            remaining = until - time.monotonic()
            if remaining <= 0:
                what = f"{type(decision).__name__}: {self._log.url}"
                if sent:
                    raise OutcomeUnknown(f"{what} did not show it within {timeout:g} s; it may still count. {why}".strip())
                raise Unavailable(f"{what} took nothing within {timeout:g} s; nothing was appended. {why}".strip())
            wait = min(CONFIRMED_SECONDS, remaining)
            try:
                level = self._lineage.state.level
                await append(self._log, decision, source=self._source, level=level, timeout=min(APPEND_SECONDS, remaining))
                sent = True
            except StitchError as error:
                if not sent and not isinstance(error, OutcomeUnknown | Unavailable):
                    raise
                sent = sent or isinstance(error, OutcomeUnknown)
                why = str(error)
                _logger.warning("waiting, %.0f s left: %s", remaining, error)
                wait = min(pause * random.uniform(0.5, 1.0), remaining)  # noqa: S311 # jitter, no secret
                pause = min(2 * pause, AGAIN_SECONDS[1])
            await self._until(lambda policy: fate(policy, decision) is not None, wait)
        return found

    async def write_pointers(self) -> None:
        """Writes every pointer that is behind the lineage; on return none is, as of the last reading. Raises Unavailable."""
        await self._following(
            self._pointers,
            write_pointers(self._log, lambda: self._lineage.state, self._pointers, source=self._source),
        )

    async def now_ms(self) -> int | None:
        """The time of the newest decision, by the log's own clock; None where the log holds none. The time of other streams is
        not asked: it may be another broker's."""
        newest = await self._log.newest(Stream.PUBLICATIONS)
        return None if newest is None else newest.time_ms

    async def ask_time(self) -> int | None:
        """The log's time at this moment, where the policy has a retirement: that is appended once more, and the copy's time read.

        A copy of a decision that was judged changes nothing, for any reader. It is how a log that fell silent, and whose own clock
        alone counts, tells that time has passed.
        """
        again = self._retired
        if again is None:
            return await self.now_ms()
        try:
            await append(self._log, again, source=self._source, level=self._lineage.state.level, timeout=APPEND_SECONDS)
        except OutcomeUnknown as error:
            _logger.info("the log's time was not told: %s", error)
        return await self.now_ms()

    # --- following ---------------------------------------------------------------------------------------------------------

    def _hear(self, event: Event, at: Position) -> None:
        if isinstance(event, VersionRetired) and event.policy == self._policy:
            self._retired = event

    async def _until(self, holds: Callable[[PolicyLineage], bool], timeout: float) -> None:
        try:
            await self._following(self._lineage, self._lineage.until(lambda state: holds(state.policy(self._policy)), timeout))
        except TimeoutError:
            _logger.info("not read back within %.1f s", timeout)

    async def _following(self, follower: Follower[Any], waiting: Coroutine[Any, Any, T]) -> T:
        """The result, or what ended the follower that it depends on."""
        running = self._running.get(follower.stream)
        if running is None:
            running = asyncio.create_task(follower.run(), name=f"follow {follower.stream}")
            self._running[follower.stream] = running
        return await while_following(follower, running, waiting)


@asynccontextmanager
async def open_ledger(log: EventLog, policy: PolicyId, *, source: str) -> AsyncIterator[Ledger]:
    """The ledger of a log whose streams stand. Raises InvalidRequest for one that is not set up."""
    await log.setup(create=False)
    ledger = Ledger(log, policy, source)
    try:
        yield ledger
    finally:
        await ledger.aclose()
