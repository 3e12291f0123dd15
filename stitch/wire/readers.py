"""Readers of events: functions that make an event straight from a record's bytes, written once for each schema.

The plain way (`codec`) lets fastavro read a body into a dict, of which `build` makes the event. Whoever reads a long history does
that for each of its records, and spends more than half of the time on it. So the source of a function is written here from the
writer's schema, the newest schema of the event and the event's class; for `VersionRetired` it begins

    def read(data, at):
        size = sizes[data[at]]; at += 1
        if size is None: size, at = long_size(data, at - 1)
        policy_1 = data[at:(at := at + size)].decode()

A reader gives what the plain way gives, or raises one of REFUSALS; then the plain way is asked, which knows what is wrong. It may
refuse bytes that are merely rare. Where a schema holds more than is known here, it has no reader, and all its records go the plain
way. Tests hold the two to the same values.

`data` is a whole record. A slice beyond its end is only shorter, and `at` never goes back: the one look at the end, that `at` has
come to it exactly, shows that nothing was missing.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from enum import Enum
from struct import Struct
from struct import error as StructError
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from stitch.core.frozen import maker
from stitch.wire.build import builder
from stitch.wire.schemas import Schema

Read = Callable[[bytes, int], Any]
"""An event of a record, whose body begins at the offset given."""
REFUSALS: Final = (IndexError, KeyError, ValueError, StructError)
"""What a reader raises for bytes that it does not take."""

_PLAIN: Final = {"string": str, "long": int, "double": float}
_ANY: Final = object()
"""In place of a type that is not there: the newest schema has no such field, or the class."""
_LONG_BITS: Final = 56
"""Before a number's last byte. What is beyond 2**62, which hardly any number is, goes the plain way."""
_ONE_BYTE: Final = 128
"""What is less stands in one byte."""


class _NotKnown(Exception):
    """The schema or the class holds something for which no source is written."""


def reader(writer: Schema, newest: Schema, kind: type[Any]) -> Read | None:
    """What makes a `kind` of a record that `writer` wrote, as `newest` has it; None where only the plain way can."""
    source = _Source(writer.raw, newest.raw)
    try:
        source.value(writer.raw, newest.raw, kind, "event")
    except _NotKnown:
        return None
    source.say('if at != len(data): raise ValueError("not at the end")', "return event")
    return source.compiled()


# --- what the source calls -----------------------------------------------------------------------------------------------------


def _long(data: bytes, at: int) -> tuple[int, int]:
    """A zig-zag number of any length, and where it ends."""
    raw = shift = 0
    while (byte := data[at]) >= _ONE_BYTE:
        if shift == _LONG_BITS:
            raise ValueError("a long number")
        raw |= (byte & 127) << shift
        shift += 7
        at += 1
    raw |= byte << shift
    return raw >> 1 ^ -(raw & 1), at + 1


def _size(data: bytes, at: int) -> tuple[int, int]:
    """A number of bytes or items, and where it ends."""
    size, at = _long(data, at)
    if size < 0:
        raise ValueError("a negative size")
    return size, at


_LONGS: Final = [None if raw >= _ONE_BYTE else raw >> 1 ^ -(raw & 1) for raw in range(256)]
"""By the first byte: the number, if it stands in that byte alone."""
_SIZES: Final = [None if value is None or value < 0 else value for value in _LONGS]
_NAMES: Final = {"longs": _LONGS, "long": _long, "sizes": _SIZES, "long_size": _size, "double": Struct("<d").unpack_from}


# --- its source ----------------------------------------------------------------------------------------------------------------


class _Source:
    """The source of one reader as it is written. Its methods add what puts a value into the variable `into`: a value of the
    `writer`'s type, resolved to the `newest` schema's, for a `hint` of the class. In place of the latter two _ANY may stand."""

    def __init__(self, writer: Any, newest: Any) -> None:
        self._lines = ["def read(data, at):"]
        self._margin = 1
        self._names: dict[str, Any] = dict(_NAMES)
        self._written, self._newest = _definitions(writer), _definitions(newest)
        self._within: list[str] = []
        self._count = itertools.count(1)

    def say(self, *lines: str) -> None:
        self._lines += [self._margin * "    " + line for line in lines]

    def compiled(self) -> Read:
        exec("\n".join(self._lines), self._names)  # noqa: S102 # made of the names in our own schemas
        made: Read = self._names["read"]
        return made

    def value(self, writer: Any, newest: Any, hint: Any, into: str) -> None:
        """A value of any type that is known."""
        hint = _not_none(hint)
        if isinstance(writer, list):
            self._optional(writer, newest, hint, into)
            return
        writer = _definition(writer, self._written)
        newest = _definition(_not_null(newest), self._newest)
        kind, name = _kind(writer)
        if newest is not _ANY and (kind, name) != _kind(newest):
            raise _NotKnown(f"{writer} as {newest}")
        match kind:
            case "string" | "long" | "double":
                self._plain(kind, hint, into)
            case "enum":
                self._enumeration(writer, newest, hint, into)
            case "record":
                self._record(writer, newest, hint, into)
            case "array":
                self._array(writer, newest, hint, into)
            case "map":
                self._map(writer, newest, hint, into)
            case _:
                raise _NotKnown(kind)

    def _plain(self, kind: str, hint: Any, into: str) -> None:
        if hint is not _ANY and hint is not _PLAIN[kind]:
            raise _NotKnown(f"{kind} for {hint}")
        if kind == "string":
            self._sized("size")
            self.say(f"{into} = data[at:(at := at + size)].decode()")
        elif kind == "double":
            self.say(f"{into}, = double(data, at); at += 8")
        else:
            self.say(f"{into} = longs[data[at]]; at += 1", f"if {into} is None: {into}, at = long(data, at - 1)")

    def _sized(self, into: str) -> None:
        self.say(f"{into} = sizes[data[at]]; at += 1", f"if {into} is None: {into}, at = long_size(data, at - 1)")

    def _optional(self, writer: list[Any], newest: Any, hint: Any, into: str) -> None:
        if len(writer) != 2 or "null" not in writer or (newest is not _ANY and not isinstance(newest, list)):
            raise _NotKnown(f"{writer} as {newest}")
        null = writer.index("null")
        self.say("branch = data[at]; at += 1", f"if branch == {2 * (1 - null)}:")  # zig-zag
        self._margin += 1
        self.value(writer[1 - null], newest, hint, into)
        self._margin -= 1
        self.say(f"elif branch == {2 * null}: {into} = None", 'else: raise ValueError("no branch")')

    def _enumeration(self, writer: Any, newest: Any, hint: Any, into: str) -> None:
        """By a table of the symbols' numbers. What is not in it, for one reason or another, is refused."""
        members: dict[str, Any]
        if hint is _ANY:
            members = {symbol: symbol for symbol in writer["symbols"]}
        elif isinstance(hint, type) and issubclass(hint, Enum):
            members = {each.value: each for each in hint}
        else:
            raise _NotKnown(f"an enumeration for {hint}")
        known = writer["symbols"] if newest is _ANY else newest["symbols"]
        taken = [(2 * n, symbol) for n, symbol in enumerate(writer["symbols"]) if symbol in members and symbol in known]
        table = {raw: members[symbol] for raw, symbol in taken if raw < _ONE_BYTE}
        self.say(f"{into} = {self._named('table', table)}[data[at]]; at += 1")

    def _record(self, writer: Any, newest: Any, hint: Any, into: str) -> None:
        if writer["name"] in self._within or not writer["fields"]:
            raise _NotKnown(f"{writer['name']}: within itself, or empty")
        self._within.append(writer["name"])
        make, hints = (None, {}) if hint is _ANY else _made(hint)
        theirs = {} if newest is _ANY else {field["name"]: field for field in newest["fields"]}
        values = {field["name"]: self._variable(field["name"]) for field in writer["fields"]}
        for field in writer["fields"]:
            name = field["name"]
            self.value(field["type"], theirs[name]["type"] if name in theirs else _ANY, hints.get(name, _ANY), values[name])
        values |= {name: self._default(theirs[name], hints.get(name, _ANY)) for name in theirs if name not in values}
        self._within.pop()
        if make is not None:
            if hints.keys() - theirs.keys() or any("aliases" in part for part in (newest, *newest["fields"])):
                raise _NotKnown(f"{hint}: a field that the schema lacks, or has by another name")
            self.say(f"{into} = {self._named('make', make)}({', '.join(values[name] for name in hints)})")

    def _default(self, field: Any, hint: Any) -> str:
        """The newest schema's, for a field that the writer has not."""
        if "default" not in field:
            raise _NotKnown(f"{field['name']}: missing")
        default = copy.deepcopy(field["default"])
        build = None if hint is _ANY or default is None else builder(hint)
        return self._named("default", default if build is None else build(default))

    def _array(self, writer: Any, newest: Any, hint: Any, into: str) -> None:
        if hint is not _ANY and (get_origin(hint) is not tuple or get_args(hint)[1:] != (...,)):
            raise _NotKnown(f"an array for {hint}")
        item = self._variable("item")
        self.say(f"{into} = []")
        self._blocks()
        self.value(writer["items"], _within(newest, "items"), _ANY if hint is _ANY else get_args(hint)[0], item)
        self.say(f"{into}.append({item})")
        self._margin -= 2
        self.say(f"{into} = tuple({into})")

    def _map(self, writer: Any, newest: Any, hint: Any, into: str) -> None:
        if hint is not _ANY and get_origin(hint) is not Mapping:
            raise _NotKnown(f"a map for {hint}")
        key, item = self._variable("key"), self._variable("item")
        self.say(f"{into} = {{}}")
        self._blocks()
        self._plain("string", str, key)
        self.value(writer["values"], _within(newest, "values"), _ANY if hint is _ANY else get_args(hint)[1], item)
        self.say(f"{into}[{key}] = {item}")
        self._margin -= 2

    def _blocks(self) -> None:
        """Begins the loops over the items of an array or a map, which come in blocks, an empty one last."""
        count = self._variable("count")
        self.say("while True:")
        self._margin += 1
        self._sized(count)
        self.say(f"if not {count}: break", f"for _ in range({count}):")
        self._margin += 1

    def _variable(self, name: str) -> str:
        return f"{name}_{next(self._count)}"

    def _named(self, what: str, value: object) -> str:
        name = self._variable(what)
        self._names[name] = value
        return name


def _made(kind: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes values of a class, and the types of its fields in their order."""
    try:
        make = maker(kind)
    except TypeError as error:
        raise _NotKnown(str(error)) from error
    hints = get_type_hints(kind)
    return make, {name: hints[name] for name in kind.__dataclass_fields__}


def _not_none(hint: Any) -> Any:
    """The type of a value that is not None, without the name that it may have of its own."""
    if get_origin(hint) in (Union, UnionType):
        hint, *more = [each for each in get_args(hint) if each is not NoneType]
        if more:
            raise _NotKnown("several types")
    return getattr(hint, "__supertype__", hint)


def _not_null(type_: Any) -> Any:
    """The type of a value that is not null."""
    if not isinstance(type_, list):
        return type_
    found, *more = [each for each in type_ if each != "null"]
    if more:
        raise _NotKnown("a union of several types")
    return found


def _kind(type_: Any) -> tuple[str, str | None]:
    """What a type is, and its name if it has one."""
    if not isinstance(type_, dict):
        return str(type_), None
    if "logicalType" in type_:
        raise _NotKnown(f"{type_}: fastavro makes something else of its values")
    return str(type_["type"]), type_.get("name")


def _within(type_: Any, part: str) -> Any:
    return _ANY if type_ is _ANY else type_[part]


def _definition(type_: Any, known: dict[str, Any]) -> Any:
    """The definition behind a name; anything else as it is."""
    return known.get(type_.rpartition(".")[2], type_) if isinstance(type_, str) else type_


def _definitions(node: Any) -> dict[str, Any]:
    """The named types within a schema; all are of one namespace."""
    found: dict[str, Any] = {}
    if isinstance(node, dict) and node.get("type") in ("record", "enum"):
        found[node["name"]] = node
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        found |= _definitions(inner)
    return found
