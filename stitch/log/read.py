"""Reading a stream to an end that was fixed at the call, so that it ends although others append meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from stitch.core.errors import Unavailable
from stitch.core.ids import Offset
from stitch.log.port import EventLog, Record, Stream

READ_ALL_TIMEOUT_S: Final = 300.0
"""For the whole: ten million records at the pace of the slowest log."""
STALL_S: Final = 15.0
"""Without a step forward, though the end was not reached."""
POLL_S: Final = 0.5
"""Of one poll. A stream may end in entries that are no records, which show only in the position after a poll."""


async def pages(
    log: EventLog,
    stream: Stream,
    *,
    start: Offset | None = None,
    until: Offset | None = None,
    timeout: float = READ_ALL_TIMEOUT_S,
) -> AsyncGenerator[Sequence[Record], None]:
    """Records from `start` (default: the first held) to before `until` (default: the end at this moment), page by page.

    Raises Unavailable after `timeout` seconds, or STALL_S without progress, and LogDiverged as readers do. Close it (aclosing)
    where it is not read to its end.
    """
    loop = asyncio.get_running_loop()
    if start is None or until is None:
        bounds = await log.bounds(stream)
        start = bounds.start if start is None else start
        until = bounds.end if until is None else until
    if start >= until:
        return
    deadline = loop.time() + timeout
    stalled = loop.time() + STALL_S
    async with await log.reader(stream, start) as reader:
        while (position := reader.position) < until:
            remaining = min(deadline, stalled) - loop.time()
            if remaining <= 0:
                raise Unavailable(f"{log.url}: {stream} was read to offset {position}, then no further; it ends at {until}")
            records = await reader.poll(min(POLL_S, remaining))
            if reader.position > position:
                stalled = loop.time() + STALL_S
            if records and records[-1].offset >= until:
                records = [record for record in records if record.offset < until]
            if records:
                yield records


async def read_all(
    log: EventLog,
    stream: Stream,
    *,
    start: Offset | None = None,
    until: Offset | None = None,
    timeout: float = READ_ALL_TIMEOUT_S,
) -> list[Record]:
    """What `pages` gives, in one list."""
    async with aclosing(pages(log, stream, start=start, until=until, timeout=timeout)) as found:
        return [record async for page in found for record in page]


async def last_record(log: EventLog, stream: Stream) -> Record | None:
    """The newest record, for logs that can only read forwards."""
    found = await last_records(log, stream, 1)
    return found[0] if found else None


async def last_records(log: EventLog, stream: Stream, count: int, *, until: Offset | None = None) -> list[Record]:
    """The `count` newest records before `until` (default: the end at this moment), oldest first; fewer where there are fewer.

    Steps back from the end, twice as far each time, since offsets may have gaps: it reads little, however long the stream is.
    """
    bounds = await log.bounds(stream)
    until = bounds.end if until is None else until
    step, start = max(count, 1), until
    found: list[Record] = []
    while start > bounds.start and len(found) < count:
        start = Offset(max(bounds.start, until - step))
        found = await read_all(log, stream, start=start, until=until)
        step *= 2
    return found[max(0, len(found) - count) :]
