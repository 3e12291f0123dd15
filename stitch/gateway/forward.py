"""The hot path: a generation request to a replica and its answer back, bytes as they are.

Another replica is tried only where one said, or proved, that it did not begin: 409, 429, 503 with `X-Stitch-Generation-Started:
false`, a connection refused. Everything else goes to the client, with the request id.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from dataclasses import dataclass, replace
from typing import Final

from stitch.core.admission import Constraint
from stitch.core.errors import InvalidRequest
from stitch.engines.port import RouteKind
from stitch.gateway.admission import Admission, Pending, Placed, Refusal
from stitch.gateway.metrics import GatewayMetrics
from stitch.http import answers
from stitch.http import headers as names
from stitch.http.answers import Answer
from stitch.http.headers import raw, to_answer, to_forward
from stitch.http.request import READ_HEADERS, RequestSpec, merge, parse_body, parse_headers
from stitch.http.server import AnswerCut, BodyTooLarge, ClientGone, Receive, Scope, Send, read_body, until_disconnect
from stitch.http.sse import event
from stitch.http.upstream import Stage, Upstream, UpstreamError, UpstreamResponse

logger = logging.getLogger(__name__)

ROUTES: Final = {
    "/generate": RouteKind.GENERATE,
    "/v1/completions": RouteKind.COMPLETIONS,
    "/v1/chat/completions": RouteKind.CHAT,
}
MAX_REFUSAL: Final = 64 * 1024
"""Bytes of a refusal that are read so that its connection can be used again; a longer one is closed."""

_POLICY: Final = raw(names.POLICY)
_REQUEST_ID: Final = raw(names.REQUEST_ID)
_REPLICA: Final = raw(names.REPLICA)
_TIP: Final = raw(names.TIP)
_STARTED: Final = raw(names.GENERATION_STARTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What all attempts of one request share. `target` is path and query."""

    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    began: float


class Forwarder:
    """Answers generation requests."""

    def __init__(self, admission: Admission, upstream: Upstream, metrics: GatewayMetrics) -> None:
        self.admission, self.upstream, self.metrics = admission, upstream, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request of one of ROUTES, as ASGI."""
        counted = _CountedSend(send)
        try:
            await self._answer(scope, receive, counted)
        except ClientGone:
            self.metrics.gone.add()
        finally:
            if counted.status:
                self.metrics.answers.add(scope["path"], str(counted.status))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = await self._read(scope, receive)
        if isinstance(read, Answer):
            await read(scope, receive, send)
            return
        request, pending = read
        async with until_disconnect(receive):
            answer = await self._until_answered(request, pending, send)
            if answer is not None:
                await answer(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> tuple[_Request, Pending] | Answer:
        """The request, understood, or the refusal of it."""
        route: str = scope["path"]
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id: str | None = None
        try:
            asked = parse_headers(headers)
            request_id = asked.request_id or uuid.uuid4().hex
            body = await read_body(headers, receive, self.admission.config.max_body)
            spec = _with_body(asked, ROUTES[route], body)
            pending = self.admission.pending(spec, request_id)
            forwarded = [pair for pair in to_forward(headers) if pair[0] not in READ_HEADERS]
        except InvalidRequest as error:
            return answers.invalid_request(error, request_id=request_id)
        except BodyTooLarge:
            return answers.too_large(self.admission.config.max_body)
        if isinstance(pending, Answer):
            return pending
        query: bytes = scope["query_string"]
        target = f"{route}?{query.decode('latin-1')}" if query else route
        return _Request(target=target, headers=forwarded, body=body, began=time.monotonic()), pending

    async def _until_answered(self, request: _Request, pending: Pending, send: Send) -> Answer | None:
        """Tries replicas until one answers, which is then on its way to the client (None), or none is left (the refusal)."""
        while True:
            placed = await self.admission.place(pending)
            if isinstance(placed, Answer):
                return placed
            self.metrics.placing.observe(time.monotonic() - request.began)
            try:
                outcome = await self._attempt(request, pending, placed, send)
            finally:
                self.admission.give_back(placed)
            if not isinstance(outcome, Refusal):
                return outcome
            self.metrics.retries.add(outcome.value)
            self.admission.refused(pending, placed, outcome)

    async def _attempt(self, request: _Request, pending: Pending, placed: Placed, send: Send) -> Refusal | Answer | None:
        try:
            response = await self.upstream.open(
                "POST",
                placed.row.url + request.target,
                [*request.headers, *_asked(pending, placed)],
                request.body,
                first_byte_timeout=self.admission.config.answer_timeout,
            )
        except UpstreamError as error:
            if error.stage is Stage.NOT_SENT:
                return Refusal.UNREACHABLE
            logger.warning("request %s: %s", pending.request_id, error)
            refuse = answers.timed_out if error.timed_out else answers.unavailable
            message = f"replica {placed.row.replica} did not answer; whether generation began is unknown"
            return refuse(message, generation_started=True, request_id=pending.request_id)
        try:
            refusal = _refusal(response)
            if refusal is not None:
                await _drain(response)
                return refusal
            self.metrics.first_byte.observe(time.monotonic() - request.began)
            await self._pass_on(response, self._headers(response, pending, placed), pending, send)
        finally:
            response.close()
        return None

    async def _pass_on(self, response: UpstreamResponse, headers: list[tuple[bytes, bytes]], pending: Pending, send: Send) -> None:
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        length = names.find(headers, b"content-length")
        left = int(length) if length is not None and length.isdigit() else -1
        try:
            async for chunk in response.chunks():
                left -= len(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": left != 0})
                if left == 0:
                    return
        except UpstreamError as error:
            self.metrics.cut.add()
            logger.warning("request %s: %s", pending.request_id, error)
            if (names.find(headers, b"content-type") or b"").startswith(b"text/event-stream"):
                await send({"type": "http.response.body", "body": _broken_off(pending), "more_body": True})
            raise AnswerCut(str(error)) from error
        await send({"type": "http.response.body", "body": b""})

    def _headers(self, response: UpstreamResponse, pending: Pending, placed: Placed) -> list[tuple[bytes, bytes]]:
        """The answer's own headers, and those of ours that the replica left out."""
        headers = to_answer(response.headers)
        given = {name for name, _ in headers}
        ours = [
            (_POLICY, pending.policy.encode()),
            (_REPLICA, placed.row.replica.encode()),
            (_REQUEST_ID, pending.request_id.encode()),
        ]
        if pending.constraint.max_lag is not None and (tip := self.admission.lineage(pending.policy).tip) is not None:
            ours.append((_TIP, str(tip).encode()))
        if response.status in (503, 504):
            ours.append((_STARTED, b"true"))  # it did not say, so nobody may assume that it did not begin
        headers.extend(pair for pair in ours if pair[0] not in given)
        return headers


class _CountedSend:
    """Remembers the status that was sent."""

    __slots__ = ("_send", "status")

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 0

    async def __call__(self, message: Scope) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _with_body(asked: RequestSpec, kind: RouteKind, body: bytes) -> RequestSpec:
    """The request's own word, from headers and body. The body is parsed only where it may say something that headers do not."""
    named = kind is RouteKind.GENERATE or asked.policy is not None
    bound = replace(asked.constraint, max_lag=None) != _UNBOUND  # only headers can speak of lag
    if named and (bound or b"weight_version" not in body):
        return asked
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("body: not JSON", field="body") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest("body: not a JSON object", field="body")
    return merge(asked, parse_body(kind, parsed))


_UNBOUND: Final = Constraint()


def _asked(pending: Pending, placed: Placed) -> list[tuple[bytes, bytes]]:
    """The request's own bounds for the replica to hold, with the run that a number was understood in."""
    spec, constraint = pending.spec, pending.constraint
    pairs = (
        (names.POLICY, pending.policy),
        (names.CHANNEL, spec.channel),
        (names.RUN, placed.bounds.run),
        (names.MIN_VERSION, constraint.min_version),
        (names.EXACT_VERSION, constraint.exact_version),
        (names.MAX_LAG, constraint.max_lag),
        (names.SESSION, spec.session),
        (names.REQUEST_ID, pending.request_id),
    )
    return [(raw(name), str(value).encode("ascii")) for name, value in pairs if value is not None]


def _refusal(response: UpstreamResponse) -> Refusal | None:
    """Whether the replica says that it did not begin."""
    if response.status == 409:
        return Refusal.NOT_READY
    if response.status == 429:
        return Refusal.BUSY
    if response.status == 503 and response.header(names.GENERATION_STARTED) == "false":
        return Refusal.UNAVAILABLE
    return None


async def _drain(response: UpstreamResponse) -> None:
    """Reads a refusal to its end, which keeps its connection; how that goes matters to nobody."""
    try:
        await response.read(MAX_REFUSAL)
    except UpstreamError:
        response.close()


def _broken_off(pending: Pending) -> bytes:
    """A last event that tells a streaming client why the stream ends; the form is the one that OpenAI's clients raise on."""
    error = {
        "type": "Unavailable",
        "message": "the replica went away while it answered",
        "retryable": True,
        "generation_started": True,
        "request_id": pending.request_id,
    }
    return b"\n\n" + event(json.dumps({"error": error}).encode())
