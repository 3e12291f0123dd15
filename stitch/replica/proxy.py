"""The versioned proxy: a request is admitted by the gate, sent to the engine, and answered with the versions that computed it.

An answer is a success only where its versions are known and keep the request's constraint. Whatever else ends it - an activation
that could not wait, an engine that went away, a label that nobody can place - is a 503 that says whether generation had begun; in a
stream that is under way, a last event that says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from stitch.core.admission import Bounds, resolve
from stitch.core.errors import InvalidRequest, StitchError, Unavailable, VersionGone, WeightVersionNotReady
from stitch.core.events import RolloutServed, RunVersion
from stitch.engines.port import Engine, EngineFailed, Json, RouteKind
from stitch.http import answers
from stitch.http import headers as names
from stitch.http.answers import Answer
from stitch.http.headers import find, raw, to_answer
from stitch.http.request import RequestSpec, merge, parse_body, parse_headers
from stitch.http.server import MAX_BODY, AnswerCut, BodyTooLarge, ClientGone, Receive, Scope, Send, read_body
from stitch.http.sse import SseEvent, SseParser, event
from stitch.http.upstream import Stage, Upstream, UpstreamError, UpstreamResponse
from stitch.log.views import new_event_id
from stitch.replica.agent import Agent
from stitch.replica.audit import Audit
from stitch.replica.config import ReplicaConfig
from stitch.replica.gate import Full, Ticket
from stitch.replica.sessions import Namespaces
from stitch.replica.versions import (
    Attribution,
    Untruthful,
    attribute,
    finished,
    of_label,
    output_tokens,
    prompt_tokens,
    splice,
    within,
)

log = logging.getLogger(__name__)

ABORT_SECONDS: Final = 2.0
"""How long an answer waits for an abort; an engine that takes longer is for the watchdog to judge."""
FAREWELL_SECONDS: Final = 1.0
"""For a client to take the last event of a stream that is given up, before its connection is cut."""
READ_SECONDS: Final = 10.0
"""For a read-only route: answered from memory."""
CLIENT_GONE: Final = 499
"""Counted in place of a status where the client left."""

_HTTP_OK: Final = 200
_SERVER_ERROR: Final = 500
_UNFINISHED: Final = (b'"finish_reason":null', b'"finish_reason": null')
"""In an event that ends nothing. Text inside JSON cannot contain it, since its quotes are escaped there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, understood."""

    spec: RequestSpec
    request_id: str
    kind: RouteKind
    path: str
    body: Json

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """An admitted request on its way through. `rid` is its id in the engine, never used by another request."""

    asked: Asked
    rid: str
    engine: Engine
    ticket: Ticket
    sent: bool = False
    """Whether the engine may know of it."""
    ended: bool = False
    """Whether the engine is done with it."""
    streaming: bool = False
    """Whether the headers of a stream are on their way to the client."""
    start: RunVersion | None = None
    """The version of the first token, once it is known."""
    response: UpstreamResponse | None = None


class Proxy:
    """The generation routes and the read-only ones of the engine's adapter."""

    def __init__(self, config: ReplicaConfig, agent: Agent, upstream: Upstream, audit: Audit) -> None:
        self.statuses: dict[int, int] = {}
        """How many generation requests were answered with each status."""
        self.untruthful = 0
        """Answers that were held back because their versions were unknown or not those asked for."""
        self._config, self._agent, self._upstream, self._audit = config, agent, upstream, audit
        self._namespaces = Namespaces(config.kv_scope)

    # --- from request to ticket --------------------------------------------------------------------------------------------

    async def generate(self, kind: RouteKind, scope: Scope, receive: Receive, send: Send) -> None:
        """One generation request, whatever becomes of it."""
        try:
            answer = await self._call(kind, scope, receive, send)
        except ClientGone:
            self.statuses[CLIENT_GONE] = self.statuses.get(CLIENT_GONE, 0) + 1
            return
        if answer is not None:
            await self._answer(answer, scope, receive, send)

    async def _call(self, kind: RouteKind, scope: Scope, receive: Receive, send: Send) -> Answer | None:
        """The answer; None where it was sent already, as a stream is."""
        asked = await self._read(kind, scope, receive)
        if isinstance(asked, Answer):
            return asked
        call = await self._admit(asked, receive)
        if isinstance(call, Answer):
            return call
        try:
            return await self._run(call, receive, send)
        finally:
            self._agent.gate.release(call.ticket)

    async def _read(self, kind: RouteKind, scope: Scope, receive: Receive) -> Asked | Answer:
        """The request, understood, or the refusal of it."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id: str | None = None
        try:
            given = parse_headers(headers)
            request_id = given.request_id or uuid.uuid4().hex
            body = _json_object(await read_body(headers, receive, MAX_BODY))
            spec = merge(given, parse_body(kind, body))
        except InvalidRequest as error:
            return answers.invalid_request(error, request_id=request_id)
        except BodyTooLarge:
            return answers.too_large(MAX_BODY)
        if spec.policy is not None and spec.policy != self._config.policy:
            other = InvalidRequest(f"policy: this replica serves {self._config.policy}, not {spec.policy}", field="policy")
            return answers.invalid_request(other, request_id=request_id)
        return Asked(spec=spec, request_id=request_id, kind=kind, path=scope["path"], body=body)

    async def _admit(self, asked: Asked, receive: Receive) -> Call | Answer:
        """Past the gate, or what the gate said. Raises ClientGone where the client left while it waited."""
        spec, gate = asked.spec, self._agent.gate
        if spec.channel is not None and spec.channel != self._config.channel:
            elsewhere = WeightVersionNotReady(f"this replica follows channel {self._config.channel}, not {spec.channel}")
            return self._refusal(elsewhere, asked)
        engine = self._agent.engine
        tells = engine is not None and engine.tells_versions(asked.kind, stream=asked.stream)
        admitting = asyncio.create_task(gate.admit(asked.request_id, spec.constraint, tells=tells, wait=spec.wait or 0.0))
        try:
            await _done_or_gone(admitting, receive)
            ticket = admitting.result()
        except StitchError as error:
            if isinstance(error, ClientGone):
                raise
            return self._refusal(error, asked)
        except asyncio.CancelledError:
            if admitting.done() and not admitting.cancelled() and admitting.exception() is None:
                gate.release(admitting.result())
            raise
        engine = self._agent.engine
        assert engine is not None  # nothing is admitted before an engine serves
        return Call(asked=asked, rid=f"{asked.request_id}-{uuid.uuid4().hex[:8]}", engine=engine, ticket=ticket)

    async def _answer(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
        if answer.header(names.REPLICA) is None:
            answer = answer.with_header(names.REPLICA, self._config.replica)
        await answer(scope, receive, send)

    def _refusal(self, error: StitchError, asked: Asked) -> Answer:
        """What the gate said, as an answer."""
        lineage = self._agent.reconciler.lineage
        match error:
            case WeightVersionNotReady():
                self._agent.reconciler.wake()  # the request may know of a version that did not get here
                bounds = resolve(lineage, asked.spec.constraint)
                serving = self._agent.gate.serving
                return answers.not_ready(
                    policy=self._config.policy,
                    required=bounds if isinstance(bounds, Bounds) else Bounds(),
                    serving=serving.ref if serving is not None else None,
                    tip=lineage.tip,
                    message=str(error),
                    request_id=asked.request_id,
                )
            case VersionGone():
                return answers.gone(str(error), policy=self._config.policy, request_id=asked.request_id)
            case Full():
                return answers.busy(str(error), request_id=asked.request_id)
            case Unavailable():
                return answers.unavailable(str(error), generation_started=False, request_id=asked.request_id)
            case _:
                return answers.of_error(error, request_id=asked.request_id)

    # --- supervision of one call -------------------------------------------------------------------------------------------

    async def _run(self, call: Call, receive: Receive, send: Send) -> Answer | None:
        """The exchange, until it is done, the client leaves, or an activation gives it up. An answer that is not sent yet is
        returned."""
        work = asyncio.create_task(self._exchange(call, send), name=f"request {call.asked.request_id}")
        gone = asyncio.create_task(_disconnected(receive))
        given_up = asyncio.create_task(call.ticket.given_up.wait())
        watchers = {work, gone, given_up}
        try:
            await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.wait(watchers)
            await self._end_in_engine(call)
        if not work.cancelled() and work.exception() is None:
            return work.result()
        if gone.done() and not gone.cancelled():
            raise ClientGone("before its answer was complete")
        error = None if work.cancelled() else work.exception()
        if error is not None and not isinstance(error, StitchError):
            raise error
        if isinstance(error, InvalidRequest) and not call.sent:
            return answers.invalid_request(error, request_id=call.asked.request_id)
        self.untruthful += isinstance(error, Untruthful)
        message = str(error) if error is not None else call.ticket.reason
        return await self._failed(call, message, send)

    async def _failed(self, call: Call, message: str, send: Send) -> Answer | None:
        """503, or the last event of a stream."""
        refusal = answers.unavailable(message, generation_started=call.sent, request_id=call.asked.request_id)
        if not call.streaming:
            return refusal
        log.warning("request %s: %s", call.asked.request_id, message)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):  # a client that does not read holds up no activation
                await send({"type": "http.response.body", "body": event(refusal.body), "more_body": True})
        raise AnswerCut(message)

    async def _end_in_engine(self, call: Call) -> None:
        if call.response is not None:
            call.response.close()
        if call.sent and not call.ended:
            try:
                async with asyncio.timeout(ABORT_SECONDS):
                    await call.engine.abort(call.rid)
            except (EngineFailed, TimeoutError) as error:
                log.warning("request %s could not be aborted: %r", call.asked.request_id, error)

    # --- the exchange ------------------------------------------------------------------------------------------------------

    async def _exchange(self, call: Call, send: Send) -> Answer | None:
        ticket = call.ticket
        namespace = self._namespaces.of(call.asked.spec.session, ticket.versions[0], era=ticket.era)
        prepared = call.engine.prepare(call.asked.kind, call.asked.body, request_id=call.rid, cache_namespace=namespace)
        call.sent = True
        try:
            response = await self._upstream.open(
                "POST", call.engine.url + call.asked.path, [(b"content-type", b"application/json")], json.dumps(prepared).encode()
            )
        except UpstreamError as error:
            call.sent = error.stage is not Stage.NOT_SENT
            raise
        call.response = response
        if response.status != _HTTP_OK:
            return await self._engine_refused(call, response)
        if (find(response.headers, b"content-type") or b"").startswith(b"text/event-stream"):
            return await self._stream(call, response, send)
        return await self._whole(call, response)

    async def _engine_refused(self, call: Call, response: UpstreamResponse) -> Answer:
        """What the engine says to a malformed request is the client's to read; its own trouble is ours."""
        body = await response.read()
        call.ended = True
        if response.status >= _SERVER_ERROR:
            raise Unavailable(f"the engine answered with status {response.status}")
        kept = [pair for pair in to_answer(response.headers) if pair[0] != b"content-length"]
        answer = Answer(status=response.status, body=body, headers=tuple(kept))
        return answer.with_header(names.REQUEST_ID, call.asked.request_id)

    async def _whole(self, call: Call, response: UpstreamResponse) -> Answer:
        answer = _engine_json(await response.read())
        call.ended = True
        versions = self._attribute(call, answer)
        splice(call.asked.kind, answer, versions)
        self._record(call, answer, versions)
        pairs = [(b"content-type", b"application/json"), *self._headers(call, versions.start)]
        return Answer(status=_HTTP_OK, body=json.dumps(answer, ensure_ascii=False).encode(), headers=tuple(pairs))

    def _attribute(self, call: Call, answer: Json) -> Attribution:
        if call.engine.aborted(call.asked.kind, answer):
            raise Unavailable(call.ticket.reason or "the engine aborted the request")
        ticket = call.ticket
        versions = attribute(call.engine, call.asked.kind, answer, tells=ticket.tells, lived=ticket.versions, bounds=ticket.bounds)
        if call.start is not None and versions.start != call.start:
            raise Untruthful(f"the engine said {call.start} at first, and {versions.start} in the end")
        return versions

    def _headers(self, call: Call, start: RunVersion) -> list[tuple[bytes, bytes]]:
        pairs = {
            names.POLICY: self._config.policy,
            names.RUN: start.run,
            names.VERSION_START: str(start.number),
            names.REPLICA: self._config.replica,
            names.REQUEST_ID: call.asked.request_id,
        }
        if call.asked.spec.constraint.max_lag is not None and call.ticket.tip is not None:
            pairs[names.TIP] = str(call.ticket.tip)
        return [(raw(name), value.encode("ascii")) for name, value in pairs.items()]

    def _record(self, call: Call, answer: Json, versions: Attribution) -> None:
        incarnation = self._agent.announcer.incarnation
        if incarnation is None:
            return
        self._audit.served(
            lambda: RolloutServed(
                request_id=call.asked.request_id,
                event_id=new_event_id(),
                policy=self._config.policy,
                run=versions.start.run,
                replica=self._config.replica,
                incarnation=incarnation,
                version_start=versions.start.number,
                version_end=versions.end.number,
                spans=versions.spans,
                prompt_tokens=prompt_tokens(call.asked.kind, answer),
                output_tokens=output_tokens(call.asked.kind, answer),
                started_ms=call.ticket.admitted_ms,
                ended_ms=time.time_ns() // 1_000_000,
                session=call.asked.spec.session,
            )
        )

    # --- streams -----------------------------------------------------------------------------------------------------------

    async def _stream(self, call: Call, response: UpstreamResponse, send: Send) -> Answer | None:
        """Passes events on as they come. The headers wait for the version of the first token, mostly the first event; from the
        event that ends the output on, each carries the versions, so the last one does."""
        held: list[bytes] = []
        versions: Attribution | None = None
        async for each in _events(response):
            data = each.data
            if data is None or each.done or (call.start is not None and versions is None and _goes_on(data)):
                held.append(each.raw)
            else:
                parsed = _engine_json(data)
                if "error" in parsed:
                    call.ended = True
                    return _refused_in_stream(parsed, call)
                if versions is None and finished(call.asked.kind, parsed):
                    versions = self._attribute(call, parsed)
                    call.start = versions.start
                    self._record(call, parsed, versions)
                elif call.start is None:
                    call.start = self._first_version(call, parsed)
                held.append(each.raw if versions is None else _with_versions(each, call.asked.kind, parsed, versions))
            if call.start is not None:
                await self._send_events(call, call.start, response, held, send)
                held = []
        call.ended = True
        if versions is None:
            raise UpstreamError("the engine's answer ended before its last event", stage=Stage.MIDWAY)
        await send({"type": "http.response.body", "body": b"".join(held)})
        self.statuses[_HTTP_OK] = self.statuses.get(_HTTP_OK, 0) + 1
        return None

    def _first_version(self, call: Call, parsed: Json) -> RunVersion | None:
        """The version of the first token, where an event tells it, or where only one can be."""
        ticket = call.ticket
        label = call.engine.start_label(call.asked.kind, parsed) if ticket.tells else None
        if label is not None:
            start = of_label(label, ticket.versions)
        elif len(ticket.versions) == 1:
            start = ticket.versions[0]
        else:
            return None
        if not within(ticket.bounds, start):
            raise Untruthful(f"{start} computed the first token, but {ticket.bounds} was asked for")
        return start

    async def _send_events(
        self, call: Call, start: RunVersion, response: UpstreamResponse, held: Sequence[bytes], send: Send
    ) -> None:
        if not call.streaming:
            kept = [pair for pair in to_answer(response.headers) if pair[0] != b"content-length"]
            headers = [*kept, *self._headers(call, start)]
            call.streaming = True
            await send({"type": "http.response.start", "status": _HTTP_OK, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(held), "more_body": True})

    # --- read-only routes --------------------------------------------------------------------------------------------------

    async def read_only(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a route that changes nothing."""
        engine = self._agent.engine
        if engine is None:
            answer = answers.unavailable("the engine is not started yet", generation_started=False)
            return await answer(scope, receive, send)
        query: bytes = scope["query_string"]
        target = scope["path"] + (f"?{query.decode('latin-1')}" if query else "")
        try:
            response = await self._upstream.open("GET", engine.url + target, first_byte_timeout=READ_SECONDS)
            body = await response.read()
        except UpstreamError as error:
            answer = answers.unavailable(str(error), generation_started=False)
            return await answer(scope, receive, send)
        kept = [pair for pair in to_answer(response.headers) if pair[0] != b"content-length"]
        return await Answer(status=response.status, body=body, headers=tuple(kept))(scope, receive, send)


async def _events(response: UpstreamResponse) -> AsyncIterator[SseEvent]:
    parser = SseParser()
    async for chunk in response.chunks():
        for each in parser.feed(chunk):
            yield each
    rest = parser.rest()
    if rest.strip():
        yield SseEvent(rest)


def _json_object(data: bytes) -> Json:
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest("body: not JSON", field="body") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body: not a JSON object", field="body")
    return value


def _engine_json(data: bytes) -> Json:
    """As above, of what the engine said."""
    try:
        return _json_object(data)
    except InvalidRequest:
        raise Unavailable("what the engine answered is no JSON object") from None


def _goes_on(data: bytes) -> bool:
    """Whether an event surely does not end the output, told without parsing it."""
    return any(mark in data for mark in _UNFINISHED)


def _with_versions(each: SseEvent, kind: RouteKind, parsed: Json, versions: Attribution) -> bytes:
    splice(kind, parsed, versions)
    return each.with_data(json.dumps(parsed, ensure_ascii=False).encode()).raw


def _refused_in_stream(parsed: Json, call: Call) -> Answer:
    """An engine that refuses a request after it promised a stream says so in the first event. Raises Unavailable for any other
    error that it tells in a stream."""
    error = parsed["error"]
    code = error.get("code") if isinstance(error, dict) else None
    if not call.streaming and isinstance(code, int) and _BAD_REQUEST <= code < _SERVER_ERROR:
        return answers.json_answer(code, parsed, headers={names.REQUEST_ID: call.asked.request_id})
    raise Unavailable(f"the engine failed: {str(error)[:200]}")


_BAD_REQUEST: Final = 400


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _done_or_gone(task: asyncio.Task[Any], receive: Receive) -> None:
    """Returns when the task is done. Raises ClientGone where the client left before. The task ends in any case."""
    await asyncio.sleep(0)
    if task.done():
        return
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task, gone})
    if task.cancelled():
        raise ClientGone("while it waited for admission")
