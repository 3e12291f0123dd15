"""Generated readers give what fastavro and `build` give, or refuse."""

from __future__ import annotations

import copy
import io
import json
import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fastavro import schemaless_reader, schemaless_writer
from hypothesis import given
from hypothesis import strategies as st

from stitch.core.errors import UnreadableEvent
from stitch.wire.build import constructor
from stitch.wire.codec import BODY, MAGIC, codec, decode, encode
from stitch.wire.readers import REFUSALS, reader
from stitch.wire.schemas import Schema, registry, schema_of
from tests.support.examples import examples

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parents[1] / "golden" / "events"
EVENTS = sorted(registry().versions)
LONGS = st.one_of(st.integers(-70, 200), st.integers(-(2**63), 2**63 - 1))


def kind_of(event: str) -> type[Any]:
    name = "".join(word.capitalize() for word in event.split("_"))
    return next(type(each) for each in examples().values() if type(each).__name__ == name)


def plainly(writer: Schema, newest: Schema, kind: type[Any], body: bytes) -> Any:
    """The reference: an event, or None where the bytes are none."""
    stream = io.BytesIO(body)
    try:
        event = constructor(kind)(schemaless_reader(stream, writer.parsed, None if writer is newest else newest.parsed))
    except Exception:  # noqa: BLE001 # whatever the library raises: it refuses
        return None
    return None if stream.read(1) else event


def quickly(read: Any, body: bytes) -> Any:
    try:
        return read(b"0123456789" + body, BODY)
    except REFUSALS:
        return None


@cache
def shipped(event: str) -> Any:
    schema = registry().newest[event]
    return reader(schema, schema, kind_of(event))


@cache
def warmed(event: str) -> None:
    """From its second record on the codec reads an event by its reader."""
    record = encode(next(each for each in examples().values() if type(each) is kind_of(event)), source="test")
    decode(record.value, ())
    assert codec()._readers[record.value[:BODY]] is not None


# --- what a schema allows ------------------------------------------------------------------------------------------------------


def data(type_: Any, names: dict[str, Any], longs: st.SearchStrategy[int] = LONGS) -> st.SearchStrategy[Any]:
    """Whatever fits a type of a schema."""
    if isinstance(type_, list):
        return st.one_of(*(data(each, names, longs) for each in type_))
    if isinstance(type_, str):
        plain = {"null": st.none(), "long": longs, "double": st.floats(), "string": st.text(max_size=80)}
        return plain[type_] if type_ in plain else names[type_.rpartition(".")[2]]
    match type_["type"]:
        case "record":
            names[type_["name"]] = st.fixed_dictionaries({f["name"]: data(f["type"], names, longs) for f in type_["fields"]})
            return names[type_["name"]]
        case "enum":
            return st.sampled_from(type_["symbols"])
        case "array":
            return st.lists(data(type_["items"], names, longs), max_size=4)
        case "map":
            return st.dictionaries(st.text(max_size=5), data(type_["values"], names, longs), max_size=3)
        case inner:
            return data(inner, names, longs)


def written(schema: Schema, datum: Any) -> bytes:
    out = io.BytesIO()
    schemaless_writer(out, schema.parsed, datum)
    return out.getvalue()


def bodies(event: str) -> st.SearchStrategy[bytes]:
    schema = registry().newest[event]
    return data(schema.raw, {}).map(lambda datum: written(schema, datum))


@pytest.mark.parametrize("event", EVENTS)
def test_every_schema_has_a_reader(event: str) -> None:
    newest = registry().newest[event]
    for schema in registry().versions[event]:
        assert reader(schema, newest, kind_of(event)) is not None, f"{schema.type} is read the plain way, which is slow"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda p: p.stem)
def test_golden_bytes_are_read_the_same(path: Path) -> None:
    value = bytes.fromhex(json.loads(path.read_text(encoding="utf-8"))["value"])
    schema = registry().by_fingerprint[value[2:BODY]]
    newest, kind = registry().newest[schema.event], kind_of(schema.event)
    read = reader(schema, newest, kind)
    assert read is not None
    event = read(value, BODY)
    assert event == plainly(schema, newest, kind, value[BODY:])
    assert type(event) is kind


@pytest.mark.parametrize("event", EVENTS)
@given(draw=st.data())
def test_whatever_a_schema_allows_is_read_the_same(event: str, draw: st.DataObject) -> None:
    body = draw.draw(bodies(event))
    schema = registry().newest[event]
    plain = plainly(schema, schema, kind_of(event), body)
    quick = quickly(shipped(event), body)
    assert plain is not None
    assert repr(quick) == repr(plain) or quick is None, "equal, also where a float is no number"
    if quick is None:
        assert any(abs(each) >= 2**62 for each in _numbers(plain)), "only what is as long as no number of ours is refused"


def _numbers(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    inner = [getattr(value, name) for name in getattr(type(value), "__dataclass_fields__", ())]
    return [number for each in inner + (list(value) if isinstance(value, tuple) else []) for number in _numbers(each)]


# --- what no writer wrote -----------------------------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    event = draw(st.sampled_from(EVENTS))
    body = bytearray(draw(bodies(event)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(body)))
        match draw(st.sampled_from(["put", "cut", "end", "set"])):
            case "put":
                body[at:at] = draw(st.binary(min_size=1, max_size=3))
            case "cut":
                del body[at : at + draw(st.integers(1, 9))]
            case "end":
                del body[at:]
            case "set":
                body[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
    return event, bytes(body)


def _check_same(event: str, body: bytes) -> None:
    """What is read quickly is what is read plainly; the codec, which tries both, reads what either does, and says why not."""
    schema = registry().newest[event]
    plain, quick = plainly(schema, schema, kind_of(event), body), quickly(shipped(event), body)
    assert quick is None or repr(quick) == repr(plain)
    record = MAGIC + schema.fingerprint + body
    warmed(event)
    try:
        found: Any = repr(decode(record, ()))
    except UnreadableEvent as error:
        found = str(error)
        assert plain is None
        assert found.startswith(f"event {schema.type}: ")
        assert "long number" not in found, "the error is that of the plain way"
    assert plain is None or found == repr(plain)


@given(case=damaged())
def test_damaged_bytes_are_never_read_as_anything_else(case: tuple[str, bytes]) -> None:
    _check_same(*case)


@given(event=st.sampled_from(EVENTS), body=st.binary(max_size=120))
def test_nor_are_arbitrary_ones(event: str, body: bytes) -> None:
    _check_same(event, body)


@given(event=st.sampled_from(EVENTS), body=st.lists(st.integers(0, 8), max_size=120).map(bytes))
def test_nor_are_small_numbers_which_get_far(event: str, body: bytes) -> None:
    _check_same(event, body)


@pytest.mark.parametrize("name", examples())
def test_every_prefix_of_a_record_is_refused(name: str) -> None:
    encoded = encode(examples()[name], source="test")
    event = registry().by_fingerprint[encoded.value[2:BODY]].event
    for end in range(BODY, len(encoded.value)):
        assert quickly(shipped(event), encoded.value[BODY:end]) is None
    assert quickly(shipped(event), encoded.value[BODY:]) == examples()[name]


@pytest.mark.parametrize("number", [n + d for n in (0, 63, 64, 2**13, 2**20, 2**61, 2**62, 2**63 - 2) for d in (-1, 0, 1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_every_length(number: int, sign: int) -> None:
    schema = registry().newest["format_raised"]
    body = written(schema, {"level": sign * number, "event_id": "e", "writer": "w"})
    quick = quickly(shipped("format_raised"), body)
    assert quick.level == sign * number if abs(number) < 2**62 else quick is None or quick.level == sign * number


@pytest.mark.parametrize("byte", [0x80, 0xFF])
def test_a_number_without_end_is_refused_at_once(byte: int) -> None:
    began = time.monotonic()
    assert quickly(shipped("format_raised"), bytes([byte]) * 2**20) is None
    assert time.monotonic() - began < 5.0, "as long as the square of its length would be much longer"


@pytest.mark.parametrize("size", [2**20, 2**40, 2**61])
def test_a_size_beyond_the_record_is_refused_at_once(size: int) -> None:
    body = io.BytesIO()
    schemaless_writer(body, {"type": "long"}, size)
    for event in EVENTS:
        assert quickly(shipped(event), body.getvalue()) is None
    spans = encode(examples()["rollout_served"], source="test").value[BODY:]
    assert quickly(shipped("rollout_served"), spans.replace(b"\x04\x0c\x00\x06", body.getvalue() + b"\x0c\x00\x06")) is None


# --- older schemas -------------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def changed(event: str, version: int, *changes: Change) -> Schema:
    raw = copy.deepcopy(registry().newest[event].raw)
    for change in changes:
        change(raw)
    return schema_of(event, version, raw)


def without(*names: str) -> Change:
    return lambda raw: raw.update(fields=[f for f in raw["fields"] if f["name"] not in names])


def plus(name: str, type_: Any, **more: Any) -> Change:
    return lambda raw: raw["fields"].insert(1, {"name": name, "type": type_, **more})


def typed(name: str, type_: Any) -> Change:
    def change(raw: dict[str, Any]) -> None:
        field = next(f for f in raw["fields"] if f["name"] == name)
        field.pop("default", None)
        field["type"] = type_

    return change


def backwards(raw: dict[str, Any]) -> None:
    """Fields in another order; a name is still defined before it is used."""
    head = [f for f in raw["fields"] if isinstance(f["type"], dict | list)]
    raw["fields"] = head + [f for f in raw["fields"] if f not in head][::-1]


PHASES = {"type": "enum", "name": "Phase", "symbols": ["serving", "joining", "failed", "resting", "left"], "default": "failed"}
INNER = {"type": "record", "name": "Inner", "fields": [{"name": "x", "type": ["null", "long"]}, {"name": "y", "type": "double"}]}
LAST = {"type": "enum", "name": "Last", "symbols": ["none"]}
COUNTS = {"type": "array", "items": {"type": "map", "values": "long"}}

OLDER: list[tuple[str, list[Change]]] = [
    ("replica_state", [without("labels", "error", "in_flight", "serving", "target", "staged")]),
    ("replica_state", [backwards]),
    ("replica_state", [typed("phase", PHASES)]),
    ("replica_state", [plus("mood", "string"), plus("inner", INNER), plus("counts", COUNTS), plus("last", LAST)]),
    ("replica_state", [typed("incarnation", "long"), typed("error", ["string", "null"])]),
    ("run_claimed", [without("alias", "base"), typed("expected_head", "string")]),
    ("version_published", [without("base")]),
    ("rollout_served", [without("session"), backwards]),
]


@pytest.mark.parametrize(("event", "changes"), OLDER)
@given(draw=st.data())
def test_older_schemas_are_resolved_the_same(event: str, changes: list[Change], draw: st.DataObject) -> None:
    old, newest, kind = changed(event, 9, *changes), registry().newest[event], kind_of(event)
    read = reader(old, newest, kind)
    assert read is not None
    datum = draw.draw(data(old.raw, {}, st.integers(-(2**62) + 1, 2**62 - 1)))
    body = written(old, datum)
    quick = quickly(read, body)
    if datum.get("phase") == "resting":
        assert quick is None, "how the newest schema takes an unknown symbol is for fastavro to say"
    else:
        assert repr(quick) == repr(plainly(old, newest, kind, body))


def _only(name: str, type_: Any) -> list[Change]:
    return [typed(name, type_)]


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        ("version_published", _only("size", "boolean")),
        ("version_published", _only("size", "bytes")),
        ("version_published", _only("size", {"type": "long", "logicalType": "timestamp-millis"})),
        ("version_published", _only("size", {"type": "fixed", "name": "Size", "size": 8})),
        ("version_published", _only("size", ["null", "long", "string"])),
        ("version_published", _only("size", ["null", "long"])),
        ("version_published", _only("size", "double")),
        ("version_published", _only("size", {"type": "record", "name": "Empty", "fields": []})),
        ("version_published", _only("kind", "string")),
        ("version_published", [without("size")]),
        ("version_published", [lambda raw: next(f for f in raw["fields"] if f["name"] == "manifest")["type"].update(name="Other")]),
        ("rollout_served", _only("spans", {"type": "map", "values": "long"})),
        ("replica_state", _only("labels", {"type": "array", "items": "string"})),
        ("replica_state", [plus("self", {"type": "record", "name": "Self", "fields": [{"name": "x", "type": ["null", "Self"]}]})]),
    ],
)
def test_what_it_does_not_know_has_no_reader(event: str, changes: list[Change]) -> None:
    assert reader(changed(event, 9, *changes), registry().newest[event], kind_of(event)) is None


def test_a_class_that_the_schema_does_not_fill_has_no_reader() -> None:
    schema = registry().newest["version_retired"]
    assert reader(schema, schema, kind_of("version_published")) is None
    assert (
        reader(
            schema, changed("version_retired", 9, lambda raw: raw["fields"][0].update(aliases=["x"])), kind_of("version_retired")
        )
        is None
    )


def test_numbers_that_are_none_are_floats() -> None:
    schema = registry().newest["replica_state"]
    datum = schemaless_reader(io.BytesIO(encode(examples()["replica_state"], source="test").value[BODY:]), schema.parsed, None)
    assert isinstance(datum, dict)
    assert math.isnan(quickly(shipped("replica_state"), written(schema, datum | {"pause_ms": math.nan})).pause_ms)
