"""Events to records and back: Avro single-object encoding for the value, CloudEvents attributes as headers.

Nothing is written that does not match its schema exactly, and nothing is read that leaves bytes over. An event that a reader cannot
know is skipped and counted where its writer marked it optional, and stops the reader where not: a decision that some readers skip
would split the fold.
"""

from __future__ import annotations

import io
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import cattrs
from fastavro import schemaless_reader, schemaless_writer
from fastavro.validation import ValidationError, validate

from stitch.core.errors import InvalidRequest, UnreadableEvent
from stitch.core.events import (
    AnchorAdded,
    ChannelMoved,
    ChannelPointer,
    Event,
    FormatRaised,
    ReplicaState,
    RolloutServed,
    RunClaimed,
    VersionPublished,
    VersionQuarantined,
    VersionRetired,
)
from stitch.core.pointers import pointer_key
from stitch.wire.schemas import Schema, registry

MAGIC: Final = b"\xc3\x01"
CONTENT_TYPE: Final = "application/avro"
MAX_RECORD_BYTES: Final = 1024 * 1024
"""Kafka's default bound on a record; no event comes near it."""
NAMESPACE_KEY: Final = "*"
"""Record key of decisions that concern no single policy."""

_EVENTS: Final[dict[str, type[Event]]] = {
    "run_claimed": RunClaimed,
    "version_published": VersionPublished,
    "anchor_added": AnchorAdded,
    "channel_moved": ChannelMoved,
    "version_quarantined": VersionQuarantined,
    "version_retired": VersionRetired,
    "format_raised": FormatRaised,
    "channel_pointer": ChannelPointer,
    "replica_state": ReplicaState,
    "rollout_served": RolloutServed,
}
_NAMES: Final = {kind: name for name, kind in _EVENTS.items()}
_OPTIONAL: Final = frozenset({"channel_pointer", "replica_state", "rollout_served"})
"""What a reader may do without: the decisions tell the rest."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")

_converter = cattrs.Converter(detailed_validation=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """What a record of an event is made of."""

    key: str
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """An optional event that this release cannot read. `type` is what its header says."""

    type: str
    reason: str


def encode(event: Event, *, source: str, time: datetime | None = None, traceparent: str | None = None) -> Encoded:
    """The record of an event. `source` says who wrote it; `time` is the writer's clock (default: now), with a time zone.

    Raises InvalidRequest naming the field that its schema does not allow.
    """
    schema = registry().newest[_NAMES[type(event)]]
    body = _plain(asdict(event))
    _check(body, schema)
    out = io.BytesIO()
    schemaless_writer(out, schema.parsed, body, strict=True)
    value = MAGIC + schema.fingerprint + out.getvalue()
    if len(value) > MAX_RECORD_BYTES:
        raise InvalidRequest(f"{schema.type}: {len(value)} bytes are more than a record may have ({MAX_RECORD_BYTES})")
    return Encoded(key=_key(event), value=value, headers=_headers(event, schema, source, time, traceparent))


def decode(value: bytes, headers: tuple[tuple[str, bytes], ...]) -> Event | Skipped:
    """The event of a record. Raises UnreadableEvent where it must not be skipped."""
    told = dict(headers)
    type_ = told.get("ce_type", b"").decode("utf-8", "replace") or "unknown"
    try:
        return _decode(value, type_)
    except UnreadableEvent as error:
        if told.get("ce_stitchoptional") == b"true":
            return Skipped(type=type_, reason=str(error))
        raise


def _decode(value: bytes, type_: str) -> Event:
    if value[:2] != MAGIC:
        raise UnreadableEvent(f"event {type_}: not in Avro single-object encoding")
    schema = registry().by_fingerprint.get(value[2:10])
    if schema is None:
        raise UnreadableEvent(f"event {type_}: its schema {value[2:10].hex()} is none that this release knows; upgrade it")
    body = io.BytesIO(value[10:])
    try:
        raw = schemaless_reader(body, schema.parsed, registry().newest[schema.event].parsed)
        event = _converter.structure(raw, _EVENTS[schema.event])
    except Exception as error:  # whatever damaged bytes make the decoder do, it is the record that is unreadable
        raise UnreadableEvent(f"event {schema.type}: {error!r}") from error
    if body.read(1):
        raise UnreadableEvent(f"event {schema.type}: bytes are left over after its body")
    return event


def _headers(
    event: Event, schema: Schema, source: str, time: datetime | None, traceparent: str | None
) -> tuple[tuple[str, bytes], ...]:
    time = time or datetime.now(UTC)
    if time.tzinfo is None:
        raise InvalidRequest("time: needs a time zone; local time is not meant", field="time")
    headers = {
        "ce_specversion": "1.0",
        "ce_id": event.event_id,
        "ce_type": schema.type,
        "ce_source": source,
        "ce_time": time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "content-type": CONTENT_TYPE,
    }
    if schema.event in _OPTIONAL:
        headers["ce_stitchoptional"] = "true"
    if traceparent is not None:
        if not _TRACEPARENT.match(traceparent):
            raise InvalidRequest("traceparent: not of the W3C form", field="traceparent")
        headers["traceparent"] = traceparent
    return tuple((name, text.encode()) for name, text in headers.items())


def _key(event: Event) -> str:
    match event:
        case FormatRaised():
            return NAMESPACE_KEY
        case ChannelPointer():
            return pointer_key(event.policy, event.channel)
        case ReplicaState():
            return event.replica
        case RolloutServed():
            return event.request_id
        case _:
            return event.policy


def _check(body: dict[str, Any], schema: Schema) -> None:
    """The writer alone would take True or 2**70 for a long; validate() refuses both and names the field."""
    try:
        validate(body, schema.parsed, raise_errors=True, strict=True)
    except ValidationError as error:
        field = error.errors[0].field.removeprefix("stitch.")
        raise InvalidRequest(f"{field}: {error.errors[0].datum!r} is not what the schema allows", field=field) from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value
