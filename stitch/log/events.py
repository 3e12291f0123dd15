"""Events on a log: which stream each goes to, and appending one."""

from __future__ import annotations

from typing import Final

from stitch.core.errors import InvalidRequest, UnreadableEvent
from stitch.core.events import FORMAT_LEVEL, ChannelPointer, Event, FormatRaised, ReplicaState, RolloutServed
from stitch.log.port import Draft, EventLog, Record, Stream
from stitch.wire.codec import Skipped, decode, encode
from stitch.wire.schemas import FIRST_LEVEL

_STREAMS: Final = {
    ChannelPointer: Stream.POINTERS,
    ReplicaState: Stream.ACTIVATIONS,
    RolloutServed: Stream.ROLLOUTS,
}


def stream_of(event: Event) -> Stream:
    """Where the event belongs; every decision is a publication."""
    return _STREAMS.get(type(event), Stream.PUBLICATIONS)


def draft(event: Event, *, source: str, level: int = FIRST_LEVEL, traceparent: str | None = None) -> Draft:
    """The record to append, in a form that every reader knows which knows the log's format `level`.

    Raises InvalidRequest where the event does not fit its schema, or needs a higher level.
    """
    if isinstance(event, FormatRaised) and event.level > FORMAT_LEVEL:
        raise InvalidRequest(f"level: this release knows format level {FORMAT_LEVEL}, and cannot raise it above", field="level")
    encoded = encode(event, source=source, level=level, traceparent=traceparent)
    return Draft(key=encoded.key, value=encoded.value, headers=encoded.headers)


async def append(log: EventLog, event: Event, *, source: str, level: int = FIRST_LEVEL, timeout: float | None = None) -> None:
    """Appends the event durably, as `draft` has it; `timeout` in seconds. Raises Unavailable or OutcomeUnknown as the log does."""
    await log.append(stream_of(event), draft(event, source=source, level=level), timeout=timeout)


def read(record: Record) -> Event | Skipped:
    """The event of a record. Raises UnreadableEvent where it must not be skipped, and where the log's format was raised above
    what this release knows: what follows may be judged by rules that it has not."""
    event = decode(record.value, record.headers)
    if isinstance(event, FormatRaised) and event.level > FORMAT_LEVEL:
        raise UnreadableEvent(
            f"{record.stream}: at offset {record.offset} the log's format was raised to level {event.level}, and this release "
            f"knows {FORMAT_LEVEL}; upgrade it"
        )
    return event
