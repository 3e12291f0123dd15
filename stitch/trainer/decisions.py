"""The log side of a publisher: what is known of the lineage, and decisions appended until their fate is known (rule 4)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, Final, TypeVar

from stitch.core.errors import OutcomeUnknown, StitchError, Unavailable
from stitch.core.events import Event, RunClaimed, VersionPublished
from stitch.core.ids import PolicyId
from stitch.core.lineage import Lineage, PolicyLineage, Position
from stitch.core.writer import Fate, Session, fate, session_of
from stitch.log.events import append
from stitch.log.follow import Follower, while_following
from stitch.log.port import EventLog
from stitch.log.views import Pointers, lineage_follower, pointers_follower, write_pointers
from stitch.trainer.attempt import Attempt, Step, pauses

APPEND_SECONDS: Final = 30.0
"""For one append; within it a Kafka cluster elects a new leader."""
READ_SECONDS: Final = 15.0
"""For one try to read to the end. Then the wait is reported, and goes on."""
APPEND_AGAIN_SECONDS: Final = (0.25, 10.0)
"""First and longest pause before a decision of unknown outcome is appended again. A copy too many costs a record."""
CONFIRMED_SECONDS: Final = 15.0
"""The same for an append that the log confirmed: it only has to be read."""
POINTERS_SECONDS: Final = 10.0
"""For the pointers after an acceptance. Replicas that hear of it by the log do not wait for them, and others repair them."""

_logger = logging.getLogger(__name__)
T = TypeVar("T")
Decision = RunClaimed | VersionPublished


class Decisions:
    """Of one policy and one event loop. `source` says in each record who wrote it."""

    def __init__(self, log: EventLog, policy: PolicyId, source: str) -> None:
        self._log, self._policy, self._source = log, policy, source
        self._lineage: Follower[Lineage] = lineage_follower(log)
        self._lineage.listeners.append(self._hear)
        self._pointers: Follower[Pointers] = pointers_follower(log)
        self._following: asyncio.Task[None] | None = None
        self._following_pointers: asyncio.Task[None] | None = None
        self.session: Session | None = None
        """Of the last claim of ours that was accepted, even where it was superseded since."""
        self.unsettled: Decision | None = None
        """What was sent and may still land: nothing else is appended before its fate is known."""

    @property
    def policy(self) -> PolicyLineage:
        """As far as it was read. May be looked at from any thread."""
        return self._lineage.state.policy(self._policy)

    def start(self) -> None:
        self._following = asyncio.create_task(self._lineage.run(), name="follow publications")

    async def aclose(self) -> None:
        tasks = [task for task in (self._following, self._following_pointers) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def read_on(self, attempt: Attempt) -> PolicyLineage:
        """The policy once all was read that the log held at the call. Raises Unavailable at the deadline, LogDiverged."""
        await attempt.until_available(lambda: self._while_following(self._lineage.catch_up(min(READ_SECONDS, attempt.remaining))))
        return self.policy

    async def settle(self, decision: Decision, attempt: Attempt) -> Fate:
        """Appends the decision, again and again where its outcome is unknown, until the first copy of it was read back.

        Returns ACCEPTED or REFUSED. At the deadline it raises Unavailable where nothing can have been appended, else
        OutcomeUnknown; then the decision stays in `unsettled`.
        """
        waits = pauses(*APPEND_AGAIN_SECONDS)
        while (found := fate(self.policy, decision)) is Fate.OPEN:
            if attempt.expired:
                raise self._undecided(decision, attempt)
            wait = await self._append_once(decision, attempt, waits)
            await self._read_until_judged(decision, min(wait, attempt.remaining))
        self.unsettled = None
        return found

    async def write_pointers(self) -> None:
        """Writes what is behind the lineage. A failure is logged: whoever sees the pointers behind writes them later."""
        if self._following_pointers is None or self._following_pointers.done():
            self._pointers = pointers_follower(self._log)
            self._following_pointers = asyncio.create_task(self._pointers.run(), name="follow pointers")
        try:
            async with asyncio.timeout(POINTERS_SECONDS):
                await write_pointers(self._log, lambda: self._lineage.state, self._pointers, source=self._source)
        except (StitchError, TimeoutError) as error:
            _logger.warning("pointers of %s were not written; whoever sees them behind will: %r", self._policy, error)

    async def _append_once(self, decision: Decision, attempt: Attempt, waits: Iterator[float]) -> float:
        """How long the copy should be waited for before another one is appended."""
        may_have_landed = self.unsettled is not None
        self.unsettled = decision  # before the append: whatever ends this task in the middle of it, the record may land
        try:
            timeout = min(APPEND_SECONDS, max(attempt.remaining, 0.001))
            await append(self._log, decision, source=self._source, level=self._lineage.state.level, timeout=timeout)
        except OutcomeUnknown as error:
            attempt.report_waiting(str(error))
            return next(waits)
        except StitchError as error:
            if not may_have_landed:
                self.unsettled = None
                if not isinstance(error, Unavailable):
                    raise
            # What was sent before may land whatever is said of this copy.
            attempt.report_waiting(str(error))
            return next(waits)
        attempt.report(Step.APPENDED)
        return CONFIRMED_SECONDS

    async def _read_until_judged(self, decision: Decision, timeout: float) -> None:
        def judged(state: Lineage) -> bool:
            return fate(state.policy(self._policy), decision) is not Fate.OPEN

        try:
            await self._while_following(self._lineage.until(judged, timeout))
        except TimeoutError:
            _logger.info("%s was not read back within %.1f s", decision.event_id, timeout)

    def _undecided(self, decision: Decision, attempt: Attempt) -> StitchError:
        what = f"the claim of run {decision.run}"
        if isinstance(decision, VersionPublished):
            what = f"version {decision.number} of run {decision.run}"
        if self.unsettled is None:
            return Unavailable(f"{what}: {self._log.url} took nothing within {attempt.timeout:g} s; nothing was appended")
        return OutcomeUnknown(
            f"{what}: sent to {self._log.url}, but not read back within {attempt.timeout:g} s; it may still count."
            " The next publish settles it first"
        )

    async def _while_following(self, waiting: Coroutine[Any, Any, T]) -> T:
        """The result, or what ended the follower that it depends on."""
        assert self._following is not None
        if self._following.done() and self._lineage.frozen is None:
            self.start()  # a log that refused may take it back
        return await while_following(self._lineage, self._following, waiting)

    def _hear(self, event: Event, at: Position) -> None:
        """Keeps the session of a claim of ours at the moment at which it counts: it may be superseded by the next record."""
        if self.unsettled is not None and isinstance(event, RunClaimed) and event.event_id == self.unsettled.event_id:
            self.session = session_of(event, self.policy) or self.session
