"""Many requests of every kind while versions come: no answer is untruthful (I3), none breaks its constraint (I4)."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from stitch.http.sse import SseParser
from stitch.replica.config import Mode
from tests.replica.world import Running, World, check_truth, misbehaving, ref
from tests.support.provision import START_TIMEOUT_S

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

VERSIONS = 10


class Client:
    """One of many; what it asks for is drawn from its own seed."""

    def __init__(self, replica: Running, seed: int) -> None:
        self.statuses: Counter[int] = Counter()
        self.mixed = 0
        """Answers that more than one version computed."""
        self._replica, self._draw = replica, random.Random(seed)

    async def ask_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            number = self._draw.randrange(VERSIONS)
            constraints: list[dict[str, Any]] = [{}, {"run": "r1"}, {"min_version": number}, {"exact_version": number}]
            constraint = self._draw.choice(constraints)
            ask = self._streamed if self._draw.random() < 0.5 else self._whole
            status, answer = await ask(self._draw.randrange(1, 80), constraint)
            self.statuses[status] += 1
            if status == 200:
                self._check(answer, constraint)
            else:
                assert answer["error"]["retryable"] is True
                await asyncio.sleep(0.005)

    def _check(self, answer: Any, constraint: dict[str, Any]) -> None:
        check_truth(self._replica.world, answer)
        versions = [int(span["version"]) for span in answer["meta_info"]["weight_versions"]]
        self.mixed += len(versions) > 1
        assert min(versions) >= constraint.get("min_version", 0)
        if "exact_version" in constraint:
            assert versions == [constraint["exact_version"]]

    async def _whole(self, tokens: int, constraint: dict[str, Any]) -> tuple[int, Any]:
        return await self._replica.generate(tokens=tokens, weight_version=constraint)

    async def _streamed(self, tokens: int, constraint: dict[str, Any]) -> tuple[int, Any]:
        body = {
            "text": "x",
            "stream": True,
            "weight_version": constraint,
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        }
        async with self._replica.world.http.post(self._replica.url + "/generate", json=body) as response:
            if response.status != 200:
                return response.status, json.loads(await response.read())
            parser, events = SseParser(), []
            async for chunk in response.content.iter_any():
                events += parser.feed(chunk)
            answer = json.loads(events[-2].data or b"")
            assert int(response.headers["X-Stitch-Version-Start"]) == answer["meta_info"]["weight_version_start"]
            return 200, answer


@pytest.mark.parametrize("mode", Mode)
async def test_every_answer_is_truthful_and_keeps_its_constraint(world: World, mode: Mode) -> None:
    replica = await world.replica(command=misbehaving(), capacity=64, mode=mode)
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        await replica.misbehave(slow_ms=1)
        stop = asyncio.Event()
        clients = [Client(replica, seed) for seed in range(12)]
        asking = [asyncio.create_task(client.ask_until(stop)) for client in clients]
        for number in range(1, VERSIONS):
            version = await trainer.publish()
            if number % 3 == 0:
                await replica.serves(version)  # the others come as fast as they may, and some are passed over
        await replica.serves(version)
        # A busy machine answers fewer in that time: it goes on until there is enough to judge by.
        async with asyncio.timeout(START_TIMEOUT_S):
            while sum(client.statuses[200] for client in clients) <= 50 or (
                mode is Mode.IN_PLACE and not any(client.mixed for client in clients)
            ):
                await replica.serves(await trainer.publish())
        stop.set()
        await asyncio.gather(*asking)
    statuses = sum((client.statuses for client in clients), Counter[int]())
    assert set(statuses) <= {200, 409}
    mixed = sum(client.mixed for client in clients)
    assert mixed > 0 if mode is Mode.IN_PLACE else mixed == 0
    _, metrics = await replica.get("/metrics")
    assert "stitch_replica_untruthful_total 0\n" in metrics
