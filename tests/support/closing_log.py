"""A log whose permissions are taken away between two copies of one decision."""

from __future__ import annotations

from stitch.core.errors import InvalidRequest
from stitch.log.faulty import FaultyLog
from stitch.log.port import Draft, Stream


class ClosingLog(FaultyLog):
    """Refuses decisions while one is held: that one was sent, nobody knows its fate, and no copy of it is taken."""

    async def append(self, stream: Stream, draft: Draft, *, timeout: float | None = None) -> None:
        if stream is Stream.PUBLICATIONS and self.held:
            raise InvalidRequest("log: refused", field="log")
        await super().append(stream, draft, timeout=timeout)
