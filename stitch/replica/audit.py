"""Records of answered requests on the stream of rollouts: written behind the answers, never before them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from stitch.core.errors import StitchError
from stitch.core.events import RolloutServed
from stitch.log.events import append
from stitch.log.port import EventLog
from stitch.replica.config import AuditMode

log = logging.getLogger(__name__)

QUEUE: Final = 4096
"""Records that wait while the log is slow or away; what comes beyond is dropped, and counted."""
APPEND_SECONDS: Final = 10.0


class Audit:
    """`served` takes a record at once; `run` writes what was taken, until cancelled."""

    def __init__(self, events: EventLog, mode: AuditMode, *, source: str, size: int = QUEUE) -> None:
        self.written = 0
        self.dropped = 0
        self._events, self._mode, self._source = events, mode, source
        self._queue: asyncio.Queue[RolloutServed] = asyncio.Queue(maxsize=size)

    @property
    def on(self) -> bool:
        return self._mode is not AuditMode.OFF

    def served(self, make: Callable[[], RolloutServed]) -> None:
        """Takes the record, if records are kept and there is room."""
        if not self.on:
            return
        try:
            self._queue.put_nowait(make())
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> None:
        while True:
            record = await self._queue.get()
            try:
                await append(self._events, record, source=self._source, timeout=APPEND_SECONDS)
                self.written += 1
            except StitchError as error:  # also a refusal: no rollout ends because its record cannot be kept
                if not self.dropped:
                    log.warning("rollouts are not recorded: %s", error)
                self.dropped += 1
