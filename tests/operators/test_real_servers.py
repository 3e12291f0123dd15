"""Compaction and retention over Apache Kafka and an S3 server, while a trainer publishes and a replica follows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stitch.log.opening import open_log
from stitch.operators.versions import added_anchors
from stitch.store.opening import open_store
from stitch.trainer.publisher import Publisher
from stitch.weights.safetensors import open_checkpoint
from stitch.weights.staging import Staging
from tests.operators.published import POLICY
from tests.operators.world import World, numbers
from tests.trainer.places import Place, weights

pytestmark = [pytest.mark.integration, pytest.mark.kafka, pytest.mark.s3]

ROUNDS = 5
PER_ROUND = 3
RETAIN = 2 * PER_ROUND
"""So that what a replica read at the beginning of a round is kept to its end, with no grace at all."""


class Replica:
    """Stages what `latest` names, tells so before and after, and activates it."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.staging = Staging(folder, world.store)
        self.served: list[int] = []

    async def join(self) -> None:
        self.state = await self.world.replica("live")

    async def follow(self) -> None:
        policy = await self.world.policy()
        target = policy.latest_target()
        assert target is not None
        self.state = await self.world.speak(self.state, target=target)
        version = policy.versions[target]
        anchors = added_anchors(policy, target)
        staged = await asyncio.to_thread(self.staging.stage, target.of(POLICY), version.manifest, anchors=anchors)
        self.staging.mark_active(staged)
        with open_checkpoint(staged.path) as found:
            assert found.array("body").tobytes() == weights(target.number)["body"].tobytes()
        self.state = await self.world.speak(self.state, serving=target, staged=None)
        self.served.append(target.number)


async def test_beside_a_live_trainer_and_a_live_replica(kafka_log_url: str, s3_store_url: str, tmp_path: Path) -> None:
    async with open_log(kafka_log_url) as log:
        await log.setup(create=True)
        with open_store(s3_store_url) as store:
            world = World(store, log=log)
            replica = Replica(world, tmp_path)
            await replica.join()
            with replica.staging, await asyncio.to_thread(Place(kafka_log_url, s3_store_url).publisher) as publisher:
                await asyncio.to_thread(_publish, publisher)
                for number in range(ROUNDS):
                    operate = world.compact(every=4) if number % 2 else world.gc(retain=RETAIN, grace_ms=0)
                    await asyncio.gather(asyncio.to_thread(_publish, publisher), operate, replica.follow())
                    await world.check()
                await asyncio.to_thread(_publish, publisher)
                await world.compact(every=2)
                report = await world.gc(retain=RETAIN, grace_ms=1)
            assert report.retired
            assert report.waiting.objects, "the log's newest record is the retirement itself"
            report = await world.gc(retain=RETAIN, grace_ms=1)
            assert report.deleted, "a log that is silent tells its time where it is asked"
            policy = await world.policy()
            tip = (ROUNDS + 2) * PER_ROUND - 1
            assert policy.tip is not None
            assert policy.tip.number == tip
            assert replica.served == sorted(replica.served)
            assert len(replica.served) == ROUNDS
            assert any(version.anchor is not None for version in policy.versions.values())
            assert {held.ref.number for held in report.kept} == numbers(policy, retired=False)
            assert len(numbers(policy, retired=True)) >= PER_ROUND
            held = {int(key.split("/")[2].split(".")[0]) for key in world.held()}
            assert held == numbers(policy, retired=False), "what was retired is gone, and nothing else"
            await world.check()
            pointer = await world.latest_pointer()
            assert pointer is not None
            assert pointer.target.number == tip
            assert pointer.anchor_manifest.key in world.held()


def _publish(publisher: Publisher) -> None:
    for _ in range(PER_ROUND):
        number = publisher.next_number
        assert publisher.publish(weights(number)).ref.number == number
