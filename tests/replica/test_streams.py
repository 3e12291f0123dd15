"""Streams with versions: plain clients keep working, and the last data event says which versions computed the output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from stitch.engines.port import RouteKind
from stitch.http.server import Message, Receive, Scope, Send
from stitch.http.sse import SseParser
from stitch.replica.proxy import Proxy
from tests.replica.world import STEP_SECONDS, Running, World, misbehaving, ref

pytestmark = pytest.mark.integration

FORMS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 150, "ignore_eos": True}},
    "/v1/completions": {"model": "math", "prompt": "hello", "max_tokens": 150, "ignore_eos": True},
    "/v1/chat/completions": {
        "model": "math",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 150,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    },
}


async def stream(
    replica: Running, path: str, body: dict[str, Any], at: int = -1, then: Any = None
) -> tuple[Mapping[str, str], list[Any]]:
    """The headers and the data of all events; `then` is awaited after event number `at`."""
    parser, events = SseParser(), []
    async with replica.world.http.post(replica.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        headers = response.headers
        async for chunk in response.content.iter_any():
            for each in parser.feed(chunk):
                events.append(each.data)
                if len(events) == at:
                    await then()
    assert events[-1] == b"[DONE]"
    return headers, [json.loads(data or b"") for data in events[:-1]]


@pytest.mark.parametrize("path", FORMS)
async def test_the_last_event_carries_start_end_and_spans(world: World, path: str) -> None:
    replica = await world.replica(command=misbehaving())
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        await replica.misbehave(slow_ms=5)

        async def next_version() -> None:
            await replica.misbehave(slow_ms=500)  # the answer is not over before the version is there
            await replica.serves(await trainer.publish())
            await replica.misbehave(slow_ms=1)

        headers, events = await stream(replica, path, FORMS[path], at=5, then=next_version)
    assert (headers["X-Stitch-Policy"], headers["X-Stitch-Run"], headers["X-Stitch-Version-Start"]) == ("math", "r1", "0")
    assert headers["X-Stitch-Replica"] == "replica-0"
    assert headers["X-Stitch-Request-Id"]
    last = events[-1]
    told = last["meta_info"] if path == "/generate" else last
    assert (told["weight_version_start"], told["weight_version_end"]) == (0, 1)
    spans = told["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 150)
    truth = (last["meta_info"] if path == "/generate" else last["metadata"])["weights_digests"]
    assert truth == [[world.digests[ref(int(s["version"]))], s["start"], s["end"]] for s in spans]
    if path == "/v1/chat/completions":
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 150


@pytest.mark.parametrize("path", FORMS)
async def test_a_whole_answer_carries_them_too(world: World, path: str) -> None:
    replica = await world.replica()
    async with world.trainer():
        await replica.serves(ref(0))
    body = {name: value for name, value in FORMS[path].items() if name != "stream_options"}
    status, answer, headers = await replica.post(path, body)
    assert status == 200, answer
    told = answer["meta_info"] if path == "/generate" else answer
    assert (told["weight_version_start"], told["weight_version_end"]) == (0, 0)
    assert told["weight_versions"] == [{"version": "0", "start": 0, "end": 150}]
    assert headers["X-Stitch-Version-Start"] == "0"


async def test_a_value_that_the_engine_refuses_is_a_400_in_a_stream_too(world: World) -> None:
    replica = await world.replica()
    async with world.trainer():
        await replica.serves(ref(0))
    body = {"text": "a", "sampling_params": {"top_p": 7.0}, "stream": True}
    status, answer, _ = await replica.post("/generate", body)
    assert status == 400
    assert "top_p" in answer["error"]["message"]


async def test_a_client_that_reads_no_more_does_not_hold_up_a_version(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its window is shut, sending to it waits without an end."""
    shut = asyncio.Event()
    generate = Proxy.generate

    async def to_one_that_reads_once(proxy: Proxy, kind: RouteKind, scope: Scope, receive: Receive, send: Send) -> None:
        async def stuck(message: Message) -> None:
            if shut.is_set():
                await asyncio.Event().wait()
            if message["type"] == "http.response.body":
                shut.set()
            await send(message)

        await generate(proxy, kind, scope, receive, stuck)

    replica = await world.replica(drain_seconds=0.5)
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        monkeypatch.setattr(Proxy, "generate", to_one_that_reads_once)
        pinned = {"weight_version": {"run": "r1", "exact_version": 0}, "stream": True}
        async with world.http.post(replica.url + "/generate", json={**FORMS["/generate"], **pinned}) as response:
            await response.content.readany()
            await asyncio.wait_for(shut.wait(), STEP_SECONDS)
            await replica.serves(await trainer.publish())
            with pytest.raises(aiohttp.ClientError):  # nor is it told that this was all
                await response.read()


async def test_an_engine_that_dies_midway_ends_the_stream_with_an_error(world: World) -> None:
    replica = await world.replica(command=misbehaving())
    async with world.trainer():
        await replica.serves(ref(0))
    await replica.misbehave(slow_ms=20)
    engine = await replica.engine_url()
    events: list[Any] = []
    parser = SseParser()

    async def read() -> None:
        async with world.http.post(replica.url + "/generate", json={**FORMS["/generate"], "stream": True}) as response:
            async for chunk in response.content.iter_any():
                for each in parser.feed(chunk):
                    events.append(json.loads(each.data or b""))
                    if len(events) == 3:
                        await _kill(world, engine)

    with pytest.raises(aiohttp.ClientError):  # the connection is cut, so that nobody takes it for a whole answer
        await read()
    error = events[-1]["error"]
    assert (error["retryable"], error["generation_started"]) == (True, True)
    assert await replica.exit_code() == 70


async def _kill(world: World, engine: str) -> None:
    try:
        async with world.http.post(f"{engine}/misbehave", json={"die": "now"}):
            raise AssertionError("it should have died")
    except aiohttp.ClientError:
        return
