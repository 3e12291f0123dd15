"""Events to records and back: Avro single-object encoding for the value, CloudEvents attributes as headers.

Nothing is written that does not match its schema exactly, and nothing is read that leaves bytes over. An event that a reader cannot
know is skipped and counted where its writer marked it optional, and stops the reader where not: a decision that some readers skip
would split the fold.

A writer takes the oldest schema that loses nothing of the event, and none above the format level that the log states, so that a
fleet may run two releases at once (docs/adr/0005-format-levels.md).
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, Final

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
from stitch.wire.build import constructor
from stitch.wire.readers import REFUSALS, Read, reader
from stitch.wire.schemas import FIRST_LEVEL, Registry, Schema, registry

MAGIC: Final = b"\xc3\x01"
BODY: Final = 10
"""Where a record's body begins: after MAGIC and the schema's fingerprint."""
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
_OPTIONAL: Final = frozenset({"channel_pointer", "replica_state", "rollout_served"})
"""What a reader may do without: the decisions tell the rest."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")


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


class Codec:
    """Encodes and decodes what one release knows: its schemas, and the class of each event."""

    def __init__(self, schemas: Registry, events: Mapping[str, type[Event]]) -> None:
        self._schemas = schemas
        self._names = {kind: name for name, kind in events.items()}
        self._events = dict(events)
        self._build = {name: constructor(kind) for name, kind in events.items()}
        self._readers: dict[bytes, Read | None] = {}
        """By what a record begins with; made when first needed, since a process meets few of all schemas."""

    def encode(
        self,
        event: Event,
        *,
        source: str,
        level: int = FIRST_LEVEL,
        time: datetime | None = None,
        traceparent: str | None = None,
    ) -> Encoded:
        """As the function of this name."""
        schema, body = self._fitting(event, level)
        value = MAGIC + schema.fingerprint + body
        if len(value) > MAX_RECORD_BYTES:
            raise InvalidRequest(f"{schema.type}: {len(value)} bytes are more than a record may have ({MAX_RECORD_BYTES})")
        return Encoded(key=_key(event), value=value, headers=_headers(event, schema, source, time, traceparent))

    def decode(self, value: bytes, headers: tuple[tuple[str, bytes], ...]) -> Event | Skipped:
        """As the function of this name."""
        read = self._readers.get(value[:BODY])
        if read is None:
            return self._decode(value, headers)
        try:
            event: Event = read(value, BODY)
        except REFUSALS:
            return self._decode(value, headers)  # it knows what is wrong, if anything is
        return event

    def _decode(self, value: bytes, headers: tuple[tuple[str, bytes], ...]) -> Event | Skipped:
        """The plain way to the event of a record."""
        schema = self._schemas.by_fingerprint.get(value[2:BODY]) if value[:2] == MAGIC else None
        try:
            if schema is None:
                raise _unknown(value, headers)
            event = self._structure(value[BODY:], schema)
        except UnreadableEvent as error:
            if ("ce_stitchoptional", b"true") in headers:
                return Skipped(type=_type(headers), reason=str(error))
            raise
        if value[:BODY] not in self._readers:
            newest, kind = self._schemas.newest[schema.event], self._events[schema.event]
            self._readers[value[:BODY]] = reader(schema, newest, kind)
        return event

    def _fitting(self, event: Event, level: int) -> tuple[Schema, bytes]:
        """The oldest schema that loses nothing of the event, and the event's bytes by it."""
        name = self._names[type(event)]
        newest = self._schemas.newest[name]
        fields = _plain(asdict(event))
        _check(fields, newest)
        for schema in self._schemas.versions[name]:
            body = _write(fields, newest) if schema is newest else self._lossless(event, fields, schema)
            if body is None:
                continue
            if schema.level <= level:
                return schema, body
            raise InvalidRequest(
                f"{schema.type}: needs format level {schema.level}, and the log stands at {level}: older releases that read it "
                f"would stop here. Raise the level once every process of the fleet runs this release",
                field="level",
            )
        raise AssertionError("the newest schema fits, or was refused above")

    def _lossless(self, event: Event, fields: dict[str, Any], schema: Schema) -> bytes | None:
        """The event's bytes by an older schema, if they are read back as the same event."""
        if not validate(fields, schema.parsed, raise_errors=False):
            return None
        body = _write(fields, schema, strict=False)  # what the older schema does not know is left out
        return body if self._structure(body, schema) == event else None

    def _structure(self, body: bytes, schema: Schema) -> Event:
        stream = io.BytesIO(body)
        try:
            newest = self._schemas.newest[schema.event]
            # The reader compares the two schemas on each call, which costs more than to read.
            raw = schemaless_reader(stream, schema.parsed, None if schema is newest else newest.parsed)
            event: Event = self._build[schema.event](raw)
        except Exception as error:  # whatever damaged bytes make the decoder do, it is the record that is unreadable
            raise UnreadableEvent(f"event {schema.type}: {error!r}") from error
        if stream.read(1):
            raise UnreadableEvent(f"event {schema.type}: bytes are left over after its body")
        return event


@cache
def codec() -> Codec:
    """That of this release."""
    return Codec(registry(), _EVENTS)


def encode(
    event: Event,
    *,
    source: str,
    level: int = FIRST_LEVEL,
    time: datetime | None = None,
    traceparent: str | None = None,
) -> Encoded:
    """The record of an event. `source` says who wrote it; `level` is the format level that the log states (`Lineage.level`), above
    which no schema is used; `time` is the writer's clock (default: now), with a time zone.

    Raises InvalidRequest naming the field that its schema does not allow, or the level that the event needs.
    """
    return codec().encode(event, source=source, level=level, time=time, traceparent=traceparent)


def decode(value: bytes, headers: tuple[tuple[str, bytes], ...]) -> Event | Skipped:
    """The event of a record. Raises UnreadableEvent where it must not be skipped."""
    return codec().decode(value, headers)


def _type(headers: tuple[tuple[str, bytes], ...]) -> str:
    """What the record's header says that it is."""
    return dict(headers).get("ce_type", b"").decode("utf-8", "replace") or "unknown"


def _unknown(value: bytes, headers: tuple[tuple[str, bytes], ...]) -> UnreadableEvent:
    """Why no schema was found for the record."""
    if value[:2] != MAGIC:
        return UnreadableEvent(f"event {_type(headers)}: not in Avro single-object encoding")
    return UnreadableEvent(f"event {_type(headers)}: its schema {value[2:BODY].hex()} is none that this release knows; upgrade it")


def _write(fields: dict[str, Any], schema: Schema, *, strict: bool = True) -> bytes:
    out = io.BytesIO()
    schemaless_writer(out, schema.parsed, fields, strict=strict)
    return out.getvalue()


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
