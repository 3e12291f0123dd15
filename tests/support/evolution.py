"""Whether two schemas of an event understand each other, by Avro's rules of resolution: the checker that Avro itself has not.

`problems(writer, reader)` says what keeps the reader from what the writer writes. Full compatibility asks it both ways round, and
transitive compatibility for every pair of an event's schemas.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from fastavro import schemaless_reader

from stitch.wire.codec import MAGIC
from stitch.wire.schemas import Schema

PROMOTIONS: Final = {
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "string": {"bytes"},
    "bytes": {"string"},
}


def problems(writer: Schema, reader: Schema) -> list[str]:
    """What `reader` cannot take of what `writer` may write; each names the field."""
    return list(_differences(_Names(writer.raw), writer.raw, _Names(reader.raw), reader.raw, writer.event))


def unread(record: bytes, writer: Schema, reader: Schema) -> str | None:
    """Why `reader` cannot read this record of `writer` to its last byte; None where it can."""
    assert record[:2] == MAGIC
    assert record[2:10] == writer.fingerprint
    body = io.BytesIO(record[10:])
    try:
        schemaless_reader(body, writer.parsed, reader.parsed)
    except Exception as error:  # noqa: BLE001 # whatever the library raises is the finding
        return f"{writer.type} -> {reader.type}: {error!r}"
    return f"{writer.type} -> {reader.type}: bytes are left over" if body.read(1) else None


def levels(versions: list[Schema], optional: bool) -> list[str]:
    """A decision that an older release cannot read stops it, so each new schema of one waits for a level of its own."""
    found = []
    for older, newer in pairwise(versions):
        if newer.version != older.version + 1:
            found.append(f"{newer.type}: follows version {older.version}")
        if not optional and newer.level <= older.level:
            found.append(f"{newer.type}: a decision's new schema needs a stitch_level above {older.level}")
    return found


class _Names:
    """The named types within a schema."""

    def __init__(self, raw: Any) -> None:
        self._types: dict[str, Any] = {}
        self._collect(raw)

    def resolve(self, schema: Any) -> Any:
        """The definition behind a name; anything else as it is."""
        if isinstance(schema, str):
            return self._types.get(schema.rpartition(".")[2], schema)
        return schema

    def _collect(self, node: Any) -> None:
        if isinstance(node, dict) and node.get("type") in ("record", "enum", "fixed"):
            self._types[node["name"]] = node
        for inner in node.values() if isinstance(node, dict) else node:
            if isinstance(inner, dict | list):
                self._collect(inner)


def _differences(wn: _Names, writer: Any, rn: _Names, reader: Any, path: str) -> Iterator[str]:
    writer, reader = wn.resolve(writer), rn.resolve(reader)
    if isinstance(writer, list):
        for branch in writer:
            yield from _differences(wn, branch, rn, reader, path)
        return
    if isinstance(reader, list):
        if not any(not list(_differences(wn, writer, rn, branch, path)) for branch in reader):
            yield f"{path}: {_kind(writer)} is none of the reader's"
        return
    kind = _kind(writer)
    if kind != _kind(reader):
        if _kind(reader) not in PROMOTIONS.get(kind, ()):
            yield f"{path}: {kind} is read as {_kind(reader)}"
        return
    if kind in ("record", "enum") and writer["name"] not in (reader["name"], *reader.get("aliases", ())):
        yield f"{path}: {writer['name']} is read as {reader['name']}"
    elif kind == "record":
        yield from _fields(wn, writer, rn, reader, path)
    elif kind == "enum":
        unknown = [symbol for symbol in writer["symbols"] if symbol not in reader["symbols"]]
        if unknown and "default" not in reader:
            yield f"{path}: the reader has no symbol {', '.join(unknown)}, and no default"
    elif kind in ("array", "map"):
        inner = "items" if kind == "array" else "values"
        yield from _differences(wn, writer[inner], rn, reader[inner], f"{path}[]")


def _fields(wn: _Names, writer: Any, rn: _Names, reader: Any, path: str) -> Iterator[str]:
    theirs = {field["name"]: field for field in writer["fields"]}
    for field in reader["fields"]:
        names = (field["name"], *field.get("aliases", ()))
        match = next((theirs[name] for name in names if name in theirs), None)
        if match is not None:
            yield from _differences(wn, match["type"], rn, field["type"], f"{path}.{field['name']}")
        elif "default" not in field:
            yield f"{path}.{field['name']}: the writer has no such field, and the reader no default"


def _kind(schema: Any) -> str:
    return str(schema["type"] if isinstance(schema, dict) else schema)
