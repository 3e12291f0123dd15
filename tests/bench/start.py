"""How long a gateway and a replica take from their start to `/readyz` 200, by the length of the log's history.

Goal: flat. With a million activations no more than twice as long as with a thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from stitch.log.kafka import KafkaLog
from stitch.log.kafka_settings import parse_kafka_url
from stitch.log.kafka_topics import wanted
from stitch.log.port import Draft, Stream
from stitch.log.sqlite import SqliteLog
from stitch.log.sqlite_file import _headers_text
from stitch.trainer.publisher import Publisher
from tests.bench import Options
from tests.bench._history import fill_topic, heartbeats, publications
from tests.support import provision
from tests.support.cluster import POLICY, Cluster, get
from tests.support.engines import reference_models
from tests.support.kafka import CannotProvide, fresh_namespace, provide

SIZES: Final = (1_000, 100_000, 1_000_000)
PUBLICATIONS: Final = 10_000
TURNS: Final = 3
STEP_MS: Final = 40
"""Between two records: fifty replicas that beat every two seconds."""
DISTINCT: Final = 5_000
"""The newest records, of which each differs; what is older repeats their bytes, and lies beyond every lease."""


def run(options: Options) -> dict[str, Any]:
    """Keys: `gateway_ready_s`, `replica_ready_s` on SQLite and `..._kafka` where a Kafka can be had, each by the number of
    activations, medians of TURNS; `..._flat`: the longest history's by the shortest's."""
    sizes, count = ((100,), 100) if options.small else (SIZES, PUBLICATIONS)
    turns = 1 if options.small else TURNS
    told: dict[str, Any] = {"publications": count}
    with tempfile.TemporaryDirectory(prefix="stitch-bench-") as folder:
        place: _Place = _Sqlite(Path(folder))
        told |= _measured(options, place, "", sizes, count, turns)
    try:
        with provide() as kafka, tempfile.TemporaryDirectory(prefix="stitch-bench-") as folder:
            place = _Kafka(Path(folder), kafka.servers)
            told |= _measured(options, place, "_kafka", sizes, count, turns)
    except CannotProvide as why:
        options.say(f"start: no Kafka: {why}")
    return told


def _measured(options: Options, place: _Place, suffix: str, sizes: Iterable[int], count: int, turns: int) -> dict[str, Any]:
    seconds: dict[str, dict[str, float]] = {"gateway": {}, "replica": {}}
    for size in sizes:
        options.say(f"start: {count} publications and {size} activations are written to {place.scheme}")
        url = place.filled(count, size)
        store = f"file://{place.folder / f'store-{size}'}"
        (model,) = reference_models(place.folder / f"model-{size}", (1,))
        Publisher.open(policy=POLICY, run="r2", log=url, store=store, base=model, take_over=True).close()
        found: dict[str, list[float]] = {"gateway": [], "replica": []}
        for turn in range(turns):
            work = place.folder / f"{size}-{turn}"
            work.mkdir()
            with Cluster(work, log=url, store=store) as cluster:
                found["gateway"].append(_ready_s(lambda c: c.gateway(), cluster))
                found["replica"].append(_ready_s(lambda c: c.replica("bench"), cluster))
        for kind, all_turns in found.items():
            seconds[kind][str(size)] = round(statistics.median(all_turns), 3)
            options.say(f"start: {kind} {place.scheme} {size}: {', '.join(f'{each:.2f}' for each in all_turns)} s")
    told: dict[str, Any] = {}
    for kind, by_size in seconds.items():
        medians = list(by_size.values())
        told |= {f"{kind}_ready_s{suffix}": by_size, f"{kind}_ready_flat{suffix}": round(medians[-1] / medians[0], 3)}
    return told


def _ready_s(start: Any, cluster: Cluster) -> float:
    began = time.perf_counter()
    url = start(cluster)
    provision.wait_until(lambda: get(f"{url}/readyz")[0] == 200, f"{url} is ready")
    return time.perf_counter() - began


def _beats(size: int) -> Iterator[Draft]:
    """`size` records, of which the last DISTINCT differ."""
    distinct = list(heartbeats(POLICY, min(size, DISTINCT)))
    skip = -size % len(distinct)
    return itertools.islice(itertools.cycle(distinct), skip, skip + size)


class _Place(ABC):
    """Where histories are written. Each gets a log of its own."""

    scheme = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def filled(self, published: int, activations: int) -> str:
        """URL of a log with so many records; the newest is of this moment."""


class _Sqlite(_Place):
    scheme = "sqlite"

    def filled(self, published: int, activations: int) -> str:
        path = self.folder / f"log-{activations}.db"

        async def make() -> None:
            async with SqliteLog(path) as log:
                await log.setup(create=True)

        asyncio.run(make())
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            _insert(connection, Stream.PUBLICATIONS, publications(POLICY, "r1", published), published)
            _insert(connection, Stream.ACTIVATIONS, _beats(activations), activations)
        return f"sqlite://{path}"


def _insert(connection: sqlite3.Connection, stream: Stream, drafts: Iterable[Draft], count: int) -> None:
    """In one transaction, where the log itself would take one for each few hundred."""
    last_ms = time.time_ns() // 1_000_000
    first_ms = last_ms - STEP_MS * (count - 1)
    rows = ((n, first_ms + STEP_MS * n, d.key, _headers_text(d.headers), d.value) for n, d in enumerate(drafts))
    connection.executemany(f"INSERT INTO {stream.value} VALUES (?, ?, ?, ?, ?)", rows)
    connection.execute("UPDATE streams SET next = ?, last_ms = ? WHERE name = ?", (count, last_ms, stream.value))


class _Kafka(_Place):
    scheme = "kafka"

    def __init__(self, folder: Path, servers: str) -> None:
        super().__init__(folder)
        self._servers = servers

    def filled(self, published: int, activations: int) -> str:
        url = fresh_namespace(self._servers)
        asyncio.run(self._fill(url, published, activations))
        return url

    async def _fill(self, url: str, published: int, activations: int) -> None:
        """The history's times are given while it is written; afterwards the broker gives them, as ever."""
        settings = parse_kafka_url(url)
        async with KafkaLog.of_url(url) as log:
            await log.setup(create=True)
        topic = settings.topic(Stream.ACTIVATIONS)
        await fill_topic(self._servers, settings.topic(Stream.PUBLICATIONS), publications(POLICY, "r1", published))
        await self._stamped_by(topic, "CreateTime")
        await fill_topic(self._servers, topic, _beats(activations), step_ms=STEP_MS, count=activations)
        await self._stamped_by(topic, "LogAppendTime")

    async def _stamped_by(self, topic: str, who: str) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._servers)
        await admin.start()
        try:
            wanted_now = {**wanted(Stream.ACTIVATIONS, 1), "message.timestamp.type": who}
            await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, wanted_now)])
        finally:
            await admin.close()
