"""The adapter for the reference engine: SGLang's, since the two speak alike, and what this engine does better."""

from __future__ import annotations

from typing import ClassVar

from stitch.engines.port import PauseMode, RouteKind
from stitch.engines.sglang import SglangEngine


class ReferenceEngineClient(SglangEngine):
    """See the port."""

    name: ClassVar[str] = "reference"

    @property
    def carry_mode(self) -> PauseMode | None:
        """In place: a token is recorded in the step that computed it."""
        return PauseMode.IN_PLACE

    def tells_versions(self, kind: RouteKind, *, stream: bool) -> bool:
        """All forms do: the last event of every stream carries the spans."""
        return True

    def _is_clean_refusal(self, message: str) -> bool:
        """Weights are read and checked before any is exchanged, so every refusal is clean."""
        return True
