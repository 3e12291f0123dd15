"""Events on a log: which stream each goes to, and appending one."""

from __future__ import annotations

from typing import Final

from stitch.core.events import ChannelPointer, Event, ReplicaState, RolloutServed
from stitch.log.port import Draft, EventLog, Record, Stream
from stitch.wire.codec import Skipped, decode, encode

_STREAMS: Final = {
    ChannelPointer: Stream.POINTERS,
    ReplicaState: Stream.ACTIVATIONS,
    RolloutServed: Stream.ROLLOUTS,
}


def stream_of(event: Event) -> Stream:
    """Where the event belongs; every decision is a publication."""
    return _STREAMS.get(type(event), Stream.PUBLICATIONS)


def draft(event: Event, *, source: str, traceparent: str | None = None) -> Draft:
    """The record to append. Raises InvalidRequest where the event does not fit its schema."""
    encoded = encode(event, source=source, traceparent=traceparent)
    return Draft(key=encoded.key, value=encoded.value, headers=encoded.headers)


async def append(log: EventLog, event: Event, *, source: str, timeout: float | None = None) -> None:
    """Appends the event durably; `timeout` in seconds. Raises Unavailable or OutcomeUnknown as the log does."""
    await log.append(stream_of(event), draft(event, source=source), timeout=timeout)


def read(record: Record) -> Event | Skipped:
    """The event of a record. Raises UnreadableEvent where it must not be skipped."""
    return decode(record.value, record.headers)
