"""The engine's HTTP side: the part of SGLang's contract that Stitch and its clients use; same paths, fields and statuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from stitch.core.errors import InvalidRequest
from stitch.engines.port import Json, PauseMode, RouteKind
from stitch.engines.reference import answers, fields
from stitch.engines.reference.engine import ReferenceEngine, UpdateRefused
from stitch.engines.reference.sequence import Sequence

VERSION: Final = version("stitch-rl")
HANGS: Final = frozenset({"load", "generate", "pause"})
DEATHS: Final = frozenset({"now", "during_load"})


def reference_app(engine: ReferenceEngine, *, misbehave_allowed: bool = False) -> Starlette:
    """The application for an engine whose loop runs elsewhere. `/misbehave` exists only where it is allowed."""
    api = _Api(engine)
    routes = [
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/model_info", api.model_info),
        Route("/server_info", api.server_info),
        Route("/v1/loads", api.loads),
        Route("/v1/models", api.models),
        Route("/generate", api.generate, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/pause_generation", api.pause, methods=["POST"]),
        Route("/continue_generation", api.resume, methods=["POST"]),
        Route("/update_weights_from_disk", api.update_weights, methods=["POST"]),
        Route("/update_weight_version", api.update_label, methods=["POST"]),
        Route("/abort_request", api.abort, methods=["POST"]),
    ]
    if misbehave_allowed:
        routes.append(Route("/misbehave", api.misbehave, methods=["POST"]))
    return Starlette(
        routes=routes,
        exception_handlers={fields.BadBody: _bad_body, InvalidRequest: _bad_value, HTTPException: _http_error},
    )


async def _bad_body(request: Request, error: Exception) -> Response:
    return JSONResponse(_error(str(error), "Bad Request"), 400)


async def _bad_value(request: Request, error: Exception) -> Response:
    """What a well-formed body asks for and cannot have; the OpenAI routes say it in their own form."""
    if request.url.path.startswith("/v1/"):
        return JSONResponse(_error(str(error), "BadRequestError"), 400)
    return JSONResponse({"error": {"message": str(error)}}, 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


def _error(message: str, kind: str) -> Json:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": 400}


class _Api:
    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine

    # --- what it says of itself --------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.paused is None else 503)

    async def model_info(self, request: Request) -> Response:
        path = str(self._engine.weights.path)
        return JSONResponse(
            {
                "model_path": path,
                "served_model_name": path,
                "tokenizer_path": path,
                "is_generation": True,
                "weight_version": self._engine.label,
                "paused": self._engine.paused is not None,
                "weights_digest": self._engine.weights.digest,
            }
        )

    async def server_info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "version": VERSION,
                "model_path": str(self._engine.weights.path),
                "weight_version": self._engine.label,
                "internal_states": [{"paused": self._engine.paused, "tokens": self._engine.tokens}],
            }
        )

    async def loads(self, request: Request) -> Response:
        running, waiting = self._engine.running, self._engine.waiting
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": 0.0}
        return JSONResponse({"version": VERSION, "loads": [load]})

    async def models(self, request: Request) -> Response:
        name = str(self._engine.weights.path)
        card = {"id": name, "object": "model", "created": 0, "owned_by": "stitch", "max_model_len": fields.MAX_CONTEXT}
        return JSONResponse({"object": "list", "data": [card]})

    # --- generation --------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        body = await fields.read_object(request)
        stream = fields.flag(body, "stream", False)
        return_logprob = fields.flag(body, "return_logprob", False)
        params = body.get("sampling_params")
        if params is not None and not isinstance(params, dict):
            raise fields.BadBody(
                "sampling_params: not an object; this engine takes one prompt per request", field="sampling_params"
            )
        try:
            sequence = fields.sequence(body, fields.generate_prompt(body), fields.sampling(params or {}))
            self._engine.submit(sequence)
        except fields.BadBody:
            raise
        except InvalidRequest as error:
            if not stream:
                raise
            # As SGLang has it: a value refused after the stream was promised arrives inside the stream.
            return _event_stream(_one({"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}))

        def render() -> Json:
            return answers.generate(sequence, self._engine, return_logprob=return_logprob)

        return await self._answer(request, sequence, stream, render, render, None)

    async def completions(self, request: Request) -> Response:
        body = await fields.read_object(request)
        prompt = fields.completion_prompt(body)
        logprobs = fields.whole(body, "logprobs", None) is not None
        max_tokens = fields.whole(body, "max_tokens", 16)
        return await self._openai(request, RouteKind.COMPLETIONS, body, prompt, max_tokens, logprobs=logprobs)

    async def chat(self, request: Request) -> Response:
        body = await fields.read_object(request)
        prompt = fields.chat_prompt(body)
        logprobs = fields.flag(body, "logprobs", False)
        max_tokens = fields.whole(body, "max_completion_tokens", fields.whole(body, "max_tokens", None))
        return await self._openai(request, RouteKind.CHAT, body, prompt, max_tokens, logprobs=logprobs)

    async def _openai(
        self, request: Request, kind: RouteKind, body: Json, prompt: list[int], max_tokens: int | None, *, logprobs: bool
    ) -> Response:
        stream = fields.flag(body, "stream", False)
        options = body.get("stream_options")
        sequence = fields.sequence(body, prompt, fields.openai_sampling(body, max_tokens))
        model = fields.text(body, "model", "default") or "default"
        view = answers.OpenAi(kind=kind, sequence=sequence, engine=self._engine, model=model, logprobs=logprobs)
        usage = view.usage_piece if isinstance(options, dict) and options.get("include_usage") is True else None
        self._engine.submit(sequence)
        return await self._answer(request, sequence, stream, view.whole, view.piece, usage)

    async def _answer(
        self,
        request: Request,
        sequence: Sequence,
        stream: bool,
        whole: Callable[[], Json],
        piece: Callable[[], Json],
        last: Callable[[], Json] | None,
    ) -> Response:
        if stream:
            return _event_stream(self._pieces(sequence, piece, last))
        gone = asyncio.create_task(_disconnected(request))
        done = asyncio.create_task(sequence.done.wait())
        try:
            await asyncio.wait((gone, done), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            done.cancel()
            if sequence.finish is None:
                self._engine.abort(sequence.rid)
        return JSONResponse(whole())

    async def _pieces(self, sequence: Sequence, piece: Callable[[], Json], last: Callable[[], Json] | None) -> AsyncIterator[bytes]:
        """One event per token, fewer where the reader is slower than the engine; the request dies with its reader."""
        try:
            while True:
                await sequence.changed.wait()
                sequence.changed.clear()
                finished = sequence.finish is not None
                yield _event(piece())
                if finished:
                    break
            if last is not None:
                yield _event(last())
            yield b"data: [DONE]\n\n"
        finally:
            if sequence.finish is None:
                self._engine.abort(sequence.rid)

    # --- control -----------------------------------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        mode = fields.text(await fields.read_object(request), "mode", PauseMode.ABORT)
        if mode not in frozenset(PauseMode):
            raise fields.BadBody("mode: Input should be 'abort', 'retract' or 'in_place'", field="mode")
        await self._engine.pause(PauseMode(mode))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await fields.read_object(request)
        self._engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights(self, request: Request) -> Response:
        body = await fields.read_object(request)
        path = fields.text(body, "model_path")
        label = fields.text(body, "weight_version")
        flush_cache = fields.flag(body, "flush_cache", True)
        abort_all = fields.flag(body, "abort_all_requests", False)
        if path is None:
            raise fields.BadBody("model_path: Field required", field="model_path")
        try:
            message = await self._engine.update(Path(path), label, flush_cache=flush_cache, abort_all=abort_all)
        except UpdateRefused as refusal:
            return JSONResponse({"success": False, "message": str(refusal), "num_paused_requests": 0}, 400)
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})

    async def update_label(self, request: Request) -> Response:
        body = await fields.read_object(request)
        label = fields.text(body, "new_version")
        if label is None:
            raise fields.BadBody("new_version: Field required", field="new_version")
        if fields.flag(body, "abort_all_requests", True):
            self._engine.abort(None)
        self._engine.set_label(label)
        return JSONResponse({"success": True, "message": f"Weight version updated to {label}", "new_version": label})

    async def abort(self, request: Request) -> Response:
        body = await fields.read_object(request)
        rid = fields.text(body, "rid", "")
        if fields.flag(body, "abort_all", False):
            self._engine.abort(None)
        elif rid:
            self._engine.abort(rid)
        return Response()

    async def misbehave(self, request: Request) -> Response:
        """Sets faults by name; null or false ends one. Answers with all of them."""
        body = await fields.read_object(request)
        return JSONResponse(asdict(self._engine.misbehave(**_faults(body))))


def _faults(body: Json) -> dict[str, Any]:
    readers: dict[str, Callable[[], object]] = {
        "slow_ms": lambda: fields.number(body, "slow_ms", 0.0, lambda v: v >= 0, "milliseconds, 0 or more"),
        "hang": lambda: _one_of(body, "hang", HANGS),
        "die": lambda: _one_of(body, "die", DEATHS),
        "refuse_update": lambda: fields.flag(body, "refuse_update", False),
        "half_update": lambda: fields.flag(body, "half_update", False),
        "wrong_label": lambda: fields.text(body, "wrong_label"),
    }
    unknown = sorted(body.keys() - readers.keys())
    if unknown:
        raise fields.BadBody(f"{unknown[0]}: not a fault; known: {', '.join(sorted(readers))}", field=unknown[0])
    return {name: readers[name]() for name in body}


def _one_of(body: Json, name: str, allowed: frozenset[str]) -> str | None:
    value = fields.text(body, name)
    if value is not None and value not in allowed:
        raise fields.BadBody(f"{name}: not one of {', '.join(sorted(allowed))}", field=name)
    return value


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone. The body was read, so all that can still come is the end."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _one(data: Json) -> AsyncIterator[bytes]:
    yield _event(data)
    yield b"data: [DONE]\n\n"


def _event_stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")
