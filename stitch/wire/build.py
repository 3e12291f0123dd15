"""Decoded bodies to events: one constructor for each class, made once from its type hints.

A body that Avro has read has the right types already, so all that is left is to make the nested values and the enumerations. To ask
a general converter about each field of each record costs more than to read its bytes, and whatever starts reads thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

Build = Callable[[Any], Any]


def constructor(kind: type[Any]) -> Build:
    """What makes a `kind`, a dataclass, of a decoded body.

    The body may hold more than the class does; what it lacks takes the class's default. It is used up: nested values are made in
    place. The constructor raises TypeError for what is missing, KeyError for what is no member of an enumeration. A class with a
    field of a type that is not known here is refused now.
    """
    hints = get_type_hints(kind)
    names = tuple(f.name for f in fields(kind))
    builds = tuple((name, build) for name in names if (build := builder(hints[name])) is not None)

    def make(body: dict[str, Any]) -> Any:
        for name, build in builds:
            value = body.get(name)
            if value is not None:
                body[name] = build(value)
        try:
            return kind(**body)
        except TypeError:  # it holds more, or lacks what it must have
            return kind(**{name: body[name] for name in names if name in body})

    return make


def builder(hint: Any) -> Build | None:
    """What makes a value, other than None, of the type; None where the value is right as it is."""
    hint = getattr(hint, "__supertype__", hint)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        inner = [builder(arg) for arg in get_args(hint) if arg is not NoneType]
        if len(inner) != 1:
            raise TypeError(f"{hint}: only one type, or none, can be told apart")
        return inner[0]
    if origin is tuple:
        item, *rest = get_args(hint)
        if rest != [...]:
            raise TypeError(f"{hint}: only tuples of any length are read")
        return _tuple_of(builder(item))
    if origin is not None:
        if not issubclass(origin, Mapping) or any(builder(arg) is not None for arg in get_args(hint)):
            raise TypeError(f"{hint}: only maps of plain values are read")
        return None
    if isinstance(hint, type) and is_dataclass(hint):
        return constructor(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = {member.value: member for member in hint}
        return members.__getitem__
    if hint in (str, int, float, bool, bytes):
        return None
    raise TypeError(f"{hint}: not a type that a body can hold")


def _tuple_of(build: Build | None) -> Build:
    return tuple if build is None else lambda values: tuple(map(build, values))
