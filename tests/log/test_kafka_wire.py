"""The wire between a client and three brokers is cut, slowed and reset: what a writer is told stays true."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from stitch.core.errors import OutcomeUnknown, Unavailable
from stitch.core.ids import Offset
from stitch.log import kafka
from stitch.log.kafka import KafkaLog
from stitch.log.port import Draft, Stream
from stitch.log.read import read_all
from tests.support.kafka import fresh_namespace
from tests.support.kafka_cluster import KafkaCluster
from tests.support.provision import eventually
from tests.support.toxiproxy import Wire

pytestmark = [pytest.mark.chaos, pytest.mark.kafka]

PATIENCE_S = 60.0
TOPIC = Stream.PUBLICATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One log, by two ways: `far` is behind the wire, `near` is not."""

    far: KafkaLog
    near: KafkaLog
    wire: Wire

    async def there(self) -> list[int]:
        return [int(record.value) for record in await read_all(self.near, TOPIC)]

    async def lands(self, number: int) -> None:
        async def landed() -> bool:
            return number in await self.there()

        await eventually(landed, f"{number} lands", timeout=PATIENCE_S)


@pytest.fixture
async def scene(kafka_cluster: KafkaCluster, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Scene]:
    caplog.set_level(logging.CRITICAL, logger="aiokafka")  # which says each of a thousand retries
    kafka_cluster.heal()
    url = fresh_namespace(kafka_cluster.servers)
    far_url = url.replace(kafka_cluster.servers, kafka_cluster.proxied)
    async with KafkaLog.of_url(url) as near, KafkaLog.of_url(far_url) as far:
        await near.setup(create=True)
        # So that both are connected.
        await near.append(Stream.ROLLOUTS, draft(0), timeout=PATIENCE_S)
        await far.append(TOPIC, draft(0), timeout=PATIENCE_S)
        yield Scene(far=far, near=near, wire=kafka_cluster.wire)
        kafka_cluster.wire.mend()


def draft(number: int) -> Draft:
    return Draft(key="p", value=b"%d" % number)


async def test_without_a_wire_nothing_is_ever_sent(scene: Scene, kafka_cluster: KafkaCluster) -> None:
    scene.wire.cut()
    async with KafkaLog.of_url(scene.far.url) as unconnected:
        for number in (1, 2):
            with pytest.raises(Unavailable):
                await unconnected.append(TOPIC, draft(number), timeout=0.5)
        scene.wire.mend()
        await unconnected.append(TOPIC, draft(3), timeout=PATIENCE_S)
    assert await scene.there() == [0, 3]


async def test_a_lost_acknowledgement_is_an_unknown_outcome(scene: Scene) -> None:
    scene.wire.poison("timeout", "downstream", timeout=0)  # answers stop; requests go through
    with pytest.raises(OutcomeUnknown):
        await scene.far.append(TOPIC, draft(1), timeout=1.0)
    await scene.lands(1)
    scene.wire.mend()
    await scene.far.append(TOPIC, draft(2), timeout=PATIENCE_S)
    assert await scene.there() == [0, 1, 2]


async def test_connections_reset_mid_append_make_no_second_copy(scene: Scene) -> None:
    scene.wire.poison("reset_peer", "downstream", timeout=0)  # each answer resets the connection, new ones as well
    appending = asyncio.create_task(scene.far.append(TOPIC, draft(1), timeout=PATIENCE_S))
    await scene.lands(1)
    assert not appending.done()
    scene.wire.mend()
    await appending
    await scene.far.append(TOPIC, draft(2), timeout=PATIENCE_S)
    assert await scene.there() == [0, 1, 2]


async def test_a_produce_may_land_after_its_time_out(scene: Scene) -> None:
    scene.wire.poison("latency", "upstream", latency=4000)
    with pytest.raises(OutcomeUnknown):
        await scene.far.append(TOPIC, draft(1), timeout=0.5)
    await scene.near.append(TOPIC, draft(2), timeout=PATIENCE_S)
    await scene.lands(1)
    scene.wire.mend()
    await scene.far.append(TOPIC, draft(3), timeout=PATIENCE_S)
    assert await scene.there() == [0, 2, 1, 3]


async def test_a_slow_wire_in_shreds_delays_and_changes_nothing(scene: Scene) -> None:
    scene.wire.poison("slicer", "downstream", average_size=700, size_variation=300, delay=100)
    scene.wire.poison("bandwidth", "downstream", rate=400)
    body = bytes(range(256)) * 1000
    for number in range(1, 4):
        await scene.near.append(TOPIC, Draft(key="p", value=b"%d" % number + body))
    async with asyncio.timeout(PATIENCE_S):
        found = await read_all(scene.far, TOPIC)
    assert [record.value for record in found] == [b"0", *(b"%d" % number + body for number in range(1, 4))]


async def test_a_reader_whose_connections_are_reset_misses_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "SILENCE_S", 1.5)
    followed: list[int] = []
    async with await scene.far.reader(TOPIC, Offset(0)) as reader:

        async def reads(count: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while len(followed) < count:
                    try:
                        followed.extend(int(record.value) for record in await reader.poll(1.0))
                    except Unavailable:
                        await asyncio.sleep(0.05)

        await reads(1)
        scene.wire.poison("reset_peer", "downstream", timeout=0)
        await scene.near.append(TOPIC, draft(1))
        with pytest.raises(Unavailable):
            await reader.poll(PATIENCE_S)
        scene.wire.mend()
        await reads(2)
        scene.wire.cut()
        await scene.near.append(TOPIC, draft(2))
        with pytest.raises(Unavailable):
            await reader.poll(PATIENCE_S)
        scene.wire.mend()
        await reads(3)
    assert followed == [0, 1, 2]


async def test_many_logs_close_together_although_no_broker_answers(scene: Scene) -> None:
    logs = [KafkaLog.of_url(scene.far.url) for _ in range(4)]
    for log in logs:
        await log.append(TOPIC, draft(1), timeout=PATIENCE_S)
        await log.bounds(TOPIC)
        await log.reader(TOPIC, Offset(0))
    scene.wire.poison("timeout", "downstream", timeout=0)
    sent = [asyncio.create_task(log.append(TOPIC, draft(2), timeout=PATIENCE_S)) for log in logs]
    await scene.lands(2)
    started = time.monotonic()
    await asyncio.gather(*(log.aclose() for log in logs))
    assert time.monotonic() - started < PATIENCE_S / 2
    for each in sent:
        each.cancel()
    await asyncio.gather(*sent, return_exceptions=True)
