"""Schemas may change while two releases run at once: what was ever written stays readable, both ways, and levels gate what is new.

The shipped schemas are checked pair by pair. That the check would catch a bad change is shown on changed copies of one.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from stitch.core.errors import InvalidRequest, UnreadableEvent
from stitch.core.events import FORMAT_LEVEL, FormatRaised, ReplicaState, VersionQuarantined
from stitch.core.ids import EventId, WriterId
from stitch.log import events as log_events
from stitch.log.events import append, draft
from stitch.log.memory import MemoryLog
from stitch.log.views import lineage_follower
from stitch.wire.codec import Codec, Skipped, decode, encode
from stitch.wire.schemas import FIRST_LEVEL, Registry, Schema, registry, schema_of
from tests.support.evolution import levels, problems, unread
from tests.support.examples import POLICY, examples

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parents[1] / "golden" / "events"


def _golden() -> list[tuple[str, bytes]]:
    return [(path.stem, bytes.fromhex(json.loads(path.read_text("utf-8"))["value"])) for path in sorted(GOLDEN.glob("*.json"))]


# --- what ships --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", sorted(registry().versions))
def test_every_pair_of_an_events_schemas_reads_each_other(event: str) -> None:
    versions = registry().versions[event]
    assert problems(versions[0], versions[0]) == []
    for writer, reader in permutations(versions, 2):
        assert problems(writer, reader) == [], f"{writer.type} is not read by {reader.type}"


@pytest.mark.parametrize(("name", "record"), _golden(), ids=[name for name, _ in _golden()])
def test_every_golden_record_is_read_by_every_schema_of_its_event(name: str, record: bytes) -> None:
    writer = registry().by_fingerprint[record[2:10]]
    assert [unread(record, writer, reader) for reader in registry().versions[writer.event]] == [None] * len(
        registry().versions[writer.event]
    )


@pytest.mark.parametrize("event", sorted(registry().versions))
def test_new_schemas_wait_for_their_level(event: str) -> None:
    versions = registry().versions[event]
    assert versions[0].level == FIRST_LEVEL or versions[0].level <= FORMAT_LEVEL
    assert max(schema.level for schema in versions) <= FORMAT_LEVEL
    optional = event in ("channel_pointer", "replica_state", "rollout_served")
    assert levels(versions, optional) == []


def test_a_record_of_the_first_level_is_what_is_written_by_default() -> None:
    assert {schema.level for schema in registry().by_fingerprint.values() if schema.version == 1} == {FIRST_LEVEL}


def _unions(node: Any) -> Iterator[list[Any]]:
    if isinstance(node, dict):
        yield from (inner for key, inner in node.items() if key in ("type", "items", "values") and isinstance(inner, list))
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _unions(inner)


def test_unions_are_null_or_one_type() -> None:
    """Then no value can be taken for another branch's."""
    unions = [union for schema in registry().by_fingerprint.values() for union in _unions(schema.raw)]
    assert unions
    assert all(len(union) == 2 and union[0] == "null" for union in unions)


# --- the check sees what it is there for -----------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def _next(event: str, change: Change, *, level: int = 2) -> Schema:
    """A made-up version 2 of an event's schema."""
    raw = copy.deepcopy(registry().newest[event].raw)
    raw["stitch_level"] = level
    change(raw)
    return schema_of(event, 2, raw)


def _field(raw: dict[str, Any], name: str) -> dict[str, Any]:
    return next(field for field in raw["fields"] if field["name"] == name)


def _add(field: dict[str, Any]) -> Change:
    return lambda raw: raw["fields"].append(field)


def _rename(old: str, new: str, **more: Any) -> Change:
    return lambda raw: _field(raw, old).update(name=new, **more)


def _retype(name: str, type_: Any) -> Change:
    return lambda raw: _field(raw, name).update(type=type_)


def _symbol(field: str, symbol: str, default: str | None = None) -> Change:
    def change(raw: dict[str, Any]) -> None:
        enum = _field(raw, field)["type"]
        enum["symbols"].append(symbol)
        if default is not None:
            enum["default"] = default

    return change


def _drop(name: str) -> Change:
    return lambda raw: raw["fields"].remove(_field(raw, name))


def _rename_record(raw: dict[str, Any]) -> None:
    _field(raw, "manifest")["type"]["name"] = "Manifest"


BACKWARD, FORWARD = "an old record, by the new schema", "a new record, by the old schema"


@pytest.mark.parametrize(
    ("event", "change", "broken"),
    [
        ("version_retired", _add({"name": "reason", "type": "string", "default": ""}), set()),
        ("version_retired", _add({"name": "reason", "type": "string"}), {BACKWARD}),
        ("version_quarantined", _drop("reason"), set()),
        ("version_retired", _drop("writer"), {FORWARD}),
        ("version_retired", _rename("writer", "author"), {BACKWARD, FORWARD}),
        ("version_retired", _rename("writer", "author", aliases=["writer"]), {FORWARD}),
        ("version_published", _symbol("kind", "sparse"), {FORWARD}),
        ("version_published", _retype("epoch", "int"), {BACKWARD}),
        ("version_published", _retype("epoch", "double"), {FORWARD}),
        ("version_published", _retype("epoch", ["null", "long"]), {FORWARD}),
        ("version_published", _rename_record, {BACKWARD, FORWARD}),
        ("replica_state", _symbol("phase", "resting", default="failed"), {FORWARD}),
    ],
    ids=[
        "added with a default",
        "added without",
        "dropped what has a default",
        "dropped what has none",
        "renamed",
        "renamed with an alias",
        "enum symbol",
        "narrowed",
        "widened",
        "made optional",
        "inner record renamed",
        "enum symbol with a default, which the old schema lacks",
    ],
)
def test_the_check_sees_a_change_that_breaks_readers(event: str, change: Change, broken: set[str]) -> None:
    old, new = registry().newest[event], _next(event, change)
    found = {BACKWARD for _ in problems(old, new)} | {FORWARD for _ in problems(new, old)}
    assert found == broken
    told = [unread(record, old, new) for _, record in _golden() if record[2:10] == old.fingerprint]
    assert (BACKWARD in broken) == any(told), "the golden bytes and the rules disagree"


def test_an_enum_with_a_default_may_get_symbols() -> None:
    with_default = _next("version_published", lambda raw: _field(raw, "kind")["type"].update(default="full"))
    more = schema_of("version_published", 3, copy.deepcopy(with_default.raw))
    _symbol("kind", "sparse")(more.raw)
    assert problems(more, with_default) == []
    assert problems(more, registry().newest["version_published"]) != [], "which a transitive check finds"


def test_a_decisions_new_schema_without_a_level_is_found() -> None:
    change = _add({"name": "reason", "type": "string", "default": ""})
    old = registry().newest["version_retired"]
    assert levels([old, _next("version_retired", change, level=1)], optional=False) != []
    assert levels([old, _next("version_retired", change, level=2)], optional=False) == []


def test_a_change_of_words_alone_is_no_new_schema() -> None:
    same = _next("version_retired", lambda raw: raw.update(doc="Other words."))
    old = registry().newest["version_retired"]
    with pytest.raises(AssertionError, match="share a fingerprint"):
        Registry([old, same])
    records = [record for _, record in _golden() if record[2:10] == old.fingerprint]
    assert records
    assert [unread(record, old, same) for record in records] == [None] * len(records)


def test_levels_do_not_fall() -> None:
    old = replace(registry().newest["version_retired"], level=3)
    with pytest.raises(AssertionError, match="level"):
        Registry([old, _next("version_retired", _add({"name": "x", "type": "string", "default": ""}))])


# --- two releases at once --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedNext(VersionQuarantined):
    """As a later release might have it: with the version to go to instead."""

    instead: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNext(ReplicaState):
    """As a later release might have it."""

    temperature: int = 0


def _release_2() -> Codec:
    quarantined = _next("version_quarantined", _add({"name": "instead", "type": ["null", "long"], "default": None}))
    state = _next("replica_state", _add({"name": "temperature", "type": "long", "default": 0}), level=1)
    schemas = Registry([*registry().by_fingerprint.values(), quarantined, state])
    kinds = {type(event).__name__: type(event) for event in examples().values()}
    events: dict[str, Any] = {name: kinds["".join(word.capitalize() for word in name.split("_"))] for name in registry().newest}
    return Codec(schemas, events | {"version_quarantined": QuarantinedNext, "replica_state": StateNext})


def _fields_of(name: str) -> dict[str, Any]:
    event = examples()[name]
    return {field: getattr(event, field) for field in type(event).__dataclass_fields__}


def _quarantined(instead: int | None) -> Any:
    return QuarantinedNext(**_fields_of("version_quarantined"), instead=instead)


def test_a_new_writer_takes_the_oldest_schema_that_loses_nothing() -> None:
    new, event = _release_2(), _quarantined(None)
    record = new.encode(event, source="new", level=2)
    assert record.value == encode(examples()["version_quarantined"], source="old").value
    assert decode(record.value, record.headers) == examples()["version_quarantined"]
    assert new.decode(record.value, record.headers) == event


def test_what_is_new_waits_until_the_level_was_raised() -> None:
    new, event = _release_2(), _quarantined(3)
    with pytest.raises(InvalidRequest, match="needs format level 2, and the log stands at 1") as refused:
        new.encode(event, source="new", level=1)
    assert refused.value.field == "level"
    record = new.encode(event, source="new", level=2)
    assert dict(record.headers)["ce_type"] == b"stitch.version_quarantined.v2"
    assert new.decode(record.value, record.headers) == event


def test_an_old_record_is_read_by_the_new_release_with_its_default() -> None:
    old = encode(examples()["version_quarantined"], source="old")
    assert _release_2().decode(old.value, old.headers) == _quarantined(None)


def test_an_optional_event_of_a_later_release_is_skipped_by_the_old_one() -> None:
    record = _release_2().encode(StateNext(**_fields_of("replica_state"), temperature=70), source="new")
    assert isinstance(decode(record.value, record.headers), Skipped)
    plain = _release_2().encode(StateNext(**_fields_of("replica_state")), source="new")
    assert decode(plain.value, plain.headers) == examples()["replica_state"]


def test_a_value_that_no_schema_allows_is_told_by_its_field() -> None:
    event = replace(_quarantined(None), reason=7)
    with pytest.raises(InvalidRequest) as refused:
        _release_2().encode(event, source="new", level=2)
    assert refused.value.field == "VersionQuarantined.reason"


def _raised(level: int) -> FormatRaised:
    return FormatRaised(level=level, event_id=EventId(f"f{level}"), writer=WriterId("operator"))


def test_no_release_raises_the_level_above_its_own() -> None:
    draft(_raised(FORMAT_LEVEL), source="operator")
    with pytest.raises(InvalidRequest, match="cannot raise it above"):
        draft(_raised(FORMAT_LEVEL + 1), source="operator")


async def test_an_old_reader_stops_where_the_level_goes_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One log, two releases: the old one folds as far as it knows the rules, and not a record further."""
    async with MemoryLog("") as log:
        await log.setup(create=True)
        await append(log, examples()["run_claimed"], source="old")
        with monkeypatch.context() as release_2:
            release_2.setattr(log_events, "FORMAT_LEVEL", 2)
            await append(log, _raised(2), source="new")
        await append(log, examples()["run_claimed_alias"], source="old")

        old = lineage_follower(log)
        await asyncio.wait_for(old.run(), timeout=30.0)
        assert isinstance(old.frozen, UnreadableEvent)
        assert "raised to level 2, and this release knows 1; upgrade it" in str(old.frozen)
        assert not old.healthy
        assert len(old.state.policy(POLICY).verdicts) == 1, "what came before the raise was folded"
        assert old.state.level == 1

        monkeypatch.setattr(log_events, "FORMAT_LEVEL", 2)
        new = lineage_follower(log)
        following = asyncio.create_task(new.run())
        try:
            state = await new.catch_up()
        finally:
            following.cancel()
        assert state.level == 2
        assert len(state.policy(POLICY).verdicts) == 1, "both claims have one event id: a duplicate"
