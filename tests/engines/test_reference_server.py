"""The reference engine as a process: how it starts and ends, its faults on demand, its HTTP forms, plain OpenAI clients."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import openai
import pytest

from stitch.engines.port import EngineFailed, LoadRefused, PauseMode
from stitch.engines.reference.client import ReferenceEngineClient
from stitch.engines.reference.serve import init_checkpoint
from tests.support import provision
from tests.support.engines import EngineCalls, ReferenceProcess, digest_of_files, reference_models, start_reference
from tests.support.processes import processes_with

pytestmark = pytest.mark.integration

IMPATIENT_S: Final = 0.5
"""Time-out of a load in tests where the engine hangs on purpose."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    return reference_models(tmp_path_factory.mktemp("models"), (31, 32))


@pytest.fixture
def server(models: Sequence[Path], tmp_path: Path) -> Iterator[ReferenceProcess]:
    """A fresh process: these tests kill it or leave it broken."""
    running = start_reference(models[0], output=tmp_path / "engine.log")
    yield running
    running.process.stop()


@pytest.fixture
async def engine(server: ReferenceProcess) -> AsyncIterator[ReferenceEngineClient]:
    client = ReferenceEngineClient(server.url, load_timeout=IMPATIENT_S)
    yield client
    await client.aclose()


@pytest.fixture
async def calls(server: ReferenceProcess) -> AsyncIterator[EngineCalls]:
    client = EngineCalls(server.url)
    yield client
    await client.aclose()


async def digest_in_memory(calls: EngineCalls) -> str:
    """By the engine's own account of the arrays that computed a token."""
    answer = await calls.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}})
    ((digest, start, end),) = answer["meta_info"]["weights_digests"]
    assert (start, end) == (0, 1)
    return str(digest)


# --- start and end ---------------------------------------------------------------------------------------------------------


def test_sigterm_ends_it_at_once_and_cleanly(server: ReferenceProcess) -> None:
    server.process.send(signal.SIGTERM)
    assert server.process.process.wait(10) == 0
    assert not provision.port_answers(int(server.url.rsplit(":", 1)[1]))


async def test_sigterm_does_not_wait_for_requests(server: ReferenceProcess, calls: EngineCalls) -> None:
    await calls.post("/misbehave", {"slow_ms": 50})
    request = asyncio.create_task(
        calls.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}})
    )
    client = ReferenceEngineClient(server.url)
    await provision.eventually(client.in_flight, "the request runs")
    await client.aclose()
    server.process.send(signal.SIGTERM)
    assert await asyncio.to_thread(server.process.process.wait, 10) == 0
    assert (await request)["meta_info"]["finish_reason"]["type"] == "abort"


def test_it_ends_with_its_parent(models: Sequence[Path], tmp_path: Path) -> None:
    """A parent that is killed takes the engine along, though nobody is left to tell it."""
    program = (
        "import os, subprocess, sys, time\n"
        "engine = subprocess.Popen([sys.executable, '-m', 'stitch.engines.reference', '--model', sys.argv[1],"
        " '--parent-pid', str(os.getpid())], stdout=subprocess.PIPE, text=True)\n"
        "print(engine.stdout.readline(), flush=True)\n"
        "time.sleep(600)\n"
    )
    mark = f"engine-{os.getpid()}-{tmp_path.name}"
    command = [sys.executable, "-c", program, models[0]]
    parent = provision.start(command, output=tmp_path / "parent.log", name="parent", env={"STITCH_TEST_MARK": mark})
    provision.wait_until(lambda: "url" in parent.tail(), "the engine listens", process=parent)
    assert len(processes_with(mark)) == 2
    parent.process.kill()  # the parent alone, not its group
    provision.wait_until(lambda: processes_with(mark) == [], "the engine ends with its parent")
    parent.kill()


def test_a_checkpoint_that_is_none_ends_with_a_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stitch.engines.reference", "--model", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_init_writes_the_checkpoint_of_the_seed(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "a", 5)
    command = [sys.executable, "-m", "stitch.engines.reference", "--init", str(tmp_path / "b"), "--seed", "5"]
    subprocess.run(command, check=True)
    assert digest_of_files(tmp_path / "a") == digest_of_files(tmp_path / "b")


# --- faults on demand ------------------------------------------------------------------------------------------------------


async def test_faults_exist_only_where_they_are_allowed(models: Sequence[Path], tmp_path: Path) -> None:
    server = start_reference(models[0], output=tmp_path / "engine.log", misbehave=False)
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/misbehave", json={"die": "now"}) as answer:
        assert answer.status == 404
    assert server.process.alive()
    server.process.stop()


async def test_a_half_update_reports_success_and_is_told_by_the_digest(
    engine: ReferenceEngineClient, calls: EngineCalls, models: Sequence[Path]
) -> None:
    assert await digest_in_memory(calls) == digest_of_files(models[0])
    await calls.post("/misbehave", {"half_update": True})
    await engine.load(models[1], "1", flush_cache=True)
    report = await engine.report()
    assert (report.model_path, report.label) == (str(models[1]), "1")
    assert await digest_in_memory(calls) not in {digest_of_files(model) for model in models}
    await calls.post("/misbehave", {"half_update": False})
    await engine.load(models[1], "1", flush_cache=True)
    assert await digest_in_memory(calls) == digest_of_files(models[1])


async def test_a_refused_update_leaves_the_old_weights(
    engine: ReferenceEngineClient, calls: EngineCalls, models: Sequence[Path]
) -> None:
    await calls.post("/misbehave", {"refuse_update": True})
    with pytest.raises(LoadRefused):
        await engine.load(models[1], "1", flush_cache=True)
    assert (await engine.report()).label == "0"
    assert await digest_in_memory(calls) == digest_of_files(models[0])


async def test_a_truncated_checkpoint_is_refused(engine: ReferenceEngineClient, calls: EngineCalls, tmp_path: Path) -> None:
    (broken,) = reference_models(tmp_path, (40,))
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(LoadRefused):
        await engine.load(broken, "1", flush_cache=True)
    assert await engine.alive()
    assert (await engine.report()).label == "0"
    assert len(await digest_in_memory(calls)) == 64


async def test_a_wrong_label_is_reported(engine: ReferenceEngineClient, calls: EngineCalls, models: Sequence[Path]) -> None:
    await calls.post("/misbehave", {"wrong_label": "999"})
    await engine.load(models[1], "1", flush_cache=True)
    assert (await engine.report()).label == "999"


async def test_a_load_that_hangs_fails_in_time(engine: ReferenceEngineClient, calls: EngineCalls, models: Sequence[Path]) -> None:
    await calls.post("/misbehave", {"hang": "load"})
    with pytest.raises(EngineFailed, match="within"):
        await engine.load(models[1], "1", flush_cache=True)


async def test_a_death_during_a_load_is_a_failure(
    engine: ReferenceEngineClient, calls: EngineCalls, models: Sequence[Path], server: ReferenceProcess
) -> None:
    await calls.post("/misbehave", {"die": "during_load"})
    with pytest.raises(EngineFailed):
        await engine.load(models[1], "1", flush_cache=True)
    assert not await engine.alive()
    assert server.process.process.wait(10) == 137


async def test_generation_that_hangs_goes_on_when_told(calls: EngineCalls) -> None:
    await calls.post("/misbehave", {"hang": "generate"})
    request = asyncio.create_task(calls.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}}))
    await calls.post("/continue_generation", {})
    assert not request.done()
    await calls.post("/misbehave", {"hang": None})
    assert (await request)["meta_info"]["finish_reason"] is not None


async def test_unknown_faults_are_refused(server: ReferenceProcess) -> None:
    async with aiohttp.ClientSession() as session:
        for fault in ({"dye": "now"}, {"die": "later"}, {"slow_ms": -1}, {"hang": 5}):
            async with session.post(f"{server.url}/misbehave", json=fault) as answer:
                assert answer.status == 400
    assert server.process.alive()


# --- HTTP ------------------------------------------------------------------------------------------------------------------


async def test_an_update_without_a_pause_lets_running_requests_finish_on_the_old_weights(
    engine: ReferenceEngineClient, calls: EngineCalls, models: Sequence[Path]
) -> None:
    await calls.post("/misbehave", {"slow_ms": 2})
    body = {"text": "x", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    running = asyncio.create_task(calls.post("/generate", body))
    await provision.eventually(engine.in_flight, "the request runs")
    order = {"model_path": str(models[1]), "weight_version": "1"}
    update = asyncio.create_task(calls.post("/update_weights_from_disk", order))
    meta = (await running)["meta_info"]
    assert [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]] == [("0", 0, 100)]
    assert (await update)["success"]
    assert await digest_in_memory(calls) == digest_of_files(models[1])


async def test_an_update_may_abort_what_runs(engine: ReferenceEngineClient, calls: EngineCalls, models: Sequence[Path]) -> None:
    await calls.post("/misbehave", {"slow_ms": 5})
    body = {"text": "x", "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
    running = asyncio.create_task(calls.post("/generate", body))
    await provision.eventually(engine.in_flight, "the request runs")
    order = {"model_path": str(models[1]), "weight_version": "1", "abort_all_requests": True}
    assert (await calls.post("/update_weights_from_disk", order))["success"]
    meta = (await running)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["weight_version"] == "0"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_request(
    engine: ReferenceEngineClient, calls: EngineCalls, server: ReferenceProcess, stream: bool
) -> None:
    await calls.post("/misbehave", {"slow_ms": 5})
    body = {"text": "x", "stream": stream, "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": True}}
    gone = EngineCalls(server.url)
    request = asyncio.create_task(gone.post("/generate", body))
    await provision.eventually(engine.in_flight, "the request runs")
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await gone.aclose()

    async def none() -> bool:
        return await engine.in_flight() == 0

    await provision.eventually(none, "the request ends with its client")


async def test_a_client_that_goes_away_during_a_pause_ends_its_request(
    engine: ReferenceEngineClient, calls: EngineCalls, server: ReferenceProcess
) -> None:
    await engine.pause(PauseMode.RETRACT)
    gone = EngineCalls(server.url)
    request = asyncio.create_task(gone.post("/generate", {"text": "x", "stream": True}))
    await provision.eventually(engine.in_flight, "the request waits")
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await gone.aclose()

    async def none() -> bool:
        return await engine.in_flight() == 0

    await provision.eventually(none, "the request ends with its client")


BAD: Final[list[tuple[str, Any]]] = [
    ("/generate", {}),
    ("/generate", []),
    ("/generate", {"text": 1}),
    ("/generate", {"input_ids": []}),
    ("/generate", {"input_ids": [999]}),
    ("/generate", {"text": "a", "sampling_params": {"bogus": 1}}),
    ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}),
    ("/generate", {"text": "a", "stream": "yes"}),
    ("/v1/completions", {"model": "m"}),
    ("/v1/completions", {"model": "m", "prompt": "a", "n": 2}),
    ("/v1/chat/completions", {"model": "m", "messages": []}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"content": "a"}]}),
    ("/pause_generation", {"mode": "sideways"}),
    ("/update_weight_version", {"new_version": 5}),
    ("/update_weights_from_disk", {"weight_version": "1"}),
]


async def test_malformed_bodies_are_400_with_a_message(server: ReferenceProcess) -> None:
    async with aiohttp.ClientSession() as session:
        for path, body in BAD:
            async with session.post(server.url + path, json=body) as answer:
                told = await answer.json()
            assert answer.status == 400, (path, body)
            assert told.get("message") or told["error"]["message"], (path, body)
        for path in ("/pause_generation", "/continue_generation"):
            async with session.post(server.url + path) as answer:
                assert answer.status == 400


async def test_a_value_refused_after_a_stream_was_promised_arrives_in_the_stream(calls: EngineCalls) -> None:
    body = {"text": "a", "sampling_params": {"temperature": -1}}
    (event,) = [event async for event in calls.events("/generate", body)]
    assert "temperature" in event["error"]["message"]


async def test_the_openai_client_works_as_it_is(server: ReferenceProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert (await client.models.list()).data[0].object == "model"
        done = await client.completions.create(model="m", prompt="Once", max_tokens=12, seed=3, extra_body={"ignore_eos": True})
        assert done.choices[0].finish_reason == "length"
        assert done.usage is not None
        assert done.usage.completion_tokens == 12
        again = await client.completions.create(
            model="m", prompt="Once", max_tokens=12, seed=3, stream=True, extra_body={"ignore_eos": True}
        )
        assert "".join([event.choices[0].text async for event in again]) == done.choices[0].text

        messages: Any = [{"role": "user", "content": "Hello"}]
        chat = await client.chat.completions.create(model="m", messages=messages, max_tokens=9, temperature=0, logprobs=True)
        assert chat.choices[0].message.role == "assistant"
        assert chat.choices[0].logprobs is not None
        stream = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=9, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == (
            chat.choices[0].message.content
        )
        assert events[-1].usage is not None
        assert events[-1].usage.total_tokens == (chat.usage.total_tokens if chat.usage else None)
