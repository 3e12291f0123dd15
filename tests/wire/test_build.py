"""Constructors of events by their type hints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import pytest

from stitch.wire.build import constructor

pytestmark = pytest.mark.unit

Name = NewType("Name", str)


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    name: Name
    count: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    colour: Colour
    inner: Inner | None
    items: tuple[Inner, ...] = ()
    numbers: tuple[int, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def test_nested_values_are_made_and_plain_ones_kept() -> None:
    body = {"colour": "red", "inner": {"name": "a", "count": 1}, "items": [{"name": "b"}], "numbers": [1, 2], "labels": {"k": "v"}}
    assert constructor(Outer)(body) == Outer(
        colour=Colour.RED,
        inner=Inner(name=Name("a"), count=1),
        items=(Inner(name=Name("b")),),
        numbers=(1, 2),
        labels={"k": "v"},
    )


def test_what_is_missing_takes_its_default_and_what_is_unknown_is_left_out() -> None:
    made = constructor(Outer)({"colour": "red", "inner": None, "of a later release": 1})
    assert made == Outer(colour=Colour.RED, inner=None)
    assert isinstance(made.colour, Colour)


def test_a_body_that_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match="inner"):
        constructor(Outer)({"colour": "red"})
    with pytest.raises(KeyError):
        constructor(Outer)({"colour": "blue", "inner": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    value: int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    value: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deep:
    value: Mapping[str, Inner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Any_:
    value: object


@pytest.mark.parametrize("kind", [Odd, Pair, Deep, Any_])
def test_a_class_that_cannot_be_told_from_a_body_is_refused_before_any_is_read(kind: type) -> None:
    with pytest.raises(TypeError):
        constructor(kind)
