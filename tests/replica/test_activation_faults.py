"""What an engine may do wrong at a swap: a refusal leaves the old version serving, anything else ends the replica, and no request
is ever answered by weights that it was not told of."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import aiohttp
import pytest

from stitch.core.events import Phase, Transition
from stitch.engines.reference.model import context_size, contexts_of, encode, init, log_softmax, logits, to_bf16, to_f32
from tests.replica.world import SMALL, STEP_SECONDS, Running, World, check_truth, misbehaving, ref, until
from tests.support.provision import eventually

pytestmark = [pytest.mark.integration, pytest.mark.chaos]


class Askers:
    """Asks without a pause; every answer must be truthful, every failure one that a client may retry."""

    def __init__(self, world: World, replica: Running, count: int = 3) -> None:
        self.statuses: list[int] = []
        self._world, self._replica, self._stop = world, replica, False
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(count)]

    async def _ask(self) -> None:
        while not self._stop:
            try:
                status, answer = await self._replica.generate(tokens=60)
            except (OSError, aiohttp.ClientError):
                return  # the replica ended
            self.statuses.append(status)
            if status == 200:
                check_truth(self._world, answer)
            else:
                assert status == 503, answer
                assert answer["error"]["retryable"] is True
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)


async def test_a_refusal_leaves_the_old_version_serving(world: World) -> None:
    replica = await world.replica(command=misbehaving())
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        await replica.misbehave(refuse_update=True, slow_ms=2)
        askers = Askers(world, replica)
        await trainer.publish()
        await until(lambda: bool(world.of("replica-0", Transition.ACTIVATION_FAILED)), "the refusal is told")
        failed = world.of("replica-0", Transition.ACTIVATION_FAILED)[0]
        assert (failed.phase, failed.serving, failed.target) == (Phase.SERVING, ref(0), ref(1))
        assert "told to refuse" in (failed.error or "")
        await replica.serves(ref(0))
        assert (await replica.generate())[0] == 200
        started = len(world.of("replica-0", Transition.ACTIVATION_STARTED))
        assert started <= 3, "it tries again and again without a pause"
        await replica.misbehave(refuse_update=False)
        await replica.serves(await trainer.publish())
        await askers.stop()
    assert set(askers.statuses) == {200}


@pytest.mark.parametrize("fault", [{"die": "during_load"}, {"hang": "load"}, {"hang": "pause"}, {"wrong_label": "77"}])
async def test_any_other_failure_ends_the_replica(world: World, fault: dict[str, Any]) -> None:
    replica = await world.replica(command=misbehaving(), swap_seconds=3.0)
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        await replica.misbehave(slow_ms=2, **fault)
        askers = Askers(world, replica)
        await until(lambda: 200 in askers.statuses, "it answers")
        await trainer.publish()
        assert await replica.exit_code() == 70
        await askers.stop()
    failed = world.of("replica-0", Transition.ACTIVATION_FAILED)
    assert [(r.phase, r.target, r.serving) for r in failed] == [(Phase.FAILED, ref(1), None)]


async def test_half_an_update_is_caught_by_the_publication_s_probes(world: World) -> None:
    replica = await world.replica(command=misbehaving())
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        good = to_bf16(init(SMALL, 41))
        done = await asyncio.to_thread(lambda: trainer.publisher.publish(good, probes=[probe_of(good)]))
        version = trainer.note(done)
        await replica.serves(version)
        assert (await replica.generate())[0] == 200

        await replica.misbehave(half_update=True, slow_ms=2)
        askers = Askers(world, replica)
        bad = to_bf16(init(SMALL, 42))
        await asyncio.to_thread(lambda: trainer.publisher.publish(bad, probes=[probe_of(bad)]))
        assert await replica.exit_code() == 70
        await askers.stop()
    failed = world.of("replica-0", Transition.ACTIVATION_FAILED)[-1]
    assert (failed.phase, failed.target) == (Phase.FAILED, ref(2))
    assert "probe" in (failed.error or "")


def probe_of(params: Any) -> dict[str, Any]:
    """The greedy continuation of a prompt under the weights, as a trainer would compute it."""
    weights, prompt = to_f32(params), encode("probe")
    output: list[int] = []
    logprobs: list[float] = []
    for _ in range(6):
        contexts = contexts_of((prompt, [*output, 0]), context_size(weights))[-1:]
        row = log_softmax(logits(weights, contexts))[0]
        output.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return {"input_ids": prompt, "output_ids": output, "logprobs": logprobs, "tolerance": 0.01}


async def test_an_engine_that_dies_while_serving_ends_the_replica(world: World) -> None:
    replica = await world.replica(command=misbehaving())
    async with world.trainer():
        await replica.serves(ref(0))
    with pytest.raises(aiohttp.ClientError):
        await replica.misbehave(die="now")
    assert await replica.exit_code() == 70
    left = world.of("replica-0", Transition.LEFT)[-1]
    assert (left.phase, left.target) == (Phase.FAILED, None)
    assert "engine ended" in (left.error or "")


async def test_a_version_that_failed_here_is_held_back_from_the_next_life(world: World) -> None:
    """With one replica one failure is the whole budget: the replacement takes the version before."""
    replica = await world.replica(command=misbehaving())
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        await replica.misbehave(die="during_load")
        await trainer.publish()
        assert await replica.exit_code() == 70
        second = await world.replica()
        await second.serves(ref(0))
        assert (await second.generate())[0] == 200
        await second.serves(await trainer.publish())


async def test_a_version_that_ends_engines_does_not_take_the_fleet_down(world: World) -> None:
    async with world.trainer() as trainer:
        replicas = await _three_whose_engines_die_loading(world)
        poison = await trainer.publish()
        first = await _first_to_end(replicas)
        assert first.task.result() == 70
        left = [replica for replica in replicas if replica is not first]
        for replica in left:
            await eventually(partial(_holds, replica), "it holds the version back")
            assert (await replica.info())["serving"]["number"] == 0
            assert (await replica.generate())[0] == 200
            await replica.misbehave(die=None)
        good = await trainer.publish()
        for replica in left:
            await replica.serves(good)
    assert not any(r.serving == poison for r in world.records)


async def test_nor_where_who_failed_is_restarted_under_its_name(world: World) -> None:
    """D12: as a supervisor does it. The new life speaks of the failure no more, and all others still hold the version back."""
    async with world.trainer() as trainer:
        replicas = await _three_whose_engines_die_loading(world)
        poison = await trainer.publish()
        first = await _first_to_end(replicas)
        reborn = await world.replica(first.config.replica, command=misbehaving())
        await reborn.serves(ref(0))
        left = [replica for replica in replicas if replica is not first]
        for replica in left:
            await eventually(partial(_holds, replica), "it holds the version back")
        again = len(world.records)
        await until(lambda: len(world.records) > again + 24, "all spoke again")
        for replica in (*left, reborn):
            assert not replica.task.done()
            assert (await replica.generate())[0] == 200
            await replica.misbehave(die=None)
        good = await trainer.publish()
        for replica in (*left, reborn):
            await replica.serves(good)
    assert not any(r.serving == poison for r in world.records)


async def _three_whose_engines_die_loading(world: World) -> list[Running]:
    """They serve version 0, and everybody knows."""
    names = [f"replica-{n}" for n in range(3)]
    replicas = await asyncio.gather(*(world.replica(name, command=misbehaving()) for name in names))
    for replica in replicas:
        await replica.serves(ref(0))
        await replica.misbehave(die="during_load")
    await until(lambda: all(world.of(name, Transition.ACTIVATED) for name in names), "all told that they serve")
    return replicas


async def _first_to_end(replicas: list[Running]) -> Running:
    done, _ = await asyncio.wait({r.task for r in replicas}, return_when=asyncio.FIRST_COMPLETED, timeout=STEP_SECONDS)
    return next(replica for replica in replicas if replica.task in done)


async def _holds(replica: Running) -> bool:
    return "held back" in ((await replica.info())["last_error"] or "")


async def test_an_engine_that_cannot_be_started_is_not_held_against_the_version(world: World) -> None:
    broken = await world.replica(command=("no-such-program", "{model}", "{port}"))
    async with world.trainer():
        assert await broken.exit_code() == 70
        assert [(r.phase, r.target) for r in world.of("replica-0", Transition.LEFT)] == [(Phase.FAILED, None)]
        await (await world.replica()).serves(ref(0))
