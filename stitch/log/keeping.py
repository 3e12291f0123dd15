"""What every implementation keeps, for how long, and how large a record may be."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.log.port import Draft, Stream

DAY_MS: Final = 24 * 60 * 60 * 1000

RETENTION_MS: Final[Mapping[Stream, int]] = MappingProxyType({Stream.ACTIVATIONS: 7 * DAY_MS, Stream.ROLLOUTS: 30 * DAY_MS})
"""Streams not named here lose nothing by age. A week of activations outlives every lease and covers an inquiry into an
incident; a month of rollouts covers most training runs."""

COMPACTED: Final = frozenset({Stream.POINTERS})

MAX_RECORD_BYTES: Final = 1_000_000
"""Key, value and headers together. Kafka's defaults (1 MiB, framing included) take it, so every implementation does."""

APPEND_TIMEOUT_S: Final = 30.0
"""For an append without a time-out of its own: longer than the election of a new leader takes."""

READ_TIMEOUT_S: Final = 15.0
"""For a question to the log (bounds, an offset, the newest record)."""


def check_draft(draft: Draft) -> None:
    """InvalidRequest where the record is too large, so that what one implementation takes, all take."""
    size = len(draft.key.encode()) + len(draft.value)
    size += sum(len(name.encode()) + len(value) for name, value in draft.headers)
    if size > MAX_RECORD_BYTES:
        raise InvalidRequest(f"record: {size} bytes; a log takes {MAX_RECORD_BYTES}", field="record")
