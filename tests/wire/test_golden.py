"""Bytes that were ever written stay readable, and are written again as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stitch.core.replay import plain
from stitch.wire.codec import decode, encode
from stitch.wire.schemas import registry
from tests.support.examples import examples

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parents[1] / "golden" / "events"
"""One file for each example and schema version: <example>.<fingerprint>.json. A file once committed is never changed."""


def _written() -> list[Path]:
    return sorted(GOLDEN.glob("*.json"))


@pytest.mark.parametrize("path", _written(), ids=lambda p: p.stem)
def test_every_record_ever_written_is_read_as_what_it_meant(path: Path) -> None:
    golden = json.loads(path.read_text(encoding="utf-8"))
    event = decode(bytes.fromhex(golden["value"]), tuple((k, v.encode()) for k, v in golden["headers"].items()))
    assert type(event).__name__ == golden["kind"]
    assert plain(event) == golden["event"]


@pytest.mark.parametrize("name", examples())
def test_every_example_is_written_as_its_newest_golden_bytes(name: str) -> None:
    encoded = encode(examples()[name], source="golden")
    path = GOLDEN / f"{name}.{encoded.value[2:10].hex()}.json"
    assert path.exists(), f"a new schema version needs a new golden file: {path.name}"
    assert encoded.value.hex() == json.loads(path.read_text(encoding="utf-8"))["value"]


def test_every_schema_version_has_golden_bytes() -> None:
    seen = {path.stem.rsplit(".", 1)[1] for path in _written()}
    assert {schema.fingerprint.hex() for schema in registry().by_fingerprint.values()} == seen
