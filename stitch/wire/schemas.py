"""The Avro schemas of all events, every version ever written, found by the fingerprint that each record begins with.

A file `schemas/<event>.v<N>.avsc` holds one self-contained schema. The files stand at the top of a checkout and inside the
installed package. A fingerprint is CRC-64-AVRO over the parsing canonical form, as the Avro specification's single-object encoding
has it. That form drops what a field means beyond its type, so the event's type and version travel in the headers as well.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """One version of one event's schema. `fingerprint` is its 8 bytes as they stand in a record."""

    event: str
    version: int
    raw: dict[str, Any]
    parsed: Any
    fingerprint: bytes

    @property
    def type(self) -> str:
        """The CloudEvents type: `stitch.<event>.v<N>`."""
        return f"{TYPE_PREFIX}{self.event}.v{self.version}"


class Registry:
    """All schemas, by fingerprint, and the newest of each event."""

    def __init__(self, schemas: list[Schema]) -> None:
        self.by_fingerprint = {s.fingerprint: s for s in schemas}
        self.newest: dict[str, Schema] = {}
        for schema in sorted(schemas, key=lambda s: s.version):
            self.newest[schema.event] = schema
        if len(self.by_fingerprint) != len(schemas):
            raise AssertionError("two schemas share a fingerprint: a reader could not tell them apart")


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
    raw = json.loads(entry.read_text(encoding="utf-8"))
    expected = "stitch." + "".join(word.capitalize() for word in match["event"].split("_"))
    parsed = parse_schema(raw)
    if f"{raw['namespace']}.{raw['name']}" != expected:
        raise AssertionError(f"schemas/{entry.name}: holds {raw['name']}, not {expected}")
    crc = bytes.fromhex(fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO"))
    return Schema(event=match["event"], version=int(match["version"]), raw=raw, parsed=parsed, fingerprint=crc)
