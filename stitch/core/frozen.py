"""Frozen values, made quickly.

A frozen dataclass sets each of its fields through `object.__setattr__`, which looks the field up by its name. Whoever reads a long
history makes little else than such values, so what is made for every record is made by functions that put each field into its slot
directly: the same value, in a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from types import MemberDescriptorType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_UNSET: Final = object()


def maker(kind: Callable[P, T]) -> Callable[P, T]:
    """What makes values of a frozen, slotted dataclass, with the class's own defaults. It takes fields by keyword, or in their
    order. Raises TypeError for a class that does more than to keep what it is given."""
    names, parameters, body = _names(kind), [], ["_value = _new(_kind)"]
    for field in _fields(kind):
        name, default = field.name, f"_default_{field.name}"
        if field.default is not MISSING:
            names[default] = field.default
            parameters.append(f"{name}={default}")
        elif field.default_factory is not MISSING:
            names[default] = field.default_factory
            parameters.append(f"{name}=_unset")
            body.append(f"if {name} is _unset: {name} = {default}()")
        else:
            parameters.append(name)
        body.append(f"_set_{name}(_value, {name})")
    made: Callable[P, T] = _function(parameters, body, names)
    return made


def changer(kind: Callable[..., T]) -> Callable[..., T]:
    """What copies such a value but for some fields, as `dataclasses.replace` does: `change(value, name=new)`."""
    names, parameters, body = _names(kind), ["_old", "/", "*"], ["_value = _new(_kind)"]
    for field in _fields(kind):
        parameters.append(f"{field.name}=_unset")
        body.append(f"_set_{field.name}(_value, _old.{field.name} if {field.name} is _unset else {field.name})")
    changed: Callable[..., T] = _function(parameters, body, names)
    return changed


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    """The class's fields, each of which is given and has a slot."""
    if not is_dataclass(kind) or hasattr(kind, "__post_init__"):
        raise TypeError(f"{kind}: not a dataclass that keeps what it is given")
    for field in fields(kind):
        if not field.init or not isinstance(getattr(kind, field.name, None), MemberDescriptorType):
            raise TypeError(f"{kind}: {field.name} is not given, or has no slot")
    return fields(kind)


def _names(kind: Any) -> dict[str, Any]:
    """What a function's source may name. A field's own name begins with no underscore."""
    setters = {f"_set_{field.name}": getattr(kind, field.name).__set__ for field in _fields(kind)}
    return {"_new": object.__new__, "_kind": kind, "_unset": _UNSET, **setters}


def _function(parameters: list[str], body: list[str], names: dict[str, Any]) -> Any:
    lines = [f"def _function({', '.join(parameters)}):", *body, "return _value"]
    exec("\n    ".join(lines), names)  # noqa: S102 # made of our own fields' names, as dataclasses makes its methods
    return names["_function"]
