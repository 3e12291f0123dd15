"""A log that holds a record which no reader ever gets to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stitch.core.ids import Offset
from stitch.log.memory import MemoryLog
from stitch.log.port import Reader, Record, Stream


class _NeverThere(Reader):
    @property
    def position(self) -> Offset:
        return Offset(0)

    async def poll(self, timeout: float, max_records: int = 1000) -> Sequence[Record]:
        await asyncio.sleep(timeout)
        return []

    async def aclose(self) -> None:
        pass


class StuckLog(MemoryLog):
    async def reader(self, stream: Stream, start: Offset) -> Reader:
        return _NeverThere()
