"""Clients that must be thrown away, topics that are not what they were, and doors that need a key."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.errors import OutOfOrderSequenceNumber
from aiokafka.producer.transaction_manager import PidAndEpoch

from stitch.core.errors import InvalidRequest, LogDiverged, OutcomeUnknown, Unavailable
from stitch.core.events import Event, RunClaimed
from stitch.core.ids import EventId, Offset
from stitch.core.lineage import Position
from stitch.log import kafka, kafka_append
from stitch.log.events import append
from stitch.log.events import draft as event_draft
from stitch.log.follow import Follower
from stitch.log.kafka import KafkaLog
from stitch.log.kafka_settings import parse_kafka_url
from stitch.log.kafka_topics import wanted
from stitch.log.port import Draft, EventLog, Stream
from stitch.log.read import read_all
from tests.support.examples import examples
from tests.support.kafka import fresh_namespace
from tests.support.kafka_cluster import PASSWORD, USER, KafkaCluster
from tests.support.provision import eventually

pytestmark = [pytest.mark.integration, pytest.mark.kafka]

PATIENCE_S = 60.0
TOPIC = Stream.PUBLICATIONS


def draft(number: int) -> Draft:
    return Draft(key="p", value=b"%d" % number)


async def numbers(log: EventLog) -> list[int]:
    return [int(record.value) for record in await read_all(log, TOPIC)]


def topic(log: EventLog, stream: Stream = TOPIC) -> str:
    return f"{log.url.rpartition('/')[2]}.{stream}"


@pytest.fixture
async def log(kafka_log_url: str) -> AsyncIterator[KafkaLog]:
    async with KafkaLog.of_url(kafka_log_url) as log:
        await log.setup(create=True)
        yield log


@pytest.fixture
def cluster(kafka_cluster: KafkaCluster, caplog: pytest.LogCaptureFixture) -> KafkaCluster:
    caplog.set_level(logging.CRITICAL, logger="aiokafka")
    kafka_cluster.heal()
    return kafka_cluster


# --- producers -------------------------------------------------------------------------------------------------------------------


async def test_a_producer_out_of_sequence_is_replaced(log: KafkaLog) -> None:
    for number in range(3):
        await log.append(TOPIC, draft(number))
    broken = log._appender._producer
    broken._txn_manager._sequence_numbers[TopicPartition(topic(log), 0)] += 7  # as if records between had been lost
    with pytest.raises(OutcomeUnknown, match="OutOfOrderSequence"):
        await log.append(TOPIC, draft(3))
    await log.append(TOPIC, draft(4))
    assert log._appender._producer is not broken
    assert await numbers(log) == [0, 1, 2, 4]


async def test_a_fenced_producer_is_replaced(log: KafkaLog) -> None:
    await log.append(TOPIC, draft(0))
    fenced = log._appender._producer
    own = fenced._txn_manager._pid_and_epoch
    sequences = dict(fenced._txn_manager._sequence_numbers)
    # A later epoch of the same producer writes, then the earlier one goes on.
    fenced._txn_manager._pid_and_epoch = PidAndEpoch(own.pid, own.epoch + 1)
    fenced._txn_manager._sequence_numbers.clear()
    await log.append(TOPIC, draft(1))
    fenced._txn_manager._pid_and_epoch = own
    fenced._txn_manager._sequence_numbers.update(sequences)
    with pytest.raises(OutcomeUnknown, match="ProducerFenced"):
        await log.append(TOPIC, draft(2))
    await log.append(TOPIC, draft(3))
    assert await numbers(log) == [0, 1, 3]


async def test_a_producer_that_was_idle_until_the_broker_forgot_it_goes_on(cluster: KafkaCluster) -> None:
    async with KafkaLog.of_url(fresh_namespace(cluster.servers)) as log:
        await log.setup(create=True)
        for number in range(3):
            await log.append(TOPIC, draft(number), timeout=PATIENCE_S)
        await cluster.forget_producers()
        for number in range(3, 6):
            await log.append(TOPIC, draft(number), timeout=PATIENCE_S)
        assert await numbers(log) == [0, 1, 2, 3, 4, 5]


async def test_only_a_producer_that_was_forgotten_writes_a_second_copy(cluster: KafkaCluster) -> None:
    """The same batch, sent again: known by its number, unless the brokers forgot whose number it is. Events carry ids for that."""
    async with KafkaLog.of_url(fresh_namespace(cluster.servers)) as log:
        await log.setup(create=True)
        await log.append(TOPIC, draft(0), timeout=PATIENCE_S)
        await _send_again(log)
        assert await numbers(log) == [0]
        await cluster.forget_producers()
        await _send_again(log)
        assert await numbers(log) == [0, 0]


async def _send_again(log: KafkaLog) -> None:
    """What it appended last, as a producer does whose answer was lost."""
    log._appender._producer._txn_manager._sequence_numbers[TopicPartition(topic(log), 0)] -= 1
    await log.append(TOPIC, draft(0), timeout=PATIENCE_S)


async def test_only_a_refusal_of_the_first_try_is_one(log: KafkaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that was sent before may be in the log, whatever the broker says to the next try (that access was revoked, say)."""
    monkeypatch.setattr(kafka_append, "REFUSALS", (OutOfOrderSequenceNumber,))
    counted = kafka_append._tries
    for refusal, earlier_tries in ((InvalidRequest, 0), (OutcomeUnknown, 1)):
        monkeypatch.setattr(kafka_append, "_tries", partial(_with_earlier, counted, earlier_tries))
        await log.append(TOPIC, draft(0))
        producer = log._appender._producer
        producer._txn_manager._sequence_numbers[TopicPartition(topic(log), 0)] += 7
        with pytest.raises(refusal):
            await log.append(TOPIC, draft(1))
        log._appender._discard(producer)  # its sequence is broken for good
    assert await numbers(log) == [0, 0]


def _with_earlier(counted: Callable[[Any, str], Callable[[], int]], earlier: int, producer: Any, name: str) -> Callable[[], int]:
    tries = counted(producer, name)
    return lambda: tries() + earlier


# --- topics ----------------------------------------------------------------------------------------------------------------------


def collect(state: tuple[str, ...], event: Event, at: Position) -> tuple[str, ...]:
    return (*state, event.event_id)


@asynccontextmanager
async def following(log: EventLog, stream: Stream = TOPIC, **options: Any) -> AsyncIterator[Follower[tuple[str, ...]]]:
    follower: Follower[tuple[str, ...]] = Follower(log, stream, (), collect, **options)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def claims(log: EventLog, *ids: str) -> None:
    claim = examples()["run_claimed"]
    assert isinstance(claim, RunClaimed)
    for name in ids:
        await append(log, replace(claim, event_id=EventId(name)), source="test", timeout=PATIENCE_S)


@asynccontextmanager
async def admin_of(servers: str) -> AsyncIterator[Any]:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def make_again(servers: str, name: str, replication: int) -> None:
    async with admin_of(servers) as admin:
        await admin.delete_topics([name])

        async def made() -> bool:
            answer = await admin.create_topics([NewTopic(name, 1, replication, topic_configs=wanted(TOPIC, replication))])
            return not any(code for _, code, *_ in answer.topic_errors)

        await eventually(made, f"{name} is made again", timeout=PATIENCE_S)


async def test_a_topic_made_again_and_shorter_is_noticed(log: KafkaLog, kafka_url: str, kafka_log_url: str) -> None:
    async with following(log) as follower:
        await claims(log, "a", "b", "c")
        assert await follower.catch_up(PATIENCE_S) == ("a", "b", "c")
        await make_again(kafka_url, topic(log), 1)
        async with KafkaLog.of_url(kafka_log_url) as other:
            await claims(other, "v")
            await frozen(follower)
        assert follower.state == ("a", "b", "c")


@pytest.mark.parametrize("by", ["topic id", "mark"])
async def test_a_topic_made_again_is_noticed_although_it_grew(
    cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """While the follower is cut off, so that it meets nothing but a topic that has all the offsets that it expects."""
    if by == "mark":  # as with brokers that know no topic ids
        monkeypatch.setattr(kafka, "topic_id", _no_id)
        monkeypatch.setattr(kafka, "SILENCE_S", 1.0)
    url = fresh_namespace(cluster.servers)
    far = url.replace(cluster.servers, cluster.proxied)
    async with KafkaLog.of_url(url) as near, KafkaLog.of_url(far) as log, following(log) as follower:
        await near.setup(create=True)
        await claims(near, "a", "b", "c")
        assert await follower.catch_up(PATIENCE_S) == ("a", "b", "c")
        cluster.wire.cut()
        if by == "mark":
            await eventually(lambda: not follower.healthy, "the reader is given up", timeout=PATIENCE_S)
        await make_again(cluster.servers, topic(log), 3)
        await claims(near, "v", "w", "x", "y", "z")
        cluster.wire.mend()
        await frozen(follower)
        assert follower.state == ("a", "b", "c"), "a record of the other topic was folded"


async def frozen(follower: Follower[Any]) -> None:
    await eventually(lambda: follower.frozen is not None, "the follower freezes", timeout=PATIENCE_S)
    assert isinstance(follower.frozen, LogDiverged)
    assert not follower.healthy
    with pytest.raises(LogDiverged):
        await follower.catch_up()


async def _no_id(client: Any, partition: Any) -> None:
    return None


async def test_an_offset_that_expired_is_said(log: KafkaLog, kafka_url: str) -> None:
    for number in range(5):
        await log.append(TOPIC, draft(number))
    async with admin_of(kafka_url) as admin:
        await admin.delete_records({TopicPartition(topic(log), 0): RecordsToDelete(before_offset=3)})
    assert (await log.bounds(TOPIC)).start == 3
    async with await log.reader(TOPIC, Offset(1)) as reader:
        with pytest.raises(LogDiverged, match="offset 1"):
            await reader.poll(PATIENCE_S)
    assert await numbers(log) == [3, 4]


async def test_a_follower_whose_offset_expired_goes_on_where_records_expire_by_design(log: KafkaLog, kafka_url: str) -> None:
    """And freezes where none may."""
    claim = examples()["run_claimed"]
    for stream in (Stream.ACTIVATIONS, TOPIC):
        for _ in range(5):
            await log.append(stream, event_draft(claim, source="test"))
    async with admin_of(kafka_url) as admin:
        for stream in (Stream.ACTIVATIONS, TOPIC):
            await admin.delete_records({TopicPartition(topic(log, stream), 0): RecordsToDelete(before_offset=3)})
    async with following(log, Stream.ACTIVATIONS, start=_from_one) as follower:
        assert len(await follower.catch_up(PATIENCE_S)) == 2
        assert follower.frozen is None
    async with following(log, TOPIC, start=_from_one) as follower:
        await frozen(follower)
        assert follower.state == ()


async def _from_one(log: EventLog) -> Offset:
    return Offset(1)


# --- TLS and SASL ----------------------------------------------------------------------------------------------------------------


def secure(cluster: KafkaCluster, **changed: str) -> str:
    options = {"security_protocol": "SASL_SSL", "ssl_cafile": str(cluster.certificate), **changed}
    return f"{fresh_namespace(cluster.secure)}?" + "&".join(f"{name}={quote(value)}" for name, value in options.items() if value)


async def test_a_log_behind_tls_and_a_password(cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STITCH_KAFKA_USERNAME", USER)
    monkeypatch.setenv("STITCH_KAFKA_PASSWORD", PASSWORD)
    url = secure(cluster)
    async with KafkaLog.of_url(url) as log:
        await log.setup(create=True)
        await log.append(TOPIC, draft(0), timeout=PATIENCE_S)
        await log.append(TOPIC, draft(1))
        assert await numbers(log) == [0, 1]
        newest = await log.newest(TOPIC)
        assert newest is not None
        assert newest.value == b"1"


@pytest.mark.parametrize("wrong", ["password", "authority", "protocol", "nobody"])
async def test_a_closed_door_says_so_in_time(cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("STITCH_KAFKA_USERNAME", "nobody" if wrong == "nobody" else USER)
    monkeypatch.setenv("STITCH_KAFKA_PASSWORD", "hunter2" if wrong == "password" else PASSWORD)
    changed = {"authority": {"ssl_cafile": ""}, "protocol": {"security_protocol": "PLAINTEXT", "ssl_cafile": ""}}
    url = secure(cluster, **changed.get(wrong, {}))
    started = time.monotonic()
    async with KafkaLog.of_url(url) as log:
        for ask in (
            log.append(TOPIC, draft(0), timeout=3.0),
            log.bounds(TOPIC),
            log.reader(TOPIC, Offset(0)),
            log.setup(create=True),
        ):
            with pytest.raises((Unavailable, InvalidRequest)) as refused:
                await ask
            said = str(refused.value)
            assert "hunter2" not in said
            assert PASSWORD not in said
            if wrong != "protocol":
                assert "wrong user or password" in said or "Authentication" in said
    assert time.monotonic() - started < 2 * PATIENCE_S


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "kafka://a:9092/ns?security_protocol=SASL_SSL"
    for variable in ("STITCH_KAFKA_USERNAME", "STITCH_KAFKA_PASSWORD"):
        monkeypatch.delenv(variable, raising=False)
        with pytest.raises(InvalidRequest, match=variable):
            parse_kafka_url(url)
        monkeypatch.setenv(variable, "hunter2")
    settings = parse_kafka_url(url)
    options = settings.client_options()
    assert (options["sasl_mechanism"], options["sasl_plain_username"], options["sasl_plain_password"]) == (
        "PLAIN",
        "hunter2",
        "hunter2",
    )
    assert "hunter2" not in repr(settings)
    assert parse_kafka_url(url + "&sasl_plain_username=u").client_options()["sasl_plain_username"] == "u"
    with pytest.raises(InvalidRequest, match="sasl_mechanism is one of"):
        parse_kafka_url(url + "&sasl_mechanism=GSSAPI")
