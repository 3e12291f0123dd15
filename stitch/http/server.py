"""Serving an ASGI application, and what a handler needs of a request: its body, bounded, and word that the client left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final

import uvicorn

from stitch.core.errors import StitchError
from stitch.http.headers import RawHeaders, find

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY: Final = 64 * 1024 * 1024
"""Default bound on a request's body, in bytes: a million tokens as JSON take less than 8 MB."""
GRACE_SECONDS: Final = 5
"""Whole seconds that open answers get to end when a server stops."""
KEEP_ALIVE_SECONDS: Final = 75
"""How long an idle connection stays. Longer than any client of ours keeps one, so that none is closed as it is used."""
BACKLOG: Final = 2048


class BodyTooLarge(StitchError):
    """The request's body is larger than this surface takes."""


class ClientGone(StitchError):
    """The client closed its connection; nobody waits for an answer."""


class AnswerCut(StitchError):
    """Ends an answer whose headers are sent by closing the connection, so that nobody takes it for a whole one."""


@contextlib.asynccontextmanager
async def serve(app: Asgi, host: str = "127.0.0.1", port: int = 0, *, grace: int = GRACE_SECONDS) -> AsyncIterator[str]:
    """Serves `app` while the block runs; gives the base URL, with the port that was taken (0: any free one).

    When the block ends, no new connection is taken, open answers get `grace` seconds, and what is left is cancelled. Signals are
    the caller's. Raises OSError where the address is taken; the block is cancelled should the server itself fail.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with _listener(family, host, port) as listener:
        shown = f"[{host}]" if family is socket.AF_INET6 else host
        url = f"http://{shown}:{listener.getsockname()[1]}"
        server = _Server(_config(app, grace))
        owner = asyncio.current_task()
        serving = asyncio.create_task(server.run_on(listener), name=f"http {url}")

        def ended(_: object) -> None:
            if not server.should_exit and owner is not None:
                server.failed = True
                owner.cancel()

        serving.add_done_callback(ended)
        try:
            yield url
        finally:
            if server.failed and owner is not None:
                owner.uncancel()
            server.should_exit = True
            await serving


def _listener(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    # The protocol is named, as socket.create_server does not: only then asyncio switches Nagle's delay off, which would cost
    # every answer of two writes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _config(app: Asgi, grace: int) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").addFilter(_without_cuts)
    return uvicorn.Config(
        app,
        loop="none",  # it runs on the caller's
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=grace,
    )


class _Server(uvicorn.Server):
    failed = False

    async def run_on(self, listener: socket.socket) -> None:
        await self.serve(sockets=[listener])
        if not self.should_exit:
            raise RuntimeError("the HTTP server ended by itself")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _without_cuts(record: logging.LogRecord) -> bool:
    """Whether to log it: an answer that we cut on purpose was reported where that was decided, and a stop that cancels nothing
    is none."""
    if str(record.msg).startswith("Cancel ") and record.args == (0,):
        return False
    return not (record.exc_info and isinstance(record.exc_info[1], AnswerCut | asyncio.CancelledError))


async def read_body(headers: RawHeaders, receive: Receive, limit: int = MAX_BODY) -> bytes:
    """The whole body. Raises BodyTooLarge, before reading where Content-Length tells, and ClientGone."""
    length = find(headers, b"content-length")
    if length is not None and length.isdigit() and (len(length) > 15 or int(length) > limit):
        raise BodyTooLarge(f"more than {limit} bytes")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("while sending its request")
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise BodyTooLarge(f"more than {limit} bytes")
        parts.append(piece)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class until_disconnect:
    """`async with until_disconnect(receive):` cancels its block once the client is gone, and turns that into ClientGone.

    Use it after the body was read: from then on `receive` has nothing but the disconnect to tell.
    """

    __slots__ = ("_gone", "_owner", "_receive", "_watch")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._owner: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._owner = asyncio.current_task()
        self._watch = asyncio.create_task(self._look())

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._watch is not None
        assert self._owner is not None
        self._watch.cancel()
        if self._gone and self._owner.uncancel() <= 0 and kind is asyncio.CancelledError:
            raise ClientGone("before its answer was complete") from error

    async def _look(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        assert self._owner is not None
        self._gone = True
        self._owner.cancel()
