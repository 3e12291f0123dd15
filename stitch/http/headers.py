"""The names of the headers that Stitch reads and writes, and the helpers that every HTTP surface of it needs.

ASGI and the upstream client both speak of headers as pairs of bytes with lower-case names; so does everything here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from stitch.core.errors import InvalidRequest

RawHeaders = Sequence[tuple[bytes, bytes]]
"""(lower-case name, value) pairs, as ASGI gives them."""

# What a request may carry. A gateway forwards them, with the run that it resolved.
POLICY: Final = "X-Stitch-Policy"
"""Of the answer too."""
CHANNEL: Final = "X-Stitch-Channel"
RUN: Final = "X-Stitch-Run"
"""Of the answer too."""
MIN_VERSION: Final = "X-Stitch-Min-Version"
EXACT_VERSION: Final = "X-Stitch-Exact-Version"
MAX_LAG: Final = "X-Stitch-Max-Lag"
WAIT: Final = "X-Stitch-Wait"
SESSION: Final = "X-Stitch-Session"
SESSION_ALIASES: Final = ("X-Session-ID", "X-SMG-Routing-Key")
"""Names by which existing routers know a session; the first that is given counts, X-Stitch-Session before both."""
REQUEST_ID: Final = "X-Stitch-Request-Id"
"""Of the answer too."""

# What an answer carries.
VERSION_START: Final = "X-Stitch-Version-Start"
"""The number of the version that computed the first token."""
REPLICA: Final = "X-Stitch-Replica"
TIP: Final = "X-Stitch-Tip"
"""The newest version known when a bound on staleness was judged, as `run/weight_v000007`."""
GENERATION_STARTED: Final = "X-Stitch-Generation-Started"
"""`true` or `false` on every 503 and 504: whether the engine may have begun. Only `false` is safe to send elsewhere."""

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REQUEST_DROPPED: Final = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"accept-encoding"}
"""The client upstream states host and length itself; answers are to come as they are, since a replica splices into them."""
_ANSWER_DROPPED: Final = _HOP_BY_HOP | {b"date", b"server"}
"""The server states its own date."""

_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def raw(name: str) -> bytes:
    """The name as it stands in raw headers."""
    return name.lower().encode("ascii")


def find(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first value under the (lower-case) name."""
    for each, value in headers:
        if each == name:
            return value
    return None


def to_forward(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """A request's headers without those of one hop alone. Raises InvalidRequest where a value holds control characters."""
    if _CONTROL.search(b"\t".join([value for _, value in headers])):
        raise InvalidRequest("headers: a value holds control characters", field="headers")
    return _without(headers, _REQUEST_DROPPED)


def to_answer(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """An upstream answer's headers without those that concern one hop alone. Content-Length stays."""
    return _without(headers, _ANSWER_DROPPED)


def _without(headers: RawHeaders, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name not in dropped]
    named = [value for name, value in headers if name == b"connection"]
    if named and (extra := {token.strip().lower() for value in named for token in value.split(b",")} - {b"keep-alive", b"close"}):
        return [(name, value) for name, value in kept if name not in extra]
    return kept
