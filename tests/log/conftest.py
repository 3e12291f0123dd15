from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stitch.log.port import EventLog
from tests.log.places import KafkaPlace, MemoryPlace, Place, SqlitePlace


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


@pytest.fixture
async def log(place: Place) -> EventLog:
    """An empty log."""
    log = place.handle()
    await log.setup(create=True)
    return log
