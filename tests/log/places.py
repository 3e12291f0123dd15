"""Where the behaviour suite runs: one log, which any number of handles may open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from stitch.log.faulty import FaultyLog
from stitch.log.kafka_settings import parse_kafka_url
from stitch.log.kafka_topics import wanted
from stitch.log.memory import MemoryLog
from stitch.log.opening import open_log
from stitch.log.port import Draft, EventLog, Stream
from stitch.log.read import read_all
from tests.support.provision import eventually

COMPACTION_S: Final = 30.0
"""Kafka's cleaner takes seconds when hurried."""


class Place(ABC):
    """`faulty`: handles are behind a FaultyLog that plans no fault, which must change nothing."""

    def __init__(self, url: str, *, faulty: bool = False) -> None:
        self.url = url
        self._faulty = faulty
        self._opened: list[EventLog] = []

    def handle(self) -> EventLog:
        """Another handle; closed when the test ends."""
        log = open_log(self.url)
        if self._faulty:
            log = FaultyLog(log)
        self._opened.append(log)
        return log

    async def close(self) -> None:
        for log in self._opened:
            await log.aclose()

    @property
    def missing_is_refused(self) -> bool:
        """Whether a log must be made before it is used."""
        return True

    @abstractmethod
    async def compact(self, log: EventLog) -> None:
        """Returns once superseded pointers are gone."""


class MemoryPlace(Place):
    @property
    def missing_is_refused(self) -> bool:
        return False

    async def compact(self, log: EventLog) -> None:
        memory = open_log(self.url)
        assert isinstance(memory, MemoryLog)
        async with memory:
            memory.compact()


class SqlitePlace(Place):
    def __init__(self, folder: Path, *, faulty: bool = False) -> None:
        super().__init__(f"sqlite://{folder / 'deep' / 'log.db'}", faulty=faulty)

    async def compact(self, log: EventLog) -> None:
        """Each append compacts."""


class KafkaPlace(Place):
    async def compact(self, log: EventLog) -> None:
        """Hurries the log cleaner, rolls the segment by an append, and waits until keys are unique but for that one."""
        settings = parse_kafka_url(self.url)
        hurry = {"segment.ms": "1000", "min.cleanable.dirty.ratio": "0.01", "max.compaction.lag.ms": "1000"}
        admin = AIOKafkaAdminClient(bootstrap_servers=list(settings.servers))
        await admin.start()
        try:
            topic = ConfigResource(
                ConfigResourceType.TOPIC, settings.topic(Stream.POINTERS), {**wanted(Stream.POINTERS, 1), **hurry}
            )
            await admin.alter_configs([topic])
        finally:
            await admin.close()

        async def compacted() -> bool:
            await log.append(Stream.POINTERS, Draft(key="roll", value=b""))
            keys = [record.key for record in await read_all(log, Stream.POINTERS) if record.key != "roll"]
            return len(keys) == len(set(keys))

        await eventually(compacted, "Kafka compacts", timeout=COMPACTION_S)
