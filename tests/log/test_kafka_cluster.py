"""Three brokers, of which some or all are killed or stand still: nothing acknowledged is lost, nothing refused is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import pytest

from stitch.core.errors import InvalidRequest, Unavailable
from stitch.core.ids import Offset
from stitch.log import kafka, kafka_clients, kafka_topics
from stitch.log.events import append
from stitch.log.follow import Follower
from stitch.log.kafka import KafkaLog
from stitch.log.port import Bounds, Copies, Stream
from tests.support.examples import examples
from tests.support.kafka import connected, fresh_namespace
from tests.support.kafka_cluster import KafkaCluster
from tests.support.ledger import Ledger, read_along
from tests.support.provision import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.kafka]

PATIENCE_S = 60.0
APPEND_S = 2.0
"""Below an election's length, so that some appends end unknown."""
TOPIC = Stream.PUBLICATIONS


@pytest.fixture
def cluster(kafka_cluster: KafkaCluster, caplog: pytest.LogCaptureFixture) -> KafkaCluster:
    caplog.set_level(logging.CRITICAL, logger="aiokafka")  # which says each of a thousand retries
    kafka_cluster.heal()
    return kafka_cluster


@pytest.fixture
async def log(cluster: KafkaCluster) -> AsyncIterator[KafkaLog]:
    async with KafkaLog.of_url(f"{fresh_namespace(cluster.servers)}?replication={len(cluster.brokers)}") as log:
        await log.setup(create=True)
        await cluster.in_sync(topic(log))
        yield log


def topic(log: KafkaLog) -> str:
    return f"{log.url.rpartition('/')[2]}.{TOPIC}"


@contextlib.asynccontextmanager
async def reading_along(log: KafkaLog) -> AsyncIterator[list[int]]:
    seen: list[int] = []
    task = asyncio.create_task(read_along(log, seen))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def check(ledger: Ledger, log: KafkaLog, seen: list[int]) -> None:
    """One more append, after which an old one can land no more; then log, writer and reader agree."""
    assert await ledger.append(PATIENCE_S) == "acknowledged"
    there = await ledger.check(log)
    await eventually(lambda: len(seen) >= len(there), "the reader is abreast", timeout=PATIENCE_S)
    assert seen == there


async def test_the_leader_is_killed_mid_append_and_mid_read(cluster: KafkaCluster, log: KafkaLog) -> None:
    ledger = Ledger(log)
    async with reading_along(log) as seen:
        await ledger.write_until(lambda: len(ledger.acknowledged) >= 20, APPEND_S)
        writing = asyncio.create_task(ledger.write_until(lambda: len(ledger.acknowledged) >= 60, APPEND_S))
        await eventually(lambda: len(ledger.acknowledged) >= 30, "more is written")
        leader = await cluster.leader(topic(log))
        cluster.kill(leader)
        async with asyncio.timeout(PATIENCE_S):
            await writing
        assert await cluster.leader(topic(log)) is not leader
        await check(ledger, log, seen)


async def test_too_few_replicas_acknowledge_nothing_and_a_whole_restart_loses_nothing(cluster: KafkaCluster, log: KafkaLog) -> None:
    ledger = Ledger(log)
    async with reading_along(log) as seen:
        await ledger.write_until(lambda: len(ledger.acknowledged) >= 20, APPEND_S)
        leader = await cluster.leader(topic(log))
        followers = [broker for broker in cluster.brokers if broker is not leader]
        cluster.kill(*followers)
        for _ in range(2):
            assert await ledger.append(APPEND_S) != "acknowledged"
        cluster.kill(leader)
        assert await ledger.append(APPEND_S) != "acknowledged"
        with pytest.raises(Unavailable):
            await log.bounds(TOPIC)
        await cluster.start(*cluster.brokers)
        await check(ledger, log, seen)


async def test_a_leader_that_stood_still_longer_than_every_time_out(cluster: KafkaCluster, log: KafkaLog) -> None:
    pause_s = max(kafka.SILENCE_S, kafka_clients.REQUEST_TIMEOUT_MS / 1000) + 1.0
    ledger = Ledger(log)
    loop = asyncio.get_running_loop()
    async with reading_along(log) as seen:
        await ledger.write_until(lambda: len(ledger.acknowledged) >= 20, APPEND_S)
        leader = await cluster.leader(topic(log))
        cluster.pause(leader)
        until = loop.time() + pause_s
        await ledger.write_until(lambda: loop.time() > until, APPEND_S)
        cluster.resume(leader)
        await check(ledger, log, seen)
    assert {*ledger.unknown, *ledger.refused}, "nobody met the broker that stood still"


async def test_a_leader_that_does_not_know_that_it_was_deposed_is_not_believed(
    cluster: KafkaCluster, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, deposed, and gone on where it reaches nobody: it answers as if nothing had been written since."""
    monkeypatch.setattr(kafka, "DEPOSED_S", PATIENCE_S)
    ledger = Ledger(log)
    await ledger.write_until(lambda: len(ledger.acknowledged) >= 20, APPEND_S)
    deposed = await cluster.leader(topic(log))
    others = [broker for broker in cluster.brokers if broker is not deposed]
    async with KafkaLog.of_url(f"kafka://127.0.0.1:{deposed.plain}/{log.url.rpartition('/')[2]}") as believer:
        await believer.bounds(TOPIC)
        cluster.pause(deposed)
        await ledger.write_until(lambda: len(ledger.acknowledged) >= 40, APPEND_S)
        end = (await log.bounds(TOPIC)).end
        cluster.pause(*others)
        cluster.resume(deposed)
        assert (await believer.bounds(TOPIC)).end < end
        asking = asyncio.create_task(believer.bounds_reaching(TOPIC, end))
        cluster.resume(*others)
        assert (await asking).end >= end
    assert await ledger.append(PATIENCE_S) == "acknowledged"
    await ledger.check(log)


async def test_a_broker_that_knew_less_than_was_read_is_no_proof_of_loss(
    cluster: KafkaCluster, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "DEPOSED_S", PATIENCE_S)
    ledger = Ledger(log)
    await ledger.write_until(lambda: len(ledger.acknowledged) >= 3, PATIENCE_S)
    asked = spied(log, monkeypatch)
    async with await log.reader(TOPIC, Offset(5)) as reader:  # as one that read so far from the broker that leads in truth
        polling = asyncio.create_task(reader.poll(PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()
        await ledger.write_until(lambda: len(ledger.acknowledged) >= 6, PATIENCE_S)
        with pytest.raises(Unavailable, match="knew publications less far than it was read"):
            await polling
        assert [int(record.value) for record in await reader.poll(PATIENCE_S)] == [5]


def spied(log: KafkaLog, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once the log was asked for bounds that reach an offset."""
    asked, ask = asyncio.Event(), log.bounds_reaching

    async def spy(stream: Stream, offset: Offset) -> Bounds:
        asked.set()
        return await ask(stream, offset)

    monkeypatch.setattr(log, "bounds_reaching", spy)
    return asked


async def test_a_follower_says_how_far_behind_it_is_while_all_brokers_stand_still(
    cluster: KafkaCluster, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "SILENCE_S", 2.0)
    follower: Follower[None] = Follower(log, TOPIC, None, lambda state, event, at: state)
    assert (follower.lag, follower.age) == (None, None)
    task = asyncio.create_task(follower.run())
    try:
        for _ in range(3):
            await append(log, examples()["run_claimed"], source="test")
        await follower.catch_up(PATIENCE_S)
        await eventually(lambda: follower.lag == 0, "nothing is missing")
        assert follower.position == Offset(3)
        cluster.pause(*cluster.brokers)
        await eventually(lambda: not follower.healthy, "the follower notices", timeout=PATIENCE_S)
        assert follower.age is not None
        assert follower.age > 2.0
        cluster.heal()
        await eventually(lambda: follower.healthy and (follower.age or 0.0) < 2.0, "it is abreast again", timeout=PATIENCE_S)
    finally:
        cluster.heal()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_readers_that_gave_up_on_a_dead_leader_leave_nothing_behind(
    cluster: KafkaCluster, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clients wait to try again when they are ended."""
    monkeypatch.setattr(kafka, "SILENCE_S", 1.0)
    reader = await log.reader(TOPIC, Offset(0))
    await reader.poll(0)
    cluster.kill(await cluster.leader(topic(log)))

    async def given_up() -> bool:
        try:
            await reader.poll(0.1)
        except Unavailable:
            return True
        return False

    await eventually(given_up, "the reader gives up", timeout=PATIENCE_S)
    await log.aclose()
    assert connected() == []
    assert [task for task in asyncio.all_tasks() if "AIOKafka" in repr(task.get_coro())] == []


async def test_a_broker_that_is_not_the_leader_is_asked_for_a_bounded_time(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose metadata stay wrong asks the wrong broker again and again; it is replaced by one that knows better."""
    monkeypatch.setattr(kafka, "SILENCE_S", 2.0)
    async with KafkaLog.of_url(f"{fresh_namespace(cluster.servers)}?replication=1") as log:
        await log.setup(create=True)
        leader = await cluster.leader(topic(log))
        wrong = next(broker.node for broker in cluster.brokers if broker is not leader)
        async with await log.reader(TOPIC, Offset(0)) as reader:
            assert await reader.poll(0.1) == []
            assert isinstance(reader, kafka._KafkaReader)
            stuck = reader._consumer._consumer
            monkeypatch.setattr(stuck._client.cluster, "leader_for_partition", lambda partition: wrong)
            assert await reader.poll(1.0) == []  # until the leader has answered what it was asked before
            await append(log, examples()["run_claimed"], source="test")
            started = time.monotonic()
            with pytest.raises(Unavailable, match="no answer"):
                await reader.poll(PATIENCE_S)
            assert time.monotonic() - started < PATIENCE_S / 2
            assert len(await reader.poll(PATIENCE_S)) == 1
            assert reader._consumer._consumer is not stuck


# --- how many copies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "copies"), [("", Copies(2, 1)), ("?replication=3", Copies(3, 2)), ("?replication=1", Copies(1, 1))]
)
async def test_topics_get_the_copies_that_are_asked_for_else_what_the_brokers_take_themselves(
    cluster: KafkaCluster, asked: str, copies: Copies
) -> None:
    async with KafkaLog.of_url(f"{fresh_namespace(cluster.servers)}{asked}") as log:
        assert await log.setup(create=True) == copies
        assert await log.setup(create=False) == copies


async def test_a_broker_that_is_down_does_not_cost_copies_for_ever(cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the brokers' own default is Kafka's, one: it counts who belongs to the cluster, not who is up."""
    monkeypatch.setattr(kafka_topics, "_default_replication", _one)
    cluster.kill(cluster.brokers[0])

    async def two_count() -> bool:
        return await cluster.counted() == 2

    await eventually(two_count, "the dead one counts no more", timeout=PATIENCE_S)
    async with KafkaLog.of_url(fresh_namespace(cluster.servers)) as log:
        assert await log.setup(create=True) == Copies(3, 2)
        await append(log, examples()["run_claimed"], source="test")


async def test_who_cannot_know_how_many_copies_are_meant_asks(cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_topics, "_default_replication", _one)
    monkeypatch.setattr(kafka_topics, "REPLICATED", 4)
    async with KafkaLog.of_url(fresh_namespace(cluster.servers)) as log:
        with pytest.raises(InvalidRequest, match=r"3 brokers up.*\?replication=4 once 4 are up, or \?replication=1"):
            await log.setup(create=True)
    async with KafkaLog.of_url(f"{fresh_namespace(cluster.servers)}?replication=4") as log:
        with pytest.raises(InvalidRequest, match="cannot keep 4 copies"):
            await log.setup(create=True)


async def _one(admin: object) -> int:
    return 1
