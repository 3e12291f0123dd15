"""Retries, streams, disconnects: what becomes of a request once it has left for a replica."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
from typing import Any

import aiohttp
import pytest

from stitch.http.server import AnswerCut, Send
from tests.gateway.scene import BOUND, FakeReplica, Scene, Seen, says, until

pytestmark = pytest.mark.integration

NOT_STARTED = (b"x-stitch-generation-started", b"false")
STARTED = (b"x-stitch-generation-started", b"true")
EVENT_STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def more(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


@pytest.mark.parametrize("refusal", [(409,), (429,), (503, NOT_STARTED)])
async def test_another_is_tried_where_generation_did_not_start(play: Scene, refusal: tuple[Any, ...]) -> None:
    refusing = await play.replica("a", number=0)
    refusing.behave = says(*refusal)
    await play.replica("b", number=0)
    await play.gateway()
    got = [await play.ask(session=str(session)) for session in range(20)]
    assert {each.status for each in got} == {200}
    assert {each.replica for each in got} == {"b"}
    assert refusing.seen


@pytest.mark.parametrize("refusal", [(503, STARTED), (503,), (500,), (502,), (504,), (410,), (400,)])
async def test_all_else_is_passed_on(play: Scene, refusal: tuple[Any, ...]) -> None:
    replicas = [await play.replica(name, number=0) for name in "ab"]
    for replica in replicas:
        replica.behave = says(*refusal)
    await play.gateway()
    got = await play.ask(request_id="mine")
    assert got.status == refusal[0]
    assert got.headers["x-stitch-request-id"] == "mine"
    assert got.json == {"error": {"type": "Scripted"}}
    assert len(replicas[0].seen) + len(replicas[1].seen) == 1
    if got.status in (503, 504):
        assert got.headers["x-stitch-generation-started"] == "true"


async def test_a_refused_connection_goes_elsewhere(play: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    dead = await play.replica("a", number=0)
    await dead.tell(url=f"http://127.0.0.1:{port}")
    await play.replica("b", number=0)
    await play.gateway()
    assert {(await play.ask(session=str(i))).replica for i in range(20)} == {"b"}
    metrics = (await play.get("/metrics")).body.decode()
    assert 'stitch_gateway_retries_total{reason="unreachable"}' in metrics


async def test_all_unreachable_is_503_not_started(play: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for name in "ab":
        dead = await play.replica(name, number=0)
        await dead.tell(url=f"http://127.0.0.1:{port}")
    await play.gateway()
    got = await play.ask()
    assert (got.status, got.headers["x-stitch-generation-started"]) == (503, "false")
    assert got.json["error"]["generation_started"] is False


async def test_all_say_409_although_the_table_says_otherwise(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0)
    replicas = [await play.replica(name, number=0) for name in "ab"]
    for replica in replicas:
        replica.behave = says(409)
    await play.gateway()
    got = await play.ask(min_version="0")
    assert (got.status, got.json["type"]) == (409, "WeightVersionNotReady")
    assert [len(r.seen) for r in replicas] == [1, 1]


async def test_a_409_waits_for_the_replicas_next_word(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0, 1)
    replica = await play.replica("a", number=0)
    replica.behave = says(409)
    await play.gateway()
    asking = asyncio.create_task(play.ask(min_version="0", wait="15"))
    await until(lambda: len(replica.seen) == 1)
    replica.behave = replica.echo
    await replica.serving(1)
    assert (await asking).headers["x-stitch-version-start"] == "1"


async def test_a_replica_that_comes_round_is_asked_again(play: Scene) -> None:
    replica = await play.replica("a", number=0)
    replica.behave = says(503, NOT_STARTED)
    await play.gateway()
    asking = asyncio.create_task(play.ask(wait="15"))
    await until(lambda: len(replica.seen) == 2)
    replica.behave = replica.echo
    assert (await asking).status == 200


async def test_a_replica_that_others_filled_is_asked_again_until_the_deadline(play: Scene) -> None:
    replica = await play.replica("a", number=0)
    replica.behave = says(429)
    await play.gateway(deadline=1.2)
    assert (await play.ask()).status == 429
    assert len(replica.seen) >= 2


async def test_death_before_the_answer_is_not_tried_again(play: Scene) -> None:
    hits = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hits
        hits += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name in "ab":
            replica = await play.replica(name, number=0)
            await replica.tell(url=url)
        await play.gateway()
        got = await play.ask(request_id="mine")
    assert got.status == 503
    assert got.json["error"]["generation_started"] is True
    assert got.json["error"]["request_id"] == "mine"
    assert hits == 1


async def test_an_answer_that_does_not_begin_is_504(play: Scene) -> None:
    replica = await play.replica("a", number=0)
    replica.hold = asyncio.Event()
    await play.gateway(answer_timeout=0.2)
    got = await play.ask()
    assert (got.status, got.json["error"]["generation_started"]) == (504, True)
    await until(lambda: replica.gone == 1)


async def test_stream_passes_chunks_as_they_come(play: Scene) -> None:
    first_read = asyncio.Event()
    replica = await play.replica("a", number=0)

    async def behave(seen: Seen, send: Send) -> None:
        await send(EVENT_STREAM)
        await send(more(b"data: 1\n\n"))
        await first_read.wait()
        await send(more(b"data: 2\n\n"))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    replica.behave = behave
    await play.gateway()
    async with asyncio.timeout(BOUND), play.http.post(f"{play.url}/generate", json={"stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream"
        assert await response.content.readany() == b"data: 1\n\n"
        first_read.set()
        assert await response.read() == b"data: 2\n\ndata: [DONE]\n\n"


async def test_client_gone_midway_closes_upstream(play: Scene) -> None:
    replica = await play.replica("a", number=0, capacity=1)

    async def behave(seen: Seen, send: Send) -> None:
        await send(EVENT_STREAM)
        await send(more(b"data: 1\n\n"))
        await asyncio.Event().wait()

    replica.behave = behave
    await play.gateway()
    async with aiohttp.ClientSession() as leaving, asyncio.timeout(BOUND):
        response = await leaving.post(f"{play.url}/generate", json={})
        assert await response.content.readany() == b"data: 1\n\n"
        response.close()
    await until(lambda: replica.gone == 1)
    replica.behave = replica.echo
    assert (await play.ask()).status == 200  # its place was given back


async def test_client_gone_before_the_answer_closes_upstream(play: Scene) -> None:
    replica = await play.replica("a", number=0)
    replica.hold = asyncio.Event()
    await play.gateway()
    asking = asyncio.create_task(play.ask())
    await until(lambda: replica.active == 1)
    asking.cancel()
    await until(lambda: replica.gone == 1)
    assert "stitch_gateway_clients_gone_total 1" in (await play.get("/metrics")).body.decode()


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(play: Scene) -> None:
    replica = await play.replica("a", number=0)

    async def cut(seen: Seen, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(more(b'{"text'))
        raise AnswerCut("as if killed")

    replica.behave = cut
    await play.gateway()
    with pytest.raises(aiohttp.ClientError):
        await play.ask()


async def test_a_stream_that_breaks_off_says_so(play: Scene) -> None:
    replica = await play.replica("a", number=0)

    async def cut(seen: Seen, send: Send) -> None:
        await send(EVENT_STREAM)
        await send(more(b"data: 1\n\ndata: half"))
        raise AnswerCut("as if killed")

    replica.behave = cut
    await play.gateway()
    read = b""
    async with asyncio.timeout(BOUND), play.http.post(f"{play.url}/generate", json={}) as response:
        with contextlib.suppress(aiohttp.ClientError):
            async for chunk in response.content.iter_any():
                read += chunk
            pytest.fail("taken for a whole answer")
    assert read.startswith(b"data: 1\n\ndata: half\n\ndata: ")
    assert b'"generation_started": true' in read


async def test_large_bodies_both_ways(play: Scene) -> None:
    await play.replica("a", number=0)
    await play.gateway()
    body = b'{"text": "' + b"x" * 5_000_000 + b'"}'
    got = await play.ask(body=body)
    assert (got.status, got.body) == (200, body)


async def test_body_limit(play: Scene) -> None:
    await play.replica("a", number=0)
    await play.gateway(max_body=1000)
    assert (await play.ask(body=b"x" * 1000)).status == 200
    got = await play.ask(body=b"x" * 1001)
    assert (got.status, got.json["error"]["field"]) == (413, "body")


async def test_waiting_requests_are_sent_away_at_the_end(play: Scene) -> None:
    await play.trainer.claim()
    await play.replica("a")
    await play.gateway()
    gateway = next(t for t in asyncio.all_tasks() if t.get_coro().__qualname__ == "run_gateway")  # type: ignore[union-attr]
    asking = asyncio.create_task(play.ask(min_version="1", wait="60"))
    async with asyncio.timeout(BOUND):
        while b"stitch_gateway_waiting 1\n" not in (await play.get("/metrics")).body:
            await asyncio.sleep(0.01)
    gateway.cancel()
    got = await asking
    assert (got.status, got.headers["x-stitch-generation-started"]) == (503, "false")


async def test_no_place_is_lost_whoever_leaves_when(play: Scene) -> None:
    chance = random.Random(7)
    replicas = [await play.replica(name, number=0, capacity=2) for name in "ab"]

    async def slowly(replica: FakeReplica, seen: Seen, send: Send) -> None:
        await asyncio.sleep(chance.random() / 50)
        await replica.echo(seen, send)

    for replica in replicas:
        replica.behave = functools.partial(slowly, replica)
    await play.gateway()

    async def client() -> None:
        for _ in range(10):
            asking = asyncio.create_task(play.ask())
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() / 20)
                asking.cancel()
            got = (await asyncio.gather(asking, return_exceptions=True))[0]
            assert isinstance(got, asyncio.CancelledError) or got.status == 200  # type: ignore[union-attr]

    await asyncio.gather(*(client() for _ in range(12)))
    async with asyncio.timeout(BOUND):
        while True:
            text = (await play.get("/metrics")).body
            if b"stitch_gateway_in_flight 0\n" in text and b"stitch_gateway_waiting 0\n" in text:
                break
            await asyncio.sleep(0.01)
    assert (
        max(replica.most_active for replica in replicas) <= 3
    )  # one more than its places: a left client is noticed a moment later
    assert b"stitch_gateway_clients_gone_total 0\n" not in text
