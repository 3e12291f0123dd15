"""docs/events.md says of every event what its schema says, and where it is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stitch.log.events import draft, stream_of
from stitch.wire.describe import PLACES, page
from stitch.wire.schemas import registry
from tests.support.examples import examples

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "events.md"


def test_the_page_is_what_the_schemas_say() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(registry()), "run: python -m stitch.wire.describe > docs/events.md"


def test_every_event_is_on_the_page() -> None:
    assert set(PLACES) == set(registry().newest)


@pytest.mark.parametrize("name", examples())
def test_stream_and_key_are_those_of_what_is_written(name: str) -> None:
    event = examples()[name]
    kind = type(event).__name__
    (place,) = (place for each, place in PLACES.items() if registry().newest[each].raw["name"] == kind)
    stream, key = place
    assert stream_of(event) == stream
    parts = [part if part.startswith("`") else getattr(event, part) for part in key.split("/")]
    if kind != "FormatRaised":  # the example raises the level above that of this release, which none may
        assert draft(event, source="test").key == "/".join(parts)


def _fields(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in node if isinstance(node, list) else [node]:
        if not isinstance(each, dict):
            continue
        for field in each.get("fields", ()):
            yield f"{path}.{field['name']}", field
            yield from _fields(field["type"], f"{path}.{field['name']}")
        for inner in ("items", "values"):
            if inner in each:
                yield from _fields(each[inner], path)


def test_every_field_of_every_schema_is_explained() -> None:
    schemas = registry().by_fingerprint.values()
    bare = [path for s in schemas for path, field in _fields(s.raw, s.type) if not field.get("doc", "").endswith(".")]
    assert bare == []
