"""The topics of a namespace: made with the settings that the protocol needs, and refused with any that would lose records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import InvalidReplicationFactorError, KafkaError, TopicAlreadyExistsError, for_code

from stitch.core.errors import InvalidRequest, Unavailable
from stitch.log.kafka_append import REFUSALS, describe
from stitch.log.kafka_clients import REQUEST_TIMEOUT_MS, Connecting
from stitch.log.kafka_settings import KafkaSettings
from stitch.log.keeping import COMPACTED, RETENTION_MS
from stitch.log.port import Copies, Stream

SETUP_TIMEOUT_S: Final = 30.0
"""For four topics to be made and described; seconds on a healthy cluster."""
SETTLE_S: Final = 0.1
"""Between two looks for topics that were just made, until the brokers know them."""
SPREAD_S: Final = 2.0
"""For topics of which some are known to be known to every broker."""
REPLICATED: Final = 3
"""From so many replicas on, one may be lost while appends go on. Taken where nobody says how many and there are so many brokers."""

FOR_EVER: Final = "-1"
READABLE: Final = frozenset({"producer", "uncompressed", "gzip"})
"""What a topic may do to records so that every reader can read them; the others need a library that readers may not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Topic:
    """As found in the cluster."""

    partitions: int
    replication: int
    settings: Mapping[str, str]


def wanted(stream: Stream, replication: int) -> dict[str, str]:
    """Settings with which the topic of a stream is made."""
    return {
        **required(stream, replication),
        "retention.bytes": FOR_EVER,
        "retention.ms": str(RETENTION_MS.get(stream, FOR_EVER)),
    }


def required(stream: Stream, replication: int) -> dict[str, str]:
    """Settings that a topic must have; operators choose how long the streams that expire are kept."""
    settings = {
        "cleanup.policy": "compact" if stream in COMPACTED else "delete",
        "message.timestamp.type": "LogAppendTime",
        "min.insync.replicas": "2" if replication >= REPLICATED else "1",
        "compression.type": "producer",
        "unclean.leader.election.enable": "false",
    }
    if stream not in RETENTION_MS and stream not in COMPACTED:
        settings |= {"retention.ms": FOR_EVER, "retention.bytes": FOR_EVER}
    return settings


async def set_up(settings: KafkaSettings, *, create: bool) -> Copies:
    """Makes missing topics where `create`, then checks all. Raises InvalidRequest or Unavailable."""
    try:
        async with asyncio.timeout(SETUP_TIMEOUT_S), _admin(settings) as admin:
            topics = await _described(admin, settings, SPREAD_S, none_will_do=create)
            missing = [stream for stream in Stream if stream not in topics]
            if missing and create:
                await _create(admin, settings, missing)
                topics = await _described(admin, settings, SETUP_TIMEOUT_S)
            _check(settings, topics)
            return min((_copies(topic) for topic in topics.values()), key=lambda copies: (copies.kept, copies.acknowledged))
    except TimeoutError:
        raise Unavailable(f"{settings.url}: no answer within {SETUP_TIMEOUT_S:g} s{settings.hint}") from None
    except REFUSALS as error:
        raise InvalidRequest(f"log: {settings.url} refused: {describe(error)}", field="log") from error
    except KafkaError as error:
        raise Unavailable(f"{settings.url}: {describe(error)}{settings.hint}") from error


@contextlib.asynccontextmanager
async def _admin(settings: KafkaSettings) -> AsyncIterator[Any]:
    admin = AIOKafkaAdminClient(**settings.client_options(), request_timeout_ms=REQUEST_TIMEOUT_MS)
    connecting = Connecting(admin._client)
    try:
        await admin.start()
        yield admin
    finally:
        await connecting.close()
        await admin.close()


async def _create(admin: Any, settings: KafkaSettings, streams: list[Stream]) -> None:
    replication = settings.replication or await _default_replication(admin)
    if settings.replication is None and replication == 1:  # Kafka's own default, so hardly anybody's choice
        with contextlib.suppress(InvalidReplicationFactorError):
            return await _make(admin, settings, streams, REPLICATED)
        if (brokers := len(await _brokers(admin))) > 1:
            raise InvalidRequest(
                f"log: {settings.url} has {brokers} brokers up, so say how many copies to keep of each record: add "
                f"?replication={REPLICATED} once {REPLICATED} are up, or ?replication=1 where a lost disk may lose the log",
                field="log",
            )
    try:
        return await _make(admin, settings, streams, replication)
    except InvalidReplicationFactorError as error:
        raise InvalidRequest(f"log: {settings.url} cannot keep {replication} copies: {error}", field="log") from error


async def _make(admin: Any, settings: KafkaSettings, streams: list[Stream], replication: int) -> None:
    """Raises InvalidReplicationFactorError, which makes none of them, and InvalidRequest."""
    topics = [NewTopic(settings.topic(stream), 1, replication, topic_configs=wanted(stream, replication)) for stream in streams]
    response = await admin.create_topics(topics)
    for topic, code, *text in response.topic_errors:
        error = for_code(code)
        if error is InvalidReplicationFactorError:
            raise error(*text)
        if code and error is not TopicAlreadyExistsError:  # another process may be making it too
            raise InvalidRequest(f"log: {settings.url}: cannot make topic {topic}: {error.__name__} {text}", field="log")


async def _brokers(admin: Any) -> list[int]:
    return [broker["node_id"] for broker in (await admin.describe_cluster())["brokers"]]


async def _default_replication(admin: Any) -> int:
    """What the brokers give topics for which nobody says it; 1, Kafka's own default, where that may not be asked."""
    for broker in await _brokers(admin):
        try:
            (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.BROKER, str(broker))])
        except KafkaError:  # it went away a moment ago
            continue
        for code, _, _, _, entries in response.resources:
            if code == 0:
                return next((int(entry[1]) for entry in entries if entry[0] == "default.replication.factor"), 1)
    return 1


def _copies(topic: _Topic) -> Copies:
    return Copies(topic.replication, int(topic.settings["min.insync.replicas"]))


async def _described(admin: Any, settings: KafkaSettings, patience_s: float, *, none_will_do: bool = False) -> dict[Stream, _Topic]:
    """All topics as soon as they are there, else those that are after so many seconds: not every broker hears of one at once."""
    until = asyncio.get_running_loop().time() + patience_s
    while True:
        late = asyncio.get_running_loop().time() >= until
        try:
            topics = await _describe(admin, settings)
        except KafkaError as error:
            if late or not error.retriable:
                raise
        else:
            if late or len(topics) == len(Stream) or (none_will_do and not topics):
                return topics
        await asyncio.sleep(SETTLE_S)


async def _describe(admin: Any, settings: KafkaSettings) -> dict[Stream, _Topic]:
    """Those that exist. All topics are asked for, since a question for one by name may make it."""
    names = {settings.topic(stream): stream for stream in Stream}
    found = {entry["topic"]: entry["partitions"] for entry in await admin.describe_topics() if entry["topic"] in names}
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in found]
    topics: dict[Stream, _Topic] = {}
    for response in await admin.describe_configs(resources) if resources else []:
        for code, _, _, name, entries in response.resources:
            if code == 0:
                topics[names[name]] = _Topic(
                    partitions=len(found[name]),
                    replication=max((len(each["replicas"]) for each in found[name]), default=0),
                    settings={entry[0]: entry[1] for entry in entries},
                )
            else:  # also one that a broker does not know yet of which another told: it is there
                raise for_code(code)(name)
    return topics


def _check(settings: KafkaSettings, topics: Mapping[Stream, _Topic]) -> None:
    missing = [settings.topic(stream) for stream in Stream if stream not in topics]
    if missing:
        raise InvalidRequest(
            f"log: {settings.url} lacks {', '.join(missing)}; make them with: stitch topics create --log {settings.url}",
            field="log",
        )
    faults = [fault for stream, topic in topics.items() for fault in _faults(settings, stream, topic)]
    if faults:
        raise InvalidRequest(f"log: {settings.url} would lose or reorder records. {' '.join(faults)}", field="log")


def _faults(settings: KafkaSettings, stream: Stream, topic: _Topic) -> list[str]:
    name = settings.topic(stream)
    faults = []
    if topic.partitions != 1:
        faults.append(
            f"{name} has {topic.partitions} partitions and must have one, so that it has one order: delete it, "
            f"or choose another namespace, then: stitch topics create --log {settings.url}"
        )
    wrong = {
        key: value
        for key, value in required(stream, topic.replication).items()
        if not _satisfies(key, topic.settings.get(key), value)
    }
    if wrong:
        has = ", ".join(f"{key}={topic.settings.get(key)}" for key in wrong)
        change = ",".join(f"{key}={value}" for key, value in wrong.items())
        faults.append(
            f"{name} has {has}; mend it with: kafka-configs.sh --bootstrap-server {settings.servers[0]} --alter "
            f"--entity-type topics --entity-name {name} --add-config {change}"
        )
    return faults


def _satisfies(key: str, has: str | None, value: str) -> bool:
    if key == "min.insync.replicas":
        return has is not None and int(has) >= int(value)
    if key == "compression.type":
        return has in READABLE
    return has == value
