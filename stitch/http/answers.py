"""Refusals and failures as HTTP answers, the same from a gateway and a replica.

Every body is `{"error": {"type", "message", "retryable", …}}`. An answer is an ASGI application, so a Starlette endpoint may return
it and a raw one may await it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Final

from stitch.core.admission import Bounds
from stitch.core.errors import InvalidRequest, Rejected, StitchError, Unavailable, VersionGone, WeightVersionNotReady
from stitch.core.events import RunVersion
from stitch.core.ids import PolicyId
from stitch.http import headers as names
from stitch.http.headers import raw

NOT_READY_RETRY_SECONDS: Final = 1.0
"""Default Retry-After of a 409: a version takes seconds to reach the fleet."""
BUSY_RETRY_SECONDS: Final = 1.0
"""Default Retry-After of a 429 and of a 503 before generation began."""

NOT_READY_TYPE: Final = "WeightVersionNotReady"
"""Existing trainers look for this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. Headers are raw pairs; Content-Length is added when it is sent."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def header(self, name: str) -> str | None:
        """The value of a header, by its name in any case."""
        value = names.find(self.headers, raw(name))
        return None if value is None else value.decode("latin-1")

    def with_header(self, name: str, value: str) -> Answer:
        """The same answer with one header more."""
        return replace(self, headers=(*self.headers, (raw(name), value.encode("latin-1"))))

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        length = (b"content-length", str(len(self.body)).encode("ascii"))
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, length]})
        await send({"type": "http.response.body", "body": self.body})


def json_answer(status: int, value: object, *, headers: Mapping[str, str] | None = None) -> Answer:
    """Any JSON value."""
    pairs = [(b"content-type", b"application/json")]
    pairs.extend((raw(name), text.encode("latin-1")) for name, text in (headers or {}).items())
    return Answer(status=status, body=json.dumps(value, separators=(",", ":")).encode(), headers=tuple(pairs))


def error_answer(
    status: int,
    kind: str,
    message: str,
    *,
    retryable: bool,
    request_id: str | None = None,
    retry_after: float | None = None,
    headers: Mapping[str, str] | None = None,
    flat: Mapping[str, object] | None = None,
    **details: object,
) -> Answer:
    """The form of them all. `details` go into `error`, `flat` beside it; None is kept, as null."""
    error: dict[str, object] = {"type": kind, "message": message, "retryable": retryable, **details}
    pairs = dict(headers or {})
    if request_id is not None:
        error["request_id"] = request_id
        pairs[names.REQUEST_ID] = request_id
    if retry_after is not None:
        # Whole seconds, as the header's definition wants; never 0, which invites a busy loop.
        pairs["Retry-After"] = str(max(1, math.ceil(retry_after)))
    return json_answer(status, {"error": error, **(flat or {})}, headers=pairs)


def invalid_request(error: InvalidRequest, *, request_id: str | None = None) -> Answer:
    """400: the message and `field` name what is malformed."""
    return error_answer(400, "InvalidRequest", str(error), retryable=False, request_id=request_id, field=error.field)


def unauthorized() -> Answer:
    """401: no token, or not the right one."""
    message = "send the token of this surface as `Authorization: Bearer TOKEN`"
    return error_answer(401, "Unauthorized", message, retryable=False, headers={"WWW-Authenticate": "Bearer"})


def forbidden(method: str, path: str) -> Answer:
    """403: a route that would by-pass admission."""
    message = f"{method} {path[:200]} is not forwarded: only routes that Stitch admits and versions reach the engine"
    return error_answer(403, "Forbidden", message, retryable=False)


def not_found(path: str) -> Answer:
    """404."""
    return error_answer(404, "NotFound", f"no such route: {path[:200]}", retryable=False)


def wrong_method(allowed: str) -> Answer:
    """405."""
    return error_answer(405, "MethodNotAllowed", f"use {allowed}", retryable=False, headers={"Allow": allowed})


def not_ready(
    *,
    policy: PolicyId | None,
    required: Bounds,
    serving: RunVersion | None,
    tip: RunVersion | None,
    message: str | None = None,
    retry_after: float = NOT_READY_RETRY_SECONDS,
    request_id: str | None = None,
) -> Answer:
    """409: no version that satisfies the constraint is served yet. `serving` is the newest that is, `tip` the newest known.

    The flat `type`, `target_version`, `applied` and `message` are what existing trainers read.
    """
    if message is None:
        shown = f"serving {serving}" if serving else "nothing is served yet"
        message = f"{required} is asked for; {shown}, and the newest known is {tip or 'none'}"
    exact = required.greatest is not None and required.greatest == required.least
    wanted: dict[str, object] = {
        "run": required.run,
        "min_version": None if exact else required.least,
        "exact_version": required.greatest if exact else None,
    }
    return error_answer(
        409,
        NOT_READY_TYPE,
        message,
        retryable=True,
        request_id=request_id,
        retry_after=retry_after,
        headers={names.TIP: str(tip)} if tip else None,
        flat={
            "type": NOT_READY_TYPE,
            "target_version": required.least,
            "applied": serving.number if serving else None,
            "message": message,
        },
        policy=policy,
        required=wanted,
        serving=str(serving) if serving else None,
        tip=str(tip) if tip else None,
    )


def gone(reason: str, *, policy: PolicyId | None, request_id: str | None = None) -> Answer:
    """410: no later record can make the constraint hold."""
    return error_answer(410, "VersionGone", reason, retryable=False, request_id=request_id, policy=policy, reason=reason)


def too_large(limit: int) -> Answer:
    """413. `limit` in bytes."""
    message = f"the body is larger than {limit} bytes"
    return error_answer(413, "InvalidRequest", message, retryable=False, field="body", headers={"Connection": "close"})


def busy(message: str, *, retry_after: float = BUSY_RETRY_SECONDS, request_id: str | None = None) -> Answer:
    """429: all that could answer is full, and so is the queue. Generation did not start."""
    return error_answer(429, "Busy", message, retryable=True, request_id=request_id, retry_after=retry_after)


def unavailable(
    message: str, *, generation_started: bool, request_id: str | None = None, retry_after: float = BUSY_RETRY_SECONDS
) -> Answer:
    """503: no replica, or it failed. `generation_started` False promises that no token was computed, so it may go elsewhere."""
    return error_answer(
        503,
        "Unavailable",
        message,
        retryable=True,
        request_id=request_id,
        retry_after=retry_after,
        headers={names.GENERATION_STARTED: str(generation_started).lower()},
        generation_started=generation_started,
    )


def timed_out(message: str, *, generation_started: bool, request_id: str | None = None) -> Answer:
    """504: the answer did not begin in time."""
    return error_answer(
        504,
        "TimedOut",
        message,
        retryable=True,
        request_id=request_id,
        headers={names.GENERATION_STARTED: str(generation_started).lower()},
        generation_started=generation_started,
    )


def failed(*, request_id: str | None = None) -> Answer:
    """500: a fault of our own, whose details stay in our log."""
    return error_answer(
        500, "InternalError", "an internal error; the log of this server tells more", retryable=False, request_id=request_id
    )


def of_error(error: StitchError, *, request_id: str | None = None) -> Answer:
    """The answer to any error of ours that ends a request before generation began."""
    match error:
        case InvalidRequest():
            return invalid_request(error, request_id=request_id)
        case WeightVersionNotReady():
            wait = NOT_READY_RETRY_SECONDS if error.retry_after is None else error.retry_after
            return error_answer(409, NOT_READY_TYPE, str(error), retryable=True, request_id=request_id, retry_after=wait)
        case VersionGone():
            return gone(str(error), policy=None, request_id=request_id)
        case Unavailable():
            return unavailable(str(error), generation_started=False, request_id=request_id)
        case Rejected():
            return error_answer(409, type(error).__name__, str(error), retryable=False, request_id=request_id)
        case _:
            return failed(request_id=request_id)
