"""A replica with a real reference engine: it joins, follows, and no answer names a version that did not compute it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stitch.core.events import Phase, RolloutServed, Transition
from stitch.log.events import read
from stitch.log.port import Stream
from stitch.replica.config import AuditMode
from tests.replica.world import Running, World, check_truth, misbehaving, ref, until
from tests.support.provision import eventually

pytestmark = pytest.mark.integration


async def test_it_joins_on_version_0_once_there_is_one(world: World) -> None:
    replica = await world.replica()
    assert (await replica.get("/readyz"))[0] == 503
    assert (await replica.get("/livez"))[0] == 200
    status, refused = await replica.generate()
    assert (status, refused["error"]["type"], refused["error"]["tip"]) == (409, "WeightVersionNotReady", None)
    assert (await replica.info())["phase"] == Phase.JOINING

    async with world.trainer():
        await replica.serves(ref(0))
    assert (await replica.get("/readyz"))[0] == 200
    status, answer = await replica.generate()
    assert status == 200
    check_truth(world, answer)
    await until(lambda: bool(world.of("replica-0", Transition.ACTIVATED)), "the activation is on the stream")
    told = world.of("replica-0", Transition.ACTIVATED)[-1]
    assert (told.serving, told.weights_digest, told.phase) == (ref(0), world.digests[ref(0)], Phase.SERVING)
    assert told.incarnation is not None
    assert told.url == replica.url


async def test_it_follows_versions_while_requests_run(world: World) -> None:
    replica = await world.replica(command=misbehaving())
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        await replica.misbehave(slow_ms=5)
        stop = asyncio.Event()

        async def ask() -> list[Any]:
            answered = []
            while not stop.is_set():
                status, answer = await replica.generate(tokens=120)
                assert status == 200, answer
                check_truth(world, answer)
                answered.append(answer)
            return answered

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        for _ in range(3):
            version = await trainer.publish()
            await replica.serves(version)
        stop.set()
        answers = [answer for task in asking for answer in await task]
    assert any(len(a["meta_info"]["weight_versions"]) > 1 for a in answers), "no request lived through an activation"
    await until(lambda: len(world.of("replica-0", Transition.ACTIVATED)) == 4, "all activations are told")
    pauses = [r.pause_ms for r in world.of("replica-0", Transition.ACTIVATED)[1:]]
    assert all(pause is not None and pause > 0 for pause in pauses)
    assert (await replica.info())["last_pause_ms"] == pauses[-1]


async def test_what_a_constraint_forbids_is_refused(world: World) -> None:
    replica = await world.replica()
    async with world.trainer() as trainer:
        await replica.serves(await trainer.publish())
        status, body, headers = await replica.post("/generate", {"text": "a"}, {"X-Stitch-Min-Version": "7"})
        assert (status, headers["Retry-After"]) == (409, "1")
        assert body["error"]["required"] == {"run": "r1", "min_version": 7, "exact_version": None}
        assert (body["error"]["serving"], body["error"]["tip"]) == (str(ref(1)), str(ref(1)))
        assert (body["type"], body["target_version"], body["applied"]) == ("WeightVersionNotReady", 7, 1)
        assert headers["X-Stitch-Replica"] == "replica-0"
        status, _, headers = await replica.post("/generate", {"text": "a"}, {"X-Stitch-Max-Lag": "0"})
        assert (status, headers["X-Stitch-Tip"], headers["X-Stitch-Run"]) == (200, str(ref(1)), "r1")
        assert list(headers.getall("X-Stitch-Replica")) == ["replica-0"]

        for constraint in ({"exact_version": 1}, {"min_version": 1}, {"min_version": str(ref(1))}, {"run": "r1"}):
            status, answer = await replica.generate(weight_version=constraint)
            assert status == 200, answer
            check_truth(world, answer)
        status, answer = await replica.generate(weight_version={"exact_version": 0})
        assert (status, answer["error"]["retryable"]) == (409, True)
        status, answer = await replica.generate(weight_version={"min_version": -1})
        assert (status, answer["error"]["field"]) == (400, "min_version")
        status, answer = await replica.generate(weight_version={"min_version": 1}, headers={"X-Stitch-Min-Version": "0"})
        assert (status, answer["error"]["field"]) == (400, "min_version")
        status, answer = await replica.generate(headers={"X-Stitch-Policy": "other"})
        assert (status, answer["error"]["field"]) == (400, "policy")
        status, answer = await replica.generate(input_ids=[999], text=None)
        assert (status, answer["error"]["field"]) == (400, "input_ids")

        waiting = asyncio.create_task(replica.generate(headers={"X-Stitch-Min-Version": "2", "X-Stitch-Wait": "50"}))
        assert await trainer.publish() == ref(2)
        status, answer = await waiting
        assert (status, answer["meta_info"]["weight_version_start"]) == (200, 2)
    async with world.trainer(boot_version=1) as trainer:
        assert await trainer.publish() == ref(3)
        await replica.serves(ref(3))
        status, answer = await replica.generate(weight_version={"exact_version": 2})
        assert (status, answer["error"]["type"]) == (410, "VersionGone")


async def test_no_route_by_passes_admission(world: World) -> None:
    replica = await world.replica()
    async with world.trainer():
        await replica.serves(ref(0))
    for path in ("/pause_generation", "/update_weights_from_disk", "/abort_request", "/v1/embeddings"):
        assert (await replica.post(path, {}))[0] == 403
    assert (await replica.get("/health"))[0] == 403
    assert (await replica.get("/generate"))[0] == 405
    status, models = await replica.get("/v1/models")
    assert (status, models["object"]) == (200, "list")


async def test_tokens_guard_its_surfaces(world: World) -> None:
    replica = await world.replica(token="secret", control_token="more-secret")
    async with world.trainer():
        await until(lambda: bool(world.of("replica-0", Transition.ACTIVATED)), "it serves")
    assert (await replica.get("/readyz"))[0] == 200
    assert (await replica.get("/server_info"))[0] == 401
    assert (await replica.generate())[0] == 401
    assert (await replica.generate(headers={"Authorization": "Bearer secret"}))[0] == 200
    assert (await replica.post("/drain", {}, {"Authorization": "Bearer secret"}))[0] == 401
    assert (await replica.post("/wake", {}, {"Authorization": "Bearer more-secret"}))[0] == 202


async def test_a_client_that_leaves_ends_its_generation(world: World) -> None:
    replica = await world.replica(command=misbehaving())
    async with world.trainer():
        await replica.serves(ref(0))
    await replica.misbehave(slow_ms=50)
    asking = asyncio.create_task(replica.generate(tokens=2000))

    async def running(count: int) -> bool:
        async with world.http.get(f"{await replica.engine_url()}/v1/loads") as response:
            load = (await response.json())["loads"][0]
        info = await replica.info()
        return (load["num_running_reqs"], info["gate"]["in_flight"]) == (count, count)

    await eventually(lambda: running(1), "it is computed")
    asking.cancel()
    await eventually(lambda: running(0), "it was aborted")


async def test_it_takes_no_more_than_its_capacity(world: World) -> None:
    replica = await world.replica(command=misbehaving(), capacity=2)
    async with world.trainer():
        await replica.serves(ref(0))
    await replica.misbehave(slow_ms=200)
    asking = [asyncio.create_task(replica.generate(tokens=100)) for _ in range(2)]

    async def full() -> bool:
        return bool((await replica.info())["gate"]["in_flight"] == 2)

    await eventually(full, "both are admitted")
    status, answer = await replica.generate()
    assert (status, answer["error"]["type"], answer["error"]["retryable"]) == (429, "Busy", True)
    await replica.misbehave(slow_ms=0)
    for task in asking:
        assert (await task)[0] == 200


async def test_it_drains_and_leaves(world: World) -> None:
    replica = await world.replica(command=misbehaving())
    async with world.trainer():
        await replica.serves(ref(0))
    await replica.misbehave(slow_ms=200)
    asking = asyncio.create_task(replica.generate(tokens=60))

    async def admitted() -> bool:
        return bool((await replica.info())["gate"]["in_flight"] == 1)

    await eventually(admitted, "it is admitted")
    assert (await replica.post("/drain", {}))[0] == 202
    await eventually(lambda: _unready(replica), "it is not ready")
    status, answer = await replica.generate()
    assert (status, answer["error"]["generation_started"]) == (503, False)
    await replica.misbehave(slow_ms=0)
    status, answer = await asking
    assert status == 200
    check_truth(world, answer)
    assert await replica.exit_code() == 0
    await until(lambda: [r.phase for r in world.of("replica-0", Transition.LEFT)] == [Phase.LEFT], "it said that it left")
    assert world.of("replica-0", Transition.DRAINING)


async def _unready(replica: Running) -> bool:
    return (await replica.get("/readyz"))[0] == 503


async def test_served_answers_are_recorded(world: World) -> None:
    replica = await world.replica(audit=AuditMode.ALL)
    async with world.trainer():
        await replica.serves(ref(0))
    status, _ = await replica.generate(headers={"X-Stitch-Request-Id": "mine", "X-Stitch-Session": "s1"})
    assert status == 200

    async def recorded() -> bool:
        return await world.events.newest(Stream.ROLLOUTS) is not None

    await eventually(recorded, "it is recorded")
    record = await world.events.newest(Stream.ROLLOUTS)
    assert record is not None
    event = read(record)
    assert isinstance(event, RolloutServed)
    assert (event.request_id, event.session, event.version_start, event.output_tokens) == ("mine", "s1", 0, 8)
    assert [(s.number, s.start, s.end) for s in event.spans] == [(0, 0, 8)]
