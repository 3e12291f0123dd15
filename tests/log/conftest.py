from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from stitch.log.port import EventLog
from tests.log.places import KafkaPlace, MemoryPlace, Place, SqlitePlace
from tests.support.kafka import local_cluster
from tests.support.kafka_cluster import KafkaCluster


@pytest.fixture(params=["memory", "sqlite", pytest.param("kafka", marks=pytest.mark.kafka), "memory-faulty", "sqlite-faulty"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A log that nobody has made yet."""
    kind, _, faulty = request.param.partition("-")
    place: Place
    if kind == "memory":
        place = MemoryPlace(f"memory://t{uuid.uuid4().hex}", faulty=bool(faulty))
    elif kind == "sqlite":
        place = SqlitePlace(tmp_path, faulty=bool(faulty))
    else:
        place = KafkaPlace(request.getfixturevalue("kafka_log_url"))
    yield place
    await place.close()


@pytest.fixture(scope="package")
def kafka_cluster() -> Iterator[KafkaCluster]:
    """Shared by the tests of this folder and gone after them. Each puts it right (`heal`) before it begins."""
    with local_cluster() as cluster:
        yield cluster


@pytest.fixture
async def log(place: Place) -> EventLog:
    """An empty log."""
    log = place.handle()
    await log.setup(create=True)
    return log
