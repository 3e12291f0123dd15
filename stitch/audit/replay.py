"""`replay`: every view as it was at one point of the log, rebuilt from the events alone."""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from anyio.from_thread import start_blocking_portal

from stitch.core.errors import InvalidRequest
from stitch.core.fleet import Fleet
from stitch.core.ids import Offset
from stitch.core.lineage import Lineage, make_position
from stitch.core.replay import View
from stitch.log.events import read
from stitch.log.follow import Fold
from stitch.log.opening import open_log
from stitch.log.port import EventLog, Stream
from stitch.log.read import pages
from stitch.log.views import fold_fleet, fold_lineage
from stitch.wire.codec import Skipped

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
S = TypeVar("S")


def replay(log: str | EventLog, until: int | datetime | None = None) -> View:
    """The lineage and the fleet as of `until`: a record of the publications by its offset, that one included, or a moment by
    the log's own clock (with a time zone); None for all that the log holds now. `digest` tells whether two readers agree.

    The fleet is rebuilt from the activations that the log still holds, up to the same moment. A log that is given as an object
    stays open, and must not be in use by another event loop unless it is a memory log. Raises Unavailable, UnreadableEvent.
    """
    if isinstance(until, datetime) and until.tzinfo is None:
        raise InvalidRequest("until: needs a time zone; local time is not meant", field="until")
    with start_blocking_portal("asyncio") as portal:
        return portal.call(_replay, log, until)


async def _replay(log: str | EventLog, until: int | datetime | None) -> View:
    if not isinstance(log, str):
        return await view_at(log, until)
    async with open_log(log) as opened:
        await opened.setup(create=False)
        return await view_at(opened, until)


async def view_at(log: EventLog, until: int | datetime | None = None) -> View:
    """As `replay`, within an event loop."""
    offset = None if until is None or isinstance(until, datetime) else Offset(until)
    time_ms = (until - _EPOCH) // timedelta(milliseconds=1) if isinstance(until, datetime) else None
    lineage, newest_ms = await _fold(log, Stream.PUBLICATIONS, Lineage(), fold_lineage, offset=offset, time_ms=time_ms)
    if until is not None and time_ms is None:
        # The streams have no common order but the log's clock.
        time_ms = newest_ms
    fleet, _ = await _fold(log, Stream.ACTIVATIONS, Fleet(), fold_fleet, time_ms=time_ms)
    return View(lineage=lineage, fleet=fleet)


async def _fold(
    log: EventLog, stream: Stream, state: S, fold: Fold[S], *, offset: Offset | None = None, time_ms: int | None = None
) -> tuple[S, int]:
    """The state after the stream's records up to both bounds, which are included, and the time of the last one (-1: none)."""
    last_ms = -1
    end = None if offset is None else Offset(min(offset + 1, (await log.bounds(stream)).end))
    async with aclosing(pages(log, stream, until=end)) as found:
        async for page in found:
            for record in page:
                if time_ms is not None and record.time_ms > time_ms:
                    return state, last_ms
                event = read(record)
                if not isinstance(event, Skipped):
                    state = fold(state, event, make_position(offset=record.offset, time_ms=record.time_ms))
                last_ms = record.time_ms
    return state, last_ms
