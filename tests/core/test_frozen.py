"""Values that are made quickly are those that their classes make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from stitch.core.events import RunVersion
from stitch.core.frozen import changer, maker
from stitch.core.ids import RunId, VersionNumber
from stitch.core.lineage import Channel, Lineage, PolicyLineage
from tests.core.test_replay import example
from tests.support.examples import examples

pytestmark = pytest.mark.unit


def values() -> list[Any]:
    lineage = example().lineage
    policy = lineage.policies["p"]
    return [*examples().values(), lineage, policy, *policy.versions.values(), *policy.channels.values()]


@pytest.mark.parametrize("value", values(), ids=lambda value: type(value).__name__)
def test_a_made_value_is_the_classs_own(value: Any) -> None:
    given = {each.name: getattr(value, each.name) for each in fields(value)}
    by_keyword, in_order = maker(type(value))(**given), maker(type(value))(*given.values())
    assert by_keyword == in_order == value
    assert type(by_keyword) is type(value)
    assert repr(by_keyword) == repr(value)
    with pytest.raises(FrozenInstanceError):
        setattr(by_keyword, fields(value)[0].name, None)


def test_it_takes_the_classs_defaults() -> None:
    make = maker(PolicyLineage)
    assert make(policy="p") == PolicyLineage(policy="p")
    assert maker(Lineage)() == Lineage()
    with pytest.raises(TypeError, match="policy"):
        make()
    with pytest.raises(TypeError, match="colour"):
        make(policy="p", colour="red")  # type: ignore[call-arg]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    kind: str
    """Named as something that the making itself needs."""
    books: list[str] = field(default_factory=list)


def test_a_default_that_is_made_is_made_anew() -> None:
    make = maker(Shelf)
    make(kind="oak").books.append("a")
    assert make(kind="oak") == Shelf(kind="oak")


@pytest.mark.parametrize("value", values(), ids=lambda value: type(value).__name__)
def test_a_change_is_that_of_dataclasses(value: Any) -> None:
    change = changer(type(value))
    assert change(value) == value
    for each in fields(value):
        assert change(value, **{each.name: None}) == replace(value, **{each.name: None})


def test_a_change_names_a_field() -> None:
    with pytest.raises(TypeError, match="colour"):
        changer(Channel)(next(v for v in values() if isinstance(v, Channel)), colour="red")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("negative")


@dataclass(frozen=True, kw_only=True)
class WithoutSlots:
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    number: int
    double: int = field(init=False, default=0)


@pytest.mark.parametrize("kind", [Checked, WithoutSlots, Derived, int])
def test_a_class_that_does_more_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError):
        maker(kind)
    with pytest.raises(TypeError):
        changer(kind)


def test_a_made_value_is_a_key_as_any_other() -> None:
    ref = RunVersion(run=RunId("r"), number=VersionNumber(1))
    assert {ref: 1}[maker(RunVersion)(run=RunId("r"), number=VersionNumber(1))] == 1
