"""An EventLog with faults that a test chooses: for tests of whatever stands on a log.

    log = FaultyLog(MemoryLog(), script(Fault.NONE, Fault.HOLD, Fault.ECHO))

The first append goes through, the second raises OutcomeUnknown and lands at `await log.release()`, the third lands twice, later
ones go through. `seeded` draws faults by chance, the same ones for the same seed. `cut` and `mend` take the whole log away.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from stitch.core.errors import InvalidRequest, OutcomeUnknown, Unavailable
from stitch.core.ids import Offset
from stitch.log.port import Bounds, Copies, Draft, EventLog, Reader, Record, Stream

SLOW_S: Final = 0.05
"""Default delay of a slow append: longer than a round trip, short enough for thousands of them in a test."""


class Fault(StrEnum):
    """What happens to one append."""

    NONE = "none"
    SLOW = "slow"
    """Lands and returns after a delay."""
    REFUSE = "refuse"
    """Raises Unavailable; never lands."""
    LOSE = "lose"
    """Raises OutcomeUnknown; never lands."""
    HOLD = "hold"
    """Raises OutcomeUnknown; lands when the test calls `release`."""
    MUTE = "mute"
    """Lands, but raises OutcomeUnknown: the acknowledgement is lost."""
    ECHO = "echo"
    """Lands twice, as a retried append may."""


Plan = Callable[[Stream, Draft], Fault]
"""Called once for each append, in their order."""


def script(*faults: Fault) -> Plan:
    """These faults, one for each append, then none."""
    left = deque(faults)

    def plan(stream: Stream, draft: Draft) -> Fault:
        return left.popleft() if left else Fault.NONE

    return plan


def seeded(seed: int, odds: Mapping[Fault, float]) -> Plan:
    """Faults by chance, `odds` each from 0 to 1 and together at most 1; the rest goes through."""
    if not (all(share >= 0 for share in odds.values()) and sum(odds.values()) <= 1):
        raise ValueError("odds: shares from 0 to 1, together at most 1")
    chance = random.Random(seed)  # noqa: S311 - repeatable faults, no secret

    def plan(stream: Stream, draft: Draft) -> Fault:
        drawn = chance.random()
        for fault, share in odds.items():
            drawn -= share
            if drawn < 0:
                return fault
        return Fault.NONE

    return plan


class FaultyLog(EventLog):
    """`slow` in seconds. Closes `inner` with itself."""

    def __init__(self, inner: EventLog, plan: Plan | None = None, *, slow: float = SLOW_S) -> None:
        self._inner = inner
        self._plan = script() if plan is None else plan
        self._slow = slow
        self._held: deque[tuple[Stream, Draft]] = deque()
        self._is_cut = self._is_barred = False

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def embedded(self) -> bool:
        return self._inner.embedded

    @property
    def held(self) -> int:
        """Appends that wait for `release`."""
        return len(self._held)

    def plan(self, plan: Plan) -> None:
        """Changes the plan for the appends that follow."""
        self._plan = plan

    async def release(self, count: int | None = None) -> int:
        """Lets the `count` oldest held appends land (default: all), in their order; returns how many landed."""
        released = 0
        while self._held and (count is None or released < count):
            stream, draft = self._held.popleft()
            await self._inner.append(stream, draft)
            released += 1
        return released

    def cut(self) -> None:
        """From now on every call, also of open readers, raises Unavailable."""
        self._is_cut = True

    def bar(self) -> None:
        """From now on every call, also of open readers, raises InvalidRequest, as where permissions were taken away."""
        self._is_barred = True

    def mend(self) -> None:
        self._is_cut = self._is_barred = False

    async def setup(self, *, create: bool) -> Copies:
        self._check_reachable()
        return await self._inner.setup(create=create)

    async def append(self, stream: Stream, draft: Draft, *, timeout: float | None = None) -> None:
        self._check_reachable()
        match self._plan(stream, draft):
            case Fault.NONE:
                await self._inner.append(stream, draft, timeout=timeout)
            case Fault.SLOW:
                await asyncio.sleep(self._slow)
                await self._inner.append(stream, draft, timeout=timeout)
            case Fault.REFUSE:
                raise Unavailable(f"{self.url}: planned refusal; nothing was appended")
            case Fault.LOSE:
                raise OutcomeUnknown(f"{self.url}: planned loss of the append")
            case Fault.HOLD:
                self._held.append((stream, draft))
                raise OutcomeUnknown(f"{self.url}: planned delay of the append")
            case Fault.MUTE:
                await self._inner.append(stream, draft, timeout=timeout)
                raise OutcomeUnknown(f"{self.url}: planned loss of the acknowledgement")
            case Fault.ECHO:
                await self._inner.append(stream, draft, timeout=timeout)
                with contextlib.suppress(Unavailable, OutcomeUnknown):  # the record is in the log already
                    await self._inner.append(stream, draft, timeout=timeout)

    async def bounds(self, stream: Stream) -> Bounds:
        self._check_reachable()
        return await self._inner.bounds(stream)

    async def bounds_reaching(self, stream: Stream, offset: Offset) -> Bounds:
        self._check_reachable()
        return await self._inner.bounds_reaching(stream, offset)

    async def offset_at(self, stream: Stream, time_ms: int) -> Offset:
        self._check_reachable()
        return await self._inner.offset_at(stream, time_ms)

    async def newest(self, stream: Stream) -> Record | None:
        self._check_reachable()
        return await self._inner.newest(stream)

    async def reader(self, stream: Stream, start: Offset) -> Reader:
        self._check_reachable()
        return _FaultyReader(self, await self._inner.reader(stream, start))

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _check_reachable(self) -> None:
        if self._is_barred:
            raise InvalidRequest(f"log: {self.url} refused, as planned", field="log")
        if self._is_cut:
            raise Unavailable(f"{self.url}: planned cut")


class _FaultyReader(Reader):
    """A poll that waits when the cut comes still ends as the inner one does: what it returns was read before."""

    def __init__(self, log: FaultyLog, inner: Reader) -> None:
        self._log = log
        self._inner = inner

    @property
    def position(self) -> Offset:
        return self._inner.position

    async def poll(self, timeout: float, max_records: int = 1000) -> Sequence[Record]:
        self._log._check_reachable()
        return await self._inner.poll(timeout, max_records)

    async def aclose(self) -> None:
        await self._inner.aclose()
