"""What users of such systems reported, each as a story of its own. Numbers are those of the list of scenarios."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stitch.core.events import Transition
from stitch.engines.reference.serve import init_checkpoint
from stitch.gateway.config import GatewayConfig
from stitch.gateway.serve import run_gateway
from tests.replica.world import RUN, SMALL, STEP_SECONDS, Running, World, check_truth, misbehaving, ref, unique_log, until
from tests.support import provision
from tests.support.engines import start_reference
from tests.support.provision import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.integration]


@asynccontextmanager
async def a_world(folder: Path, log: str | None = None) -> AsyncIterator[World]:
    world = World(folder, log or unique_log())
    await world.begin()
    try:
        yield world
    finally:
        await world.end()


@contextmanager
def an_engine(folder: Path) -> Iterator[str]:
    """The URL of an engine that nobody of ours runs, with weights of nobody's, which calls them version 0."""
    init_checkpoint(folder / "stranger", seed=77, config=SMALL)
    engine = start_reference(folder / "stranger", output=folder / "engine.out", label="0")
    try:
        yield engine.url
    finally:
        engine.process.stop()


@asynccontextmanager
async def a_gateway(world: World) -> AsyncIterator[str]:
    """Its URL."""
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_gateway(GatewayConfig(log=world.log_url, port=0), ready=listening.set_result, grace=1))
    try:
        yield await asyncio.wait_for(listening, STEP_SECONDS)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def routed(world: World, gateway: str, count: int) -> None:
    """Until so many replicas are in rotation."""

    async def holds() -> bool:
        async with world.http.get(f"{gateway}/replicas") as response:
            table = await response.json()
        return len([r for r in table["replicas"] if r["phase"] == "serving"]) == count

    await eventually(holds, f"{count} replicas in rotation")


async def ask(
    world: World, url: str, *, tokens: int = 4, headers: dict[str, str] | None = None, **body: Any
) -> tuple[int, Any, Any]:
    """Status, JSON and headers of the answer."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    request = {"text": "hello", "sampling_params": sampling, **body}
    async with world.http.post(f"{url}/generate", json=request, headers=headers) as response:
        return response.status, await response.json(content_type=None), response.headers


async def misbehave(world: World, engine: str, **faults: Any) -> None:
    async with world.http.post(f"{engine}/misbehave", json=faults) as response:
        assert response.status == 200, await response.text()


async def computed(world: World, engine: str) -> int:
    """How many tokens the engine computed in its life."""
    async with world.http.get(f"{engine}/server_info") as response:
        return int((await response.json())["internal_states"][0]["tokens"])


async def test_1_and_2_nothing_is_answered_before_the_first_activation(tmp_path: Path) -> None:
    """An engine that would answer at once is asked while its replica is registered, has a target, and loads."""
    async with a_world(tmp_path) as world, a_gateway(world) as gateway:
        with an_engine(tmp_path) as engine:
            replica = await world.replica(engine_url=engine)
            await until(lambda: bool(world.of("replica-0", Transition.JOINED)), "it is registered")
            before = await computed(world, engine)
            for url in (gateway, replica.url):
                status, answer, _ = await ask(world, url)
                assert (status, answer["error"]["type"], answer["error"]["tip"]) == (409, "WeightVersionNotReady", None), answer
            await misbehave(world, engine, hang="load")
            async with world.trainer():
                await until(lambda: bool(world.of("replica-0", Transition.ACTIVATION_STARTED)), "it loads")
                for url in (gateway, replica.url):
                    for wait in ("0", "0.5"):
                        status, answer, _ = await ask(world, url, headers={"X-Stitch-Wait": wait})
                        assert (status, answer["error"]["retryable"]) == (409, True), answer
                assert await computed(world, engine) == before, "the engine was asked for nothing"
                await misbehave(world, engine, hang=None)
                await replica.serves(ref(0))
                await routed(world, gateway, 1)
                status, answer, _ = await ask(world, gateway)
                assert status == 200, answer
                check_truth(world, answer)
            await replica.stop()


async def test_8_9_and_11_a_failover_from_57_to_1_admits_no_negative_staleness(tmp_path: Path) -> None:
    """The trainer lost its state and goes on from version 1. Version 57 is 56 above it by subtraction, and on no path any more."""
    async with a_world(tmp_path) as world, a_gateway(world) as gateway:
        replica = await world.replica(command=misbehaving())
        async with world.trainer() as first:
            await first.publish()
            await first.publish(number=57)
            await replica.serves(ref(57))
        await routed(world, gateway, 1)
        await replica.misbehave(refuse_update=True)
        async with world.trainer(boot_version=1) as second:
            await until(lambda: bool(world.of("replica-0", Transition.ACTIVATION_FAILED)), "it clings to 57")
            assert (await replica.info())["serving"]["number"] == 57
            for url in (gateway, replica.url):
                for constraint in ({"X-Stitch-Max-Lag": "3"}, {"X-Stitch-Min-Version": "1"}, {"X-Stitch-Min-Version": "57"}):
                    status, answer, _ = await ask(world, url, headers=constraint)
                    assert status == 409, (constraint, answer)
                    assert answer["error"]["tip"] is not None
                status, answer, _ = await ask(world, url, headers={"X-Stitch-Exact-Version": "57"})
                assert (status, answer["error"]["retryable"]) == (410, False), "never again, and the client is told so"
                status, answer, _ = await ask(world, url)
                assert (status, answer["meta_info"]["weight_version_start"]) == (200, 57), "who asks for nothing is not starved"
            await replica.misbehave(refuse_update=False)
            await replica.serves(ref(1))
            # Nothing hangs, and nothing is filtered away: what was counted before goes on above all that there was.
            published = await second.publish()
            assert published == ref(58)
            await replica.serves(published)
            status, answer, headers = await ask(
                world, gateway, headers={"X-Stitch-Max-Lag": "0", "X-Stitch-Min-Version": "58", "X-Stitch-Wait": "30"}
            )
            assert status == 200, answer
            assert headers["X-Stitch-Tip"] == f"{RUN}/weight_v000058"
            check_truth(world, answer)


async def test_13_a_rewind_leaves_nobody_on_the_abandoned_suffix(tmp_path: Path) -> None:
    """Three replicas: one follows, one was dead and comes back with what it had staged, one was held up."""
    async with a_world(tmp_path, f"sqlite://{tmp_path / 'log.db'}") as world:
        follows = await world.replica("follows")
        dead = await world.replica("dead")
        held = await world.replica("held", command=misbehaving())
        async with world.trainer() as first:
            for _ in range(3):
                newest = await first.publish()
            for replica in (follows, dead, held):
                await replica.serves(newest)
        await dead.stop()
        await held.misbehave(refuse_update=True)
        async with world.trainer(boot_version=1) as second:
            await until(lambda: bool(world.of("held", Transition.ACTIVATION_FAILED)), "one refused")
            again = await world.replica("dead")
            await held.misbehave(refuse_update=False)
            for replica in (follows, again, held):
                await replica.serves(ref(1))
                for number in (2, 3):
                    status, answer = await replica.generate(weight_version={"exact_version": number})
                    assert status == 410, answer
                check_truth(world, (await replica.generate())[1])
            published = await second.publish()
            assert published == ref(4)
            for replica in (follows, again, held):
                await replica.serves(published)
                check_truth(world, (await replica.generate(weight_version={"exact_version": 4}))[1])


async def test_31_an_agent_that_is_killed_in_a_pause_is_followed_by_one_that_ends_it(tmp_path: Path) -> None:
    async with a_world(tmp_path, f"sqlite://{tmp_path / 'log.db'}") as world:
        with an_engine(tmp_path) as engine:
            agent = _beside(world, engine)
            async with world.trainer() as trainer:
                await until(lambda: bool(world.of("attached", Transition.ACTIVATED)), "it serves")
                await misbehave(world, engine, hang="load")
                published = await trainer.publish()
                await eventually(lambda: _paused(world, engine), "the engine is paused for a load that does not come")
                agent.kill()
                await misbehave(world, engine, hang=None)
                assert await _paused(world, engine), "nobody is there to resume it"
                second = await world.replica("attached", engine_url=engine)
                await second.serves(published)
                assert not await _paused(world, engine)
                status, answer = await second.generate()
                assert status == 200, answer
                check_truth(world, answer)
            await second.stop()


def _beside(world: World, engine: str) -> provision.Running:
    """A replica that is a process of its own, to be killed."""
    words = ["--json", "--id", "attached", "--log", world.log_url, "--store", world.store_url, "--policy", "math"]
    words += ["--workdir", str(world.folder / "work" / "attached"), "--heartbeat", "0.5", "--reconcile", "0.5"]
    command = [sys.executable, "-m", "stitch", "replica", *words, "--engine-url", engine]
    return provision.start(command, output=world.folder / "agent.out", name="replica")


async def _paused(world: World, engine: str) -> bool:
    async with world.http.get(f"{engine}/model_info") as response:
        return bool((await response.json())["paused"])


async def test_38_and_39_a_request_across_three_versions_says_so_token_by_token(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world, a_gateway(world) as gateway:
        replica = await world.replica(command=misbehaving())
        async with world.trainer() as trainer:
            await replica.serves(ref(0))
            await routed(world, gateway, 1)
            await replica.misbehave(slow_ms=25)
            engine = await replica.engine_url()
            asking = asyncio.create_task(ask(world, gateway, tokens=1500))
            for number in (1, 2):
                seen = await computed(world, engine)
                await eventually(lambda seen=seen: _computed_more(world, engine, seen), "the request goes on")  # type: ignore[misc]
                await trainer.publish()
                await replica.serves(ref(number))
            seen = await computed(world, engine)
            await eventually(lambda: _computed_more(world, engine, seen), "the last version computes too")
            assert not asking.done()
            await replica.misbehave(slow_ms=0)
            status, answer, headers = await asking
    assert status == 200
    check_truth(world, answer)
    meta = answer["meta_info"]
    assert [int(span["version"]) for span in meta["weight_versions"]] == [0, 1, 2]
    assert (headers["X-Stitch-Version-Start"], meta["weight_version_end"]) == ("0", 2)


async def _computed_more(world: World, engine: str, than: int) -> bool:
    return await computed(world, engine) > than


async def test_42_what_may_have_begun_is_begun_nowhere_else(tmp_path: Path) -> None:
    """An engine dies while it answers. The gateway has another replica that would do, and does not ask it by itself."""
    async with a_world(tmp_path) as world, a_gateway(world) as gateway, world.trainer():
        names = ("replica-0", "replica-1")
        replicas = {name: await world.replica(name, command=misbehaving()) for name in names}
        for replica in replicas.values():
            await replica.serves(ref(0))
            await replica.misbehave(slow_ms=20)
        await routed(world, gateway, 2)
        engines = {name: await replica.engine_url() for name, replica in replicas.items()}
        asking = asyncio.create_task(ask(world, gateway, tokens=3000, headers={"X-Stitch-Request-Id": "once"}))
        asked = await _busy(world, engines)
        (other,) = set(names) - {asked}
        before = await computed(world, engines[other])
        await misbehave_to_death(world, engines[asked])
        status, answer, headers = await asking
        assert (status, answer["error"]["generation_started"]) == (503, True), answer
        assert (answer["error"]["request_id"], headers["X-Stitch-Request-Id"]) == ("once", "once")
        assert await replicas[asked].exit_code() == 70
        assert await computed(world, engines[other]) == before, "nobody else computed it"
        # Asked again by the client's own decision, it is one more generation, and only one.
        await misbehave(world, engines[other], slow_ms=0)
        status, answer, _ = await ask(world, gateway, tokens=7, headers={"X-Stitch-Request-Id": "once"})
        assert status == 200, answer
        assert await computed(world, engines[other]) == before + 7


async def _busy(world: World, engines: dict[str, str]) -> str:
    """The one that computes."""
    found: list[str] = []

    async def computes() -> bool:
        found[:] = [name for name, url in engines.items() if await computed(world, url) > 0]
        return bool(found)

    await eventually(computes, "one of them computes")
    (only,) = found
    return only


async def misbehave_to_death(world: World, engine: str) -> None:
    try:
        await misbehave(world, engine, die="now")
    except aiohttp.ClientError:
        return


async def test_48_full_replicas_attract_nobody(tmp_path: Path) -> None:
    """One session's replica is full for good. The session goes elsewhere, and nobody is turned away while there is room."""
    async with a_world(tmp_path) as world, a_gateway(world) as gateway, world.trainer():
        replicas = [await world.replica(f"replica-{n}", command=misbehaving(), capacity=2) for n in range(2)]
        for replica in replicas:
            await replica.serves(ref(0))
        await routed(world, gateway, 2)
        session = {"X-Stitch-Session": "one"}
        _, _, headers = await ask(world, gateway, headers=session)
        full = next(replica for replica in replicas if replica.config.replica == headers["X-Stitch-Replica"])
        await full.misbehave(hang="generate")
        stuck = [asyncio.create_task(ask(world, full.url, tokens=50)) for _ in range(2)]
        await eventually(lambda: _in_flight(full, 2), "it is full, by requests that the gateway knows nothing of")
        answers = await asyncio.gather(*(ask(world, gateway, headers=session if n % 2 else None) for n in range(20)))
        assert [status for status, _, _ in answers] == [200] * 20
        assert {headers["X-Stitch-Replica"] for _, _, headers in answers} == {r.config.replica for r in replicas} - {
            full.config.replica
        }
        await full.misbehave(hang=None)
        assert [status for status, _, _ in await asyncio.gather(*stuck)] == [200, 200]


async def _in_flight(replica: Running, count: int) -> bool:
    return bool((await replica.info())["gate"]["in_flight"] == count)
