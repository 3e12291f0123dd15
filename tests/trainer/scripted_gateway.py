"""A gateway that answers by script, over real HTTP: what a client meets, one answer after another."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from stitch.http import headers as names
from stitch.http.answers import Answer, json_answer
from stitch.http.headers import RawHeaders, find, raw
from stitch.http.server import AnswerCut, ClientGone, Receive, Scope, Send, read_body, until_disconnect
from stitch.http.sse import event


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client sent."""

    path: str
    headers: RawHeaders
    body: dict[str, Any]

    def header(self, name: str) -> str | None:
        value = find(self.headers, raw(name))
        return None if value is None else value.decode()


Turn = Answer | Callable[[Request, Receive, Send], Awaitable[None]]


@dataclass(slots=True)
class ScriptedGateway:
    """Each request takes the next turn; the last one repeats."""

    turns: deque[Turn]
    requests: list[Request] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a client left before its answer was complete."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(path=scope["path"], headers=scope["headers"], body=json.loads(await read_body(scope["headers"], receive)))
        self.requests.append(request)
        turn = self.turns.popleft() if len(self.turns) > 1 else self.turns[0]
        if isinstance(turn, Answer):
            await turn(scope, receive, send)
            return
        try:
            async with until_disconnect(receive):
                await turn(request, receive, send)
        except ClientGone:
            self.gone.set()


ANSWERED = {names.POLICY: "p", names.RUN: "r1", names.REPLICA: "replica-0", names.VERSION_START: "3"}


def body(text: str = "out", start: int = 3, end: int = 4) -> dict[str, Any]:
    return {
        "text": text,
        "output_ids": [1, 2, 3],
        "meta_info": {
            "weight_version_start": start,
            "weight_version_end": end,
            "weight_versions": [{"version": str(start), "start": 0, "end": 2}, {"version": str(end), "start": 2, "end": 3}],
        },
    }


def good(text: str = "out", *, run: str = "r1") -> Answer:
    return json_answer(200, body(text), headers={**ANSWERED, names.RUN: run, names.REQUEST_ID: "the-request"})


async def hang(request: Request, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


def stream(*pieces: str, end: str = "whole", hold: asyncio.Event | None = None) -> Turn:
    """Cumulative text by piece. `end`: whole, cut (the connection), error (an event), or hang after the pieces."""

    async def turn(request: Request, receive: Receive, send: Send) -> None:
        pairs = [(raw(name), value.encode()) for name, value in ANSWERED.items()]
        await send({"type": "http.response.start", "status": 200, "headers": [*pairs, (b"content-type", b"text/event-stream")]})
        text = ""
        for index, piece in enumerate(pieces):
            text += piece
            last = index == len(pieces) - 1 and end == "whole"
            data = body(text) if last else {"text": text, "meta_info": {}}
            await send({"type": "http.response.body", "body": event(json.dumps(data).encode()), "more_body": True})
            if hold is not None:
                await hold.wait()
        if end == "cut":
            raise AnswerCut
        if end == "hang":
            await asyncio.Event().wait()
        if end == "error":
            told = {
                "error": {"type": "Unavailable", "message": "the engine went away", "retryable": True, "generation_started": True}
            }
            await send({"type": "http.response.body", "body": event(json.dumps(told).encode()), "more_body": True})
        await send({"type": "http.response.body", "body": event(b"[DONE]")})

    return turn
