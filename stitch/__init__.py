"""Stitch: the versioned control plane for disaggregated reinforcement learning.

Every name of `__all__` is loaded when it is first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stitch.audit.replay import replay
    from stitch.core.admission import Constraint
    from stitch.core.errors import (
        CorruptObject,
        Fenced,
        InvalidRequest,
        LogDiverged,
        OutcomeUnknown,
        Rejected,
        StitchError,
        Unavailable,
        VersionConflict,
        VersionGone,
        WeightVersionNotReady,
    )
    from stitch.core.ids import VersionRef
    from stitch.log.opening import open_log
    from stitch.store.opening import open_store
    from stitch.trainer.author import Publication
    from stitch.trainer.publisher import Publisher
    from stitch.trainer.rollout_client import AsyncRolloutClient, RolloutClient

__all__ = [
    "AsyncRolloutClient",
    "Constraint",
    "CorruptObject",
    "Fenced",
    "InvalidRequest",
    "LogDiverged",
    "OutcomeUnknown",
    "Publication",
    "Publisher",
    "Rejected",
    "RolloutClient",
    "StitchError",
    "Unavailable",
    "VersionConflict",
    "VersionGone",
    "VersionRef",
    "WeightVersionNotReady",
    "open_log",
    "open_store",
    "replay",
]

_HOMES: Final = {
    "AsyncRolloutClient": "stitch.trainer.rollout_client",
    "Constraint": "stitch.core.admission",
    "Publication": "stitch.trainer.author",
    "Publisher": "stitch.trainer.publisher",
    "RolloutClient": "stitch.trainer.rollout_client",
    "VersionRef": "stitch.core.ids",
    "open_log": "stitch.log.opening",
    "open_store": "stitch.store.opening",
    "replay": "stitch.audit.replay",
}
"""Where a name lives; what is not listed is an error of `stitch.core.errors`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "stitch.core.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
