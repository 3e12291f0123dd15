"""Server and upstream client against each other, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stitch.core.errors import InvalidRequest
from stitch.http import answers
from stitch.http.headers import to_answer, to_forward
from stitch.http.server import AnswerCut, BodyTooLarge, ClientGone, Receive, Scope, Send, read_body, serve, until_disconnect
from stitch.http.upstream import Stage, Upstream, UpstreamError

pytestmark = pytest.mark.integration

BOUND = 20.0
"""Seconds that no step takes unless it hangs."""


class App:
    """Answers by path; tells what it saw."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.go_on = asyncio.Event()
        self.seen: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope)
        try:
            body = await read_body(scope["headers"], receive, limit=8_000_000)
        except BodyTooLarge:
            return await answers.too_large(8_000_000)(scope, receive, send)
        try:
            async with until_disconnect(receive):
                await self.answer(scope["path"], body, send)
        except ClientGone:
            self.left.set()
        return None

    async def answer(self, path: str, body: bytes, send: Send) -> None:
        if path == "/silent":
            await asyncio.Event().wait()
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain"), (b"x-own", b"1")]}
        await send(start)
        if path == "/slow":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self.go_on.wait()
            await send({"type": "http.response.body", "body": b"second", "more_body": True})
        if path == "/cut":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self.go_on.wait()
            raise AnswerCut("on purpose")
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def running(grace: int = 1) -> AsyncIterator[tuple[App, str, Upstream]]:
    app = App()
    async with Upstream() as upstream, serve(app, grace=grace) as url:
        yield app, url, upstream


@pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_000])
async def test_body_there_and_back(size: int) -> None:
    async with running() as (app, url, upstream):
        body = bytes(i % 251 for i in range(size))
        async with asyncio.timeout(BOUND):
            response = await upstream.open("POST", f"{url}/echo?a=%2F", [(b"content-type", b"x/y")], body)
            assert await response.read() == body
        assert response.status == 200
        assert response.header("X-Own") == "1"
        assert dict(app.seen[0]["headers"])[b"content-type"] == b"x/y"
        assert app.seen[0]["query_string"] == b"a=%2F"


async def test_chunks_come_as_they_are_sent() -> None:
    async with running() as (app, url, upstream), asyncio.timeout(BOUND):
        response = await upstream.open("POST", f"{url}/slow")
        chunks = response.chunks()
        assert await anext(chunks) == b"first"
        app.go_on.set()
        assert b"".join([chunk async for chunk in chunks]) == b"second"


async def test_closing_early_tells_the_server() -> None:
    async with running() as (app, url, upstream), asyncio.timeout(BOUND):
        response = await upstream.open("POST", f"{url}/slow")
        response.close()
        await app.left.wait()


async def test_cancelling_before_the_answer_tells_the_server() -> None:
    async with running() as (app, url, upstream), asyncio.timeout(BOUND):
        asking = asyncio.create_task(upstream.open("POST", f"{url}/silent"))
        while not app.seen:
            await asyncio.sleep(0.01)
        asking.cancel()
        await app.left.wait()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_refused_connection_was_not_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with Upstream() as upstream:
        with pytest.raises(UpstreamError) as failed:
            await upstream.open("POST", f"http://127.0.0.1:{port}/x", body=b"{}")
        assert failed.value.stage is Stage.NOT_SENT
        assert not failed.value.may_have_started
        with pytest.raises(UpstreamError) as failed:
            await upstream.open("POST", "nonsense")
        assert failed.value.stage is Stage.NOT_SENT


async def test_death_before_the_answer() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Upstream() as upstream, asyncio.timeout(BOUND):
        with pytest.raises(UpstreamError) as failed:
            await upstream.open("POST", f"http://127.0.0.1:{port}/x", body=b"{}")
        assert failed.value.stage is Stage.UNANSWERED
        assert failed.value.may_have_started


async def test_no_answer_in_time() -> None:
    async with running() as (app, url, upstream), asyncio.timeout(BOUND):
        with pytest.raises(UpstreamError) as failed:
            await upstream.open("POST", f"{url}/silent", first_byte_timeout=0.2)
        assert failed.value.stage is Stage.UNANSWERED
        assert failed.value.timed_out
        await app.left.wait()


async def test_death_midway() -> None:
    async with running() as (app, url, upstream), asyncio.timeout(BOUND):
        response = await upstream.open("POST", f"{url}/cut")
        chunks = response.chunks()
        assert await anext(chunks) == b"first"
        app.go_on.set()
        with pytest.raises(UpstreamError) as failed:
            await anext(chunks)
        assert failed.value.stage is Stage.MIDWAY


async def test_answer_bounded_when_read_whole() -> None:
    async with running() as (_, url, upstream), asyncio.timeout(BOUND):
        response = await upstream.open("POST", f"{url}/echo", body=b"x" * 1000)
        with pytest.raises(UpstreamError):
            await response.read(limit=999)


@pytest.mark.parametrize("told", [True, False])
async def test_body_too_large(told: bool) -> None:
    async with running() as (_, url, _upstream), asyncio.timeout(BOUND):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        if told:
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 8000001\r\n\r\n")
        else:
            writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%s\r\n" % (8_000_001, b"x" * 8_000_001))
        assert b" 413 " in await reader.readline()
        writer.close()


async def test_open_streams_do_not_block_the_end() -> None:
    async with Upstream() as upstream, asyncio.timeout(BOUND):
        app = App()
        async with serve(app, grace=1) as url:
            response = await upstream.open("POST", f"{url}/slow")
        with pytest.raises(UpstreamError):
            await response.read()


async def test_address_taken_and_errors_of_the_block() -> None:
    async with serve(App()) as url:
        with pytest.raises(OSError, match="in use"):
            async with serve(App(), port=int(url.rsplit(":", 1)[1])):
                pass
    with pytest.raises(KeyError):
        async with serve(App()):
            raise KeyError


async def test_a_cancelled_block_ends_in_cancellation() -> None:
    inside = asyncio.Event()

    async def block() -> None:
        async with serve(App()):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_disconnect_is_no_cancellation_of_the_task_itself() -> None:
    async def gone() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        async with until_disconnect(gone):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_cancellation_from_outside_stays_one() -> None:
    async def nothing() -> Any:
        await asyncio.Event().wait()

    async def block() -> None:
        async with until_disconnect(nothing):
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_headers_of_one_hop_are_dropped() -> None:
    given = [(b"host", b"x"), (b"connection", b"close, X-Private"), (b"x-private", b"1"), (b"x-kept", b"2"), (b"te", b"trailers")]
    assert to_forward(given) == [(b"x-kept", b"2")]
    assert to_answer([(b"transfer-encoding", b"chunked"), (b"content-length", b"3")]) == [(b"content-length", b"3")]
    with pytest.raises(InvalidRequest):
        to_forward([(b"x-a", b"b\x01")])
