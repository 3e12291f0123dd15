"""Which topic a name stands for: brokers give each topic that is made an id of its own.

A topic that is deleted and made again under its name would otherwise look like the old one to a reader, once it has grown past
the reader's position. aiokafka asks for metadata in a form that has no ids, so the question is spelt out here: Metadata in version
10, the first with ids.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.errors import IncompatibleBrokerVersion, KafkaError, KafkaTimeoutError, LeaderNotAvailableError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

ID_BYTES: Final = 16
LEADER_S: Final = 5.0
"""For a partition to have a leader that answers: an election takes a moment, and so does word of a new topic."""
LEADER_AGAIN_S: Final = 0.1


class _Uuid:
    """Sixteen bytes, as they are."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(ID_BYTES)

    @classmethod
    def repr(cls, value: bytes) -> str:
        return value.hex()


_Text: Final = CompactString("utf-8")
_Nodes: Final = CompactArray(Int32)


class _Response(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("brokers", CompactArray(("node_id", Int32), ("host", _Text), ("port", Int32), ("rack", _Text), ("tags", TaggedFields))),
        ("cluster_id", _Text),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", _Text),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", _Nodes),
                        ("isr", _Nodes),
                        ("offline", _Nodes),
                        ("tags", TaggedFields),
                    ),
                ),
                ("operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_operations", Int32),
        ("tags", TaggedFields),
    )


class _Question(RequestStruct):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 10
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Response
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Uuid), ("name", _Text), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_operations", Boolean),
        ("include_topic_operations", Boolean),
        ("tags", TaggedFields),
    )


class _Metadata(Request[_Question]):  # type: ignore[misc]
    API_KEY = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, request_struct_class: type[_Question]) -> _Question:
        return request_struct_class([(bytes(ID_BYTES), self._topic, {})], False, False, False, {})


async def topic_id(client: Any, partition: TopicPartition) -> bytes | None:
    """As the partition's leader has it, which is the one that answers fetches; None from brokers that know no ids (before 2.8).

    A broker learns of a new topic before it serves it. So records that were fetched before this is asked belong to this topic or
    to an older one, never to a newer. Waits LEADER_S for a leader that answers. Raises KafkaError.
    """
    last: KafkaError | None = None
    pause = 0.0  # at first: a client that was just started has not asked for the leader yet
    try:
        async with asyncio.timeout(LEADER_S):
            while True:
                try:
                    return await _asked(client, partition)
                except KafkaError as error:
                    if not error.retriable:
                        raise
                    last = error
                await asyncio.sleep(pause)
                pause = LEADER_AGAIN_S
                await client.force_metadata_update()
    except TimeoutError:
        raise (last or KafkaTimeoutError(f"no answer about {partition.topic}")) from None


async def _asked(client: Any, partition: TopicPartition) -> bytes | None:
    leader = client.cluster.leader_for_partition(partition)
    if leader is None or leader < 0:
        raise LeaderNotAvailableError(f"no leader for {partition.topic}")
    try:
        answer = await client.send(leader, _Metadata(partition.topic))
    except (IncompatibleBrokerVersion, NotImplementedError):
        return None
    for code, name, found, *_ in answer.topics:
        if name == partition.topic:
            if code:
                raise for_code(code)(name)
            return bytes(found) if any(found) else None
    raise KafkaError(f"no answer about {partition.topic}")
