"""What a writer was told of each of its appends, and whether the log agrees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from stitch.core.errors import OutcomeUnknown, Unavailable
from stitch.core.ids import Offset
from stitch.log.kafka import DEPOSED_S
from stitch.log.port import Draft, EventLog, Stream
from stitch.log.read import read_all


class Ledger:
    """Appends numbers, each once, to one stream."""

    def __init__(self, log: EventLog, stream: Stream = Stream.PUBLICATIONS) -> None:
        self.log, self.stream = log, stream
        self.acknowledged: list[int] = []
        self.unknown: list[int] = []
        self.refused: list[int] = []
        self._next = 0

    async def append(self, timeout: float) -> str:
        """Of the next number; what came of it."""
        number, self._next = self._next, self._next + 1
        try:
            await self.log.append(self.stream, Draft(key="p", value=b"%d" % number), timeout=timeout)
        except OutcomeUnknown:
            self.unknown.append(number)
            return "unknown"
        except Unavailable:
            self.refused.append(number)
            return "refused"
        self.acknowledged.append(number)
        return "acknowledged"

    async def write_until(self, enough: Callable[[], bool], timeout: float, pause: float = 0.02) -> None:
        """Appends one after the other until `enough`."""
        while not enough():
            await self.append(timeout)
            await asyncio.sleep(pause)

    async def check(self, log: EventLog) -> list[int]:
        """What is in the log agrees with what was told. Returns it."""
        there = [int(record.value) for record in await read_all(log, self.stream)]
        until = time.monotonic() + DEPOSED_S
        while not set(self.acknowledged) <= set(there) and time.monotonic() < until:
            await asyncio.sleep(0.2)  # the end was told by a leader that was deposed, and does not know it yet
            there = [int(record.value) for record in await read_all(log, self.stream)]
        assert len(there) == len(set(there)), "an append landed twice"
        kept = set(there)
        assert kept >= set(self.acknowledged), f"lost: {set(self.acknowledged) - kept}"
        assert not kept & set(self.refused), f"there, although it was told that they are not: {kept & set(self.refused)}"
        assert kept <= {*self.acknowledged, *self.unknown}
        assert [number for number in there if number in set(self.acknowledged)] == self.acknowledged
        return there


async def read_along(log: EventLog, into: list[int], stream: Stream = Stream.PUBLICATIONS) -> None:
    """Collects the numbers until cancelled, whatever happens to the brokers."""
    async with await log.reader(stream, Offset(0)) as reader:
        while True:
            try:
                into += [int(record.value) for record in await reader.poll(1.0)]
            except Unavailable:
                await asyncio.sleep(0.1)
