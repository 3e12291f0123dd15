"""The Avro schemas of all events, every version ever written, found by the fingerprint that each record begins with.

A file `schemas/<event>.v<N>.avsc` holds one self-contained schema. The files stand at the top of a checkout and inside the
installed package. A fingerprint is CRC-64-AVRO over the parsing canonical form, as the Avro specification's single-object encoding
has it. That form drops what a field means beyond its type, so the event's type and version travel in the headers as well.

`"stitch_level": N` in a file says from which format level on writers may use the schema; without it, from the first.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

_FILE = re.compile(r"(?P<event>[a-z_]+)\.v(?P<version>[1-9][0-9]*)\.avsc\Z")
TYPE_PREFIX: Final = "stitch."
FIRST_LEVEL: Final = 1
"""That of a log in which no FormatRaised stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """One version of one event's schema. `fingerprint` is its 8 bytes as they stand in a record; `level` is the format level from
    which on writers may use it."""

    event: str
    version: int
    raw: dict[str, Any]
    parsed: Any
    fingerprint: bytes
    level: int = FIRST_LEVEL

    @property
    def type(self) -> str:
        """The CloudEvents type: `stitch.<event>.v<N>`."""
        return f"{TYPE_PREFIX}{self.event}.v{self.version}"


class Registry:
    """All schemas: by fingerprint, and of each event its versions, oldest first, and the newest."""

    def __init__(self, schemas: list[Schema]) -> None:
        self.by_fingerprint = {s.fingerprint: s for s in schemas}
        if len(self.by_fingerprint) != len(schemas):
            raise AssertionError("two schemas share a fingerprint: a reader could not tell them apart")
        self.versions: dict[str, list[Schema]] = {}
        for schema in sorted(schemas, key=lambda s: s.version):
            older = self.versions.setdefault(schema.event, [])
            if older and schema.level < older[-1].level:
                raise AssertionError(f"{schema.type}: its level is below that of {older[-1].type}")
            older.append(schema)
        self.newest = {event: versions[-1] for event, versions in self.versions.items()}


@cache
def registry() -> Registry:
    """The schemas that this release ships."""
    found = [_load(entry) for entry in _folder().iterdir() if entry.name.endswith(".avsc")]
    return Registry(found)


def _folder() -> Traversable:
    inside: Traversable = files("stitch") / "schemas"
    if inside.is_dir():
        return inside
    return Path(__file__).resolve().parents[2] / "schemas"


def _load(entry: Traversable) -> Schema:
    match = _FILE.match(entry.name)
    if match is None:
        raise AssertionError(f"schemas/{entry.name}: not named <event>.v<N>.avsc")
    return schema_of(match["event"], int(match["version"]), json.loads(entry.read_text(encoding="utf-8")))


def schema_of(event: str, version: int, raw: dict[str, Any]) -> Schema:
    """The schema of a file's content. Raises AssertionError where it holds another event than its name says."""
    expected = "stitch." + "".join(word.capitalize() for word in event.split("_"))
    if f"{raw['namespace']}.{raw['name']}" != expected:
        raise AssertionError(f"schemas/{event}.v{version}.avsc: holds {raw['name']}, not {expected}")
    parsed = parse_schema(raw)
    crc = bytes.fromhex(fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO"))
    level = raw.get("stitch_level", FIRST_LEVEL)
    return Schema(event=event, version=version, raw=raw, parsed=parsed, fingerprint=crc, level=level)
