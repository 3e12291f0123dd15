"""A whole view at one prefix of the log, and the digest by which two readers compare theirs (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import rfc8785
from blake3 import blake3

from stitch.core.fleet import Fleet
from stitch.core.ids import Digest
from stitch.core.lineage import Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Every fold at one prefix of the streams."""

    lineage: Lineage = field(default_factory=Lineage)
    fleet: Fleet = field(default_factory=Fleet)

    @property
    def digest(self) -> Digest:
        """blake3 of the canonical JSON of both folds: equal prefixes give equal digests, in every release."""
        return state_digest([self.lineage, self.fleet])


def state_digest(state: object) -> Digest:
    """blake3 of the RFC 8785 JSON of a fold's state. Map keys that are no text become their text form."""
    return Digest(blake3(rfc8785.dumps(plain(state))).hexdigest())


def plain(value: object) -> Any:
    """A fold's state as JSON values: dataclasses and maps become objects, tuples lists. What a dataclass does not compare by is no
    part of its state."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.compare}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
