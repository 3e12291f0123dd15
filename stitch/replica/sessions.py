"""Which cached prefixes a request may share (I10): the namespace that it gets in the engine's KV cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from stitch.core.events import RunVersion
from stitch.replica.config import KvScope

MAX_SESSIONS: Final = 65_536
"""Sessions that are remembered; about 20 MB. One that is forgotten begins anew, at a newer version: that is safe."""


class Namespaces:
    """Remembers at which version each session began."""

    def __init__(self, scope: KvScope, *, limit: int = MAX_SESSIONS) -> None:
        self._scope, self._limit = scope, limit
        self._began: OrderedDict[str, RunVersion] = OrderedDict()
        self._era = 0

    def of(self, session: str | None, serving: RunVersion, *, era: int) -> str | None:
        """The namespace of a request admitted at `serving`, or None where all share one. `era` is the gate's at its admission.

        After a step back nothing that was cached before is found again: a request that lived across it may have put prefixes of the
        older version into the namespace of the newer one.
        """
        if self._scope is KvScope.NONE:
            return None
        if era > self._era:
            self._era = era
            self._began.clear()
        began = serving
        if self._scope is KvScope.SESSION and session is not None and era == self._era:
            began = self._began.pop(session, serving)
            self._began[session] = began
            if len(self._began) > self._limit:
                self._began.popitem(last=False)
        return f"{began.run}/{began.number}" + (f"/{era}" if era else "")
