"""What is particular to Kafka: topics with wrong settings, transactions of strangers, brokers that stop answering."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import UnknownTopicOrPartitionError

from stitch.core.errors import InvalidRequest, OutcomeUnknown, Unavailable
from stitch.core.ids import Offset
from stitch.log import kafka_topics
from stitch.log.kafka import KafkaLog
from stitch.log.kafka_settings import KafkaSettings
from stitch.log.kafka_topics import wanted
from stitch.log.port import Draft, Stream
from stitch.log.read import read_all
from tests.support import provision
from tests.support.kafka import Kafka, connected

pytestmark = [pytest.mark.integration, pytest.mark.kafka]

PATIENCE_S = 30.0


@pytest.fixture
async def log(kafka_log_url: str) -> AsyncIterator[KafkaLog]:
    """A namespace without topics."""
    async with KafkaLog.of_url(kafka_log_url) as log:
        yield log


@pytest.fixture
async def admin(kafka_url: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_url)
    await admin.start()
    yield admin
    await admin.close()


def topic(log: KafkaLog, stream: Stream) -> str:
    return f"{log.url.rpartition('/')[2]}.{stream.value}"


def draft(number: int) -> Draft:
    return Draft(key="p", value=b"%d" % number)


async def numbers(log: KafkaLog) -> list[int]:
    return [int(record.value) for record in await read_all(log, Stream.PUBLICATIONS)]


@pytest.mark.parametrize(
    ("stream", "wrong"),
    [
        (Stream.PUBLICATIONS, {"cleanup.policy": "compact"}),
        (Stream.PUBLICATIONS, {"retention.ms": "604800000"}),
        (Stream.PUBLICATIONS, {"retention.bytes": "1000000"}),
        (Stream.POINTERS, {"cleanup.policy": "compact,delete"}),
        (Stream.ACTIVATIONS, {"message.timestamp.type": "CreateTime"}),
        (Stream.ROLLOUTS, {"unclean.leader.election.enable": "true"}),
        (Stream.PUBLICATIONS, {"compression.type": "zstd"}),  # for which readers would need a library that they may not have
    ],
)
async def test_settings_that_lose_records_are_refused_with_their_mend(
    log: KafkaLog, admin: AIOKafkaAdminClient, stream: Stream, wrong: dict[str, str]
) -> None:
    await log.setup(create=True)
    changed = ConfigResource(ConfigResourceType.TOPIC, topic(log, stream), {**wanted(stream, 1), **wrong})
    await admin.alter_configs([changed])
    ((key, value),) = wrong.items()

    async def refused() -> bool:
        try:
            await log.setup(create=True)
        except InvalidRequest as error:
            message = str(error)
        else:
            return False  # brokers learn of new settings in a moment
        assert f"{topic(log, stream)} has {key}={value};" in message
        assert f"--entity-name {topic(log, stream)} --add-config {key}={wanted(stream, 1)[key]}" in message
        return True

    await provision.eventually(refused, "setup refuses the topic", timeout=PATIENCE_S)


async def test_a_topic_of_several_partitions_is_refused(log: KafkaLog, admin: AIOKafkaAdminClient) -> None:
    stream = Stream.PUBLICATIONS
    await admin.create_topics([NewTopic(topic(log, stream), 2, 1, topic_configs=wanted(stream, 1))])
    with pytest.raises(InvalidRequest, match="has 2 partitions and must have one"):
        await log.setup(create=True)


async def test_only_what_is_missing_is_made(log: KafkaLog, admin: AIOKafkaAdminClient) -> None:
    kept = {**wanted(Stream.ROLLOUTS, 1), "retention.ms": "3600000"}
    await admin.create_topics([NewTopic(topic(log, Stream.ROLLOUTS), 1, 1, topic_configs=kept)])

    async def refused() -> bool:
        with pytest.raises(InvalidRequest, match="lacks") as refusal:
            await log.setup(create=False)
        assert topic(log, Stream.POINTERS) in str(refusal.value)
        return topic(log, Stream.ROLLOUTS) not in str(refusal.value)  # brokers learn of a new topic in a moment

    await provision.eventually(refused, "what is there is not missed", timeout=PATIENCE_S)
    await log.setup(create=True)
    (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic(log, Stream.ROLLOUTS))])
    settings = {entry[0]: entry[1] for entry in answer.resources[0][4]}
    assert settings["retention.ms"] == "3600000"


def test_a_replicated_log_needs_two_replicas_for_each_append() -> None:
    for stream in Stream:
        assert wanted(stream, 1)["min.insync.replicas"] == "1"
        assert wanted(stream, 3)["min.insync.replicas"] == "2"


async def test_a_topic_that_a_broker_does_not_know_yet_is_not_missed(log: KafkaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers learn of new topics one after another, and each question may go to another one."""
    await log.setup(create=True)
    describe = kafka_topics._describe
    asked = 0

    async def late(admin: object, settings: KafkaSettings) -> dict[Stream, Any]:
        nonlocal asked
        asked += 1
        found = await describe(admin, settings)
        if asked == 1:
            raise UnknownTopicOrPartitionError("not yet")
        return {stream: topic for stream, topic in found.items() if asked > 2 or stream is not Stream.ACTIVATIONS}

    monkeypatch.setattr(kafka_topics, "_describe", late)
    await log.setup(create=False)
    assert asked == 3


async def test_the_broker_gives_the_time(log: KafkaLog, kafka_url: str) -> None:
    await log.setup(create=True)
    async with AIOKafkaProducer(bootstrap_servers=kafka_url) as stranger:
        await stranger.send_and_wait(topic(log, Stream.ACTIVATIONS), b"x", key=None, timestamp_ms=1)
    newest = await log.newest(Stream.ACTIVATIONS)
    assert newest is not None
    assert newest.time_ms > 1_600_000_000_000
    assert newest.key == ""


async def test_a_trailing_control_batch_holds_nobody_back(log: KafkaLog, kafka_url: str) -> None:
    await log.setup(create=True)
    name = topic(log, Stream.PUBLICATIONS)
    reader = await log.reader(Stream.PUBLICATIONS, Offset(0))
    async with AIOKafkaProducer(bootstrap_servers=kafka_url, transactional_id=name) as stranger:
        for number in range(2):
            async with stranger.transaction():
                await stranger.send_and_wait(name, b"%d" % number)
    bounds = await log.bounds(Stream.PUBLICATIONS)
    newest = await log.newest(Stream.PUBLICATIONS)
    assert newest is not None
    assert newest.offset == bounds.end - 2  # the marker is the last entry
    assert await numbers(log) == [0, 1]
    async with asyncio.timeout(PATIENCE_S):
        while reader.position < bounds.end:
            await reader.poll(0.5)
    # And a reader that begins at the marker itself.
    async with await log.reader(Stream.PUBLICATIONS, Offset(bounds.end - 1)) as late, asyncio.timeout(PATIENCE_S):
        while late.position < bounds.end:
            assert await late.poll(0.5) == []


async def test_a_transaction_left_open_holds_nobody_back(log: KafkaLog, kafka_url: str) -> None:
    await log.setup(create=True)
    name = topic(log, Stream.PUBLICATIONS)
    async with AIOKafkaProducer(bootstrap_servers=kafka_url, transactional_id=name) as stranger:
        await stranger.begin_transaction()
        await stranger.send_and_wait(name, b"0")
        await log.append(Stream.PUBLICATIONS, draft(1))
        assert await numbers(log) == [0, 1]
        await stranger.abort_transaction()


async def test_a_namespace_without_topics_names_the_command(log: KafkaLog) -> None:
    with pytest.raises(Unavailable, match="stitch topics create"):
        await log.append(Stream.PUBLICATIONS, draft(0), timeout=2.0)


async def test_without_a_broker_everything_is_unavailable_in_time() -> None:
    async with KafkaLog.of_url(f"kafka://127.0.0.1:{provision.free_port()}/ns") as log:
        started = time.monotonic()
        with pytest.raises(Unavailable):
            await log.append(Stream.PUBLICATIONS, draft(0), timeout=1.0)
        with pytest.raises(Unavailable):
            await log.bounds(Stream.PUBLICATIONS)
        with pytest.raises(Unavailable):
            await log.reader(Stream.PUBLICATIONS, Offset(0))
        with pytest.raises(Unavailable):
            await log.setup(create=True)
        assert time.monotonic() - started < PATIENCE_S


@pytest.mark.chaos
async def test_a_paused_broker_is_survived(log: KafkaLog, kafka_server: Kafka) -> None:
    broker = kafka_server.broker
    if broker is None:
        pytest.skip("only a broker that this run started may be paused")
    await log.setup(create=True)
    await log.append(Stream.PUBLICATIONS, draft(0))
    reader = await log.reader(Stream.PUBLICATIONS, Offset(0))
    assert [int(record.value) for record in await reader.poll(PATIENCE_S)] == [0]
    unknown = set()
    broker.pause()
    try:
        for number in range(1, 4):
            started = time.monotonic()
            try:
                await log.append(Stream.PUBLICATIONS, draft(number), timeout=1.5)
            except OutcomeUnknown:
                unknown.add(number)
            except Unavailable:
                pass
            else:
                pytest.fail("acknowledged by a paused broker")
            assert time.monotonic() - started < 1.5 + PATIENCE_S
        # The connected producer had taken the first one; without an answer to anything a new one takes none.
        assert unknown == {1}
        with pytest.raises(Unavailable):
            await reader.poll(PATIENCE_S)
    finally:
        broker.resume()
    await log.append(Stream.PUBLICATIONS, draft(9), timeout=PATIENCE_S)
    there = await numbers(log)
    # What is unknown may have landed, once or not at all; what was refused has not.
    assert [number for number in there if number not in unknown] == [0, 9]
    assert all(there.count(number) <= 1 for number in unknown)
    followed: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(followed) < len(there) - 1:
            followed += [int(record.value) for record in await reader.poll(1.0)]
    assert followed == there[1:]


# --- connections -----------------------------------------------------------------------------------------------------------------


async def test_a_connection_that_uvloop_closed_is_made_anew(log: KafkaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment before aiokafka notices; uvloop says so by a RuntimeError."""
    await log.setup(create=True)
    assert (await log.bounds(Stream.PUBLICATIONS)).end == 0
    consumer, _ = await log._asker.started()
    (connection,) = consumer._client._conns.values()

    def write(data: bytes) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(connection._writer, "write", write)
    assert (await log.bounds(Stream.PUBLICATIONS)).end == 0
    assert not connection.connected()


async def test_a_question_under_way_is_answered_although_another_gave_the_client_up(log: KafkaLog) -> None:
    await log.setup(create=True)
    put, go_on = asyncio.Event(), asyncio.Event()

    async def question(consumer: AIOKafkaConsumer) -> int:
        put.set()
        await go_on.wait()
        partition = log._partition(Stream.PUBLICATIONS)
        end: int = (await consumer.end_offsets([partition]))[partition]
        return end

    asking = asyncio.create_task(log._asker.ask(question))
    await put.wait()
    log._asker.discard()
    await log.append(Stream.PUBLICATIONS, draft(0))
    assert (await log.bounds(Stream.PUBLICATIONS)).end == 1
    go_on.set()
    assert await asking == 1
    await log.aclose()
    assert connected() == []


async def test_a_question_under_way_ends_with_the_log(log: KafkaLog) -> None:
    await log.setup(create=True)
    put = asyncio.Event()

    async def question(consumer: AIOKafkaConsumer) -> None:
        put.set()
        await asyncio.Event().wait()

    asking = asyncio.create_task(log._ask(question))
    await put.wait()
    await log.aclose()
    with pytest.raises(Unavailable, match="closed"):
        await asking
    assert connected() == []


@pytest.mark.parametrize("what", ["bounds", "reader", "append", "setup"])
async def test_what_is_cancelled_at_any_moment_leaves_no_connection_open(log: KafkaLog, kafka_log_url: str, what: str) -> None:
    await log.setup(create=True)
    await log.aclose()
    for moment in range(30):
        async with KafkaLog.of_url(kafka_log_url) as one:
            calls = {
                "bounds": lambda log: log.bounds(Stream.PUBLICATIONS),
                "reader": lambda log: log.reader(Stream.PUBLICATIONS, Offset(0)),
                "append": lambda log: log.append(Stream.PUBLICATIONS, draft(0)),
                "setup": lambda log: log.setup(create=False),
            }
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(moment / 1000):
                    await calls[what](one)
        assert connected() == []
