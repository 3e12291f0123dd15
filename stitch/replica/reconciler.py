"""What the replica shall serve: the further of what the log's fold says and what the channel's pointer says.

Either alone suffices. The publications are followed over one client; the pointer is read every reconcile interval over another, so
that a client which fell silent strands nobody. A replica never goes back to an older sequence, whoever tells of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from stitch.core.errors import LogDiverged, StitchError
from stitch.core.ids import ChannelName, PolicyId, listed
from stitch.core.lineage import Lineage, PolicyLineage
from stitch.core.pointers import pointer_key
from stitch.log.follow import Follower
from stitch.log.opening import open_log
from stitch.log.port import EventLog
from stitch.log.views import GENERATION, Pointers, lineage_follower, pointers_follower, write_pointers
from stitch.replica.targets import Target, target_of_log, target_of_pointer

log = logging.getLogger(__name__)

READ_SECONDS: Final = 15.0
"""Bound on one reading of the pointer; then its client is replaced."""
JITTER: Final = (0.75, 1.25)
WAKE_SECONDS: Final = 0.2
"""Least time between two readings of the pointer, however many hints come: each refused request is one."""


class Reconciler:
    """Keeps `target`. `run` follows until cancelled; `wake` makes it look at the pointer at once."""

    def __init__(
        self,
        events: EventLog,
        pointers_url: str,
        *,
        policy: PolicyId,
        channel: ChannelName,
        interval: float,
        source: str,
        on_lineage: Callable[[], None] = lambda: None,
    ) -> None:
        """`events` is the client for the publications. A second one is opened at `pointers_url`, and replaced where it fails."""
        self.target: Target | None = None
        self.pointer_error: str | None = None
        """What the last reading of the pointer failed with."""
        self._policy, self._channel, self._interval, self._source = policy, channel, interval, source
        self._url = pointers_url
        self._follower: Follower[Lineage] = lineage_follower(events)
        self._on_lineage = on_lineage
        self._hint = asyncio.Event()
        self._changed = asyncio.Condition()

    @property
    def lineage(self) -> PolicyLineage:
        """All that is known of the policy."""
        return self._follower.state.policy(self._policy)

    @property
    def follower(self) -> Follower[Lineage]:
        """The fold of the publications, for a look at its health."""
        return self._follower

    def wake(self) -> None:
        """A hint that there is something new."""
        self._hint.set()

    async def run(self) -> None:
        """Follows both until cancelled. Faults of the log end nothing."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follower.run(), name="publications")
            tasks.create_task(self._watch_log(), name="log target")
            tasks.create_task(self._watch_pointer(), name="pointer")

    async def newer_than(self, order: tuple[int, int] | None) -> Target:
        """The target, once there is one beyond `order`."""
        async with self._changed:
            while self.target is None or (order is not None and self.target.order <= order):
                await self._changed.wait()
            return self.target

    def why_no_target(self) -> str:
        """A sentence for whoever waits for the first one."""
        known, channel = self.lineage, self._channel
        if not self._follower.complete:
            why = self._follower.frozen or self._follower.error or self.pointer_error
            return f"the log was not read to its end yet{f': {why}' if why else ''}"
        if not known.versions:
            return f"nothing was published under policy {self._policy} yet"
        mend = f"stitch channel move {channel} VERSION makes it"
        return f"channel {channel} names no version yet (there are: {listed(known.channels)}); {mend}"

    async def other_than(self, target: Target) -> None:
        """Waits until there is a newer target, or the same with other anchors: what could not be staged may be staged then."""
        async with self._changed:
            while self.target is None or not (self.target.order > target.order or self.target.better_than(target)):
                await self._changed.wait()

    async def _watch_log(self) -> None:
        while True:
            seen = self._follower.state
            await self._offer(target_of_log(seen.policy(self._policy), self._channel, GENERATION))
            self._on_lineage()
            try:
                await self._follower.until(lambda state, seen=seen: state is not seen, None)  # type: ignore[misc]
            except StitchError as error:
                log.warning("publications: %s; the pointer is followed alone", error)
                return

    async def _watch_pointer(self) -> None:
        while True:
            try:
                await self._read_with_one_client()
            except (StitchError, OSError) as error:
                self.pointer_error = str(error)
                log.warning("pointer of %s/%s: %s", self._policy, self._channel, error)
            await self._pause()

    async def _read_with_one_client(self) -> None:
        """Reads the pointer again and again over one client, which ends with its first error."""
        async with open_log(self._url) as own:
            pointers = pointers_follower(own)
            following = asyncio.create_task(pointers.run(), name="pointers")
            repairing = asyncio.create_task(self._repair(own, pointers), name="pointer repair")
            try:
                while True:
                    state = await pointers.catch_up(READ_SECONDS)
                    if isinstance(self._follower.frozen, LogDiverged):
                        raise self._follower.frozen  # a new client does not know that its log is another: the follower does
                    self.pointer_error = None
                    found = state.greatest.get(pointer_key(self._policy, self._channel))
                    if found is not None:
                        await self._offer(target_of_pointer(found))
                    await self._pause()
            finally:
                for task in (following, repairing):
                    task.cancel()
                await asyncio.gather(following, repairing, return_exceptions=True)

    async def _repair(self, own: EventLog, pointers: Follower[Pointers]) -> None:
        """Writes pointers that are behind what the log says, as anyone may who sees it."""
        while True:
            await asyncio.sleep(self._jittered())
            if not self._follower.healthy:
                continue
            try:
                await write_pointers(own, lambda: self._follower.state, pointers, source=self._source, pause=self._before_repair)
            except StitchError as error:
                log.warning("pointer repair: %s", error)

    async def _before_repair(self) -> None:
        await asyncio.sleep(random.uniform(0, self._interval))  # noqa: S311 # jitter, no secret

    async def _offer(self, target: Target | None) -> None:
        """Takes what is further, and of the same what was told later: a compaction adds a nearer anchor without moving the channel.
        That is no news to whoever waits for a newer target, so nothing is staged or loaded again."""
        known = self.target
        if target is None or (known is not None and target.order <= known.order and not target.better_than(known)):
            return
        self.target = target
        async with self._changed:
            self._changed.notify_all()

    async def _pause(self) -> None:
        await asyncio.sleep(WAKE_SECONDS)
        try:
            async with asyncio.timeout(self._jittered()):
                await self._hint.wait()
        except TimeoutError:
            pass
        self._hint.clear()

    def _jittered(self) -> float:
        return self._interval * random.uniform(*JITTER)  # noqa: S311 # jitter, no secret
