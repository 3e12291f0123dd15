"""How fast a history is rebuilt from Kafka, against a bare aiokafka consumer that reads the same records and drops them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition

from stitch.audit.replay import view_at
from stitch.log.kafka import KafkaLog
from stitch.log.port import Stream
from tests.bench import Options, Times
from tests.bench._history import fill_topic, heartbeats, publications
from tests.support import provision
from tests.support.kafka import CannotProvide, fresh_namespace, provide

STREAMS: Final = (Stream.PUBLICATIONS, Stream.ACTIVATIONS)
TURNS: Final = 5
PAGE: Final = 1000
"""Records of one poll, on either side."""


def run(options: Options) -> dict[str, Any]:
    """Keys: `replay_events_per_s`, `vs_bare_aiokafka` (both sides' records per second, divided; 1 is the bare consumer's pace)."""
    publications_, activations = (200, 1000) if options.small else (5_000, 50_000)
    with contextlib.ExitStack() as stack:
        try:
            kafka = stack.enter_context(provide())
        except CannotProvide as why:
            provision.unavailable("kafka", str(why))
        return asyncio.run(_measure(options, kafka.servers, publications_, activations))


async def _measure(options: Options, servers: str, published: int, activations: int) -> dict[str, Any]:
    async with KafkaLog.of_url(fresh_namespace(servers)) as log:
        await log.setup(create=True)
        options.say(f"replay: {published} publications and {activations} activations are written")
        count = await fill_topic(servers, topic(log, Stream.PUBLICATIONS), publications("math", "r1", published))
        count += await fill_topic(servers, topic(log, Stream.ACTIVATIONS), heartbeats("math", activations))
        seconds: dict[str, list[float]] = {"replay": [], "bare": []}
        for turn in range(1 if options.small else TURNS):
            for side in ("replay", "bare") if turn % 2 == 0 else ("bare", "replay"):
                began = time.perf_counter()
                await (_replayed(log, published) if side == "replay" else _read_bare(log, servers, count))
                seconds[side].append(time.perf_counter() - began)
            options.say(f"replay: {count / seconds['replay'][-1]:.0f}/s, bare: {count / seconds['bare'][-1]:.0f}/s")
    times = Times(seconds=seconds)
    return {
        "replay_events_per_s": round(count / times.median("replay")),
        "bare_aiokafka_events_per_s": round(count / times.median("bare")),
        "vs_bare_aiokafka": round(times.ratio("bare", "replay"), 3),
        "publications": published,
        "activations": activations,
    }


def topic(log: KafkaLog, stream: Stream) -> str:
    return f"{log.url.rpartition('/')[2]}.{stream.value}"


async def _replayed(log: KafkaLog, published: int) -> None:
    view = await view_at(log)
    (policy,) = view.lineage.policies.values()
    assert len(policy.versions) == published - 1
    assert view.fleet.members


async def _read_bare(log: KafkaLog, servers: str, count: int) -> None:
    """Both topics one after the other, as the replay does, with the same settings of the consumer."""
    seen = 0
    for stream in STREAMS:
        partition = TopicPartition(topic(log, stream), 0)
        async with AIOKafkaConsumer(bootstrap_servers=servers, group_id=None, enable_auto_commit=False) as consumer:
            consumer.assign([partition])
            end = (await consumer.end_offsets([partition]))[partition]
            consumer.seek(partition, 0)
            while await consumer.position(partition) < end:
                found = await consumer.getmany(partition, timeout_ms=500, max_records=PAGE)
                seen += len(found.get(partition, ()))
    assert seen == count
