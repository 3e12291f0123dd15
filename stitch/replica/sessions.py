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

    def of(self, session: str | None, serving: RunVersion) -> str | None:
        """The namespace of a request admitted at `serving`: run and number, or None where all share one."""
        if self._scope is KvScope.NONE:
            return None
        began = serving
        if self._scope is KvScope.SESSION and session is not None:
            known = self._began.pop(session, None)
            # No session goes on in another run: what was cached there belongs to other numbers.
            began = known if known is not None and known.run == serving.run else serving
            self._began[session] = began
            if len(self._began) > self._limit:
                self._began.popitem(last=False)
        return f"{began.run}/{began.number}"
