"""Replay rebuilds what was known at an offset or a moment, from the events alone."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import stitch
from stitch.core.events import Phase, ReplicaState, Transition
from stitch.core.fleet import Fleet
from stitch.core.ids import LATEST, EventId, Generation, PoolName, ReplicaId
from stitch.core.replay import View
from stitch.log.events import append
from stitch.log.port import EventLog, Stream
from tests.trainer.places import POLICY, Place, weights

pytestmark = pytest.mark.integration


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place.in_memory() if request.param == "memory" else Place.on_disk(tmp_path)


def joined(name: str) -> ReplicaState:
    return ReplicaState(
        replica=ReplicaId(name),
        life=EventId(f"{name}-life"),
        incarnation=None,
        sequence=0,
        transition=Transition.JOINED,
        event_id=EventId(f"{name}-joined"),
        phase=Phase.JOINING,
        policy=POLICY,
        channel=LATEST,
        pool=PoolName("default"),
        url="http://127.0.0.1:1",
        engine="reference",
        capacity=1,
        heartbeat_ms=2000,
        generation=Generation(0),
    )


def write(place: Place, state: ReplicaState) -> None:
    async def act() -> None:
        async with stitch.open_log(place.log_url) as log:
            await append(log, state, source="test")

    asyncio.run(act())


def test_every_offset_is_a_view_of_its_own(place: Place) -> None:
    seen: list[tuple[int, str]] = []
    with place.publisher() as pub:
        for number in range(3):
            offset = pub.publish(weights(number)).offset
            seen.append((offset, stitch.replay(place.log_url).digest))
    for number, (offset, digest) in enumerate(seen):
        view = stitch.replay(place.log_url, until=offset)
        assert view.digest == digest
        tip = view.lineage.policy(POLICY).tip
        assert tip is not None
        assert tip.number == number
    assert len({digest for _, digest in seen}) == 3
    assert stitch.replay(place.log_url, until=seen[0][0] - 1).lineage.policy(POLICY).tip is None
    assert stitch.replay(place.log_url, until=10**6).digest == seen[-1][1]


def test_the_fleet_is_that_of_the_same_moment(place: Place) -> None:
    with place.publisher() as pub:
        first = pub.publish(weights(0)).offset
        time.sleep(0.01)  # so that the log's clock tells the two apart
        write(place, joined("a"))
        time.sleep(0.01)
        second = pub.publish(weights(1)).offset
    assert stitch.replay(place.log_url, until=first).fleet == Fleet()
    assert set(stitch.replay(place.log_url, until=second).fleet.members) == {"a"}
    assert set(stitch.replay(place.log_url).fleet.members) == {"a"}


def test_a_moment_is_by_the_logs_clock(place: Place) -> None:
    with place.publisher() as pub:
        pub.publish(weights(0))
    now = datetime.now(UTC)
    assert stitch.replay(place.log_url, until=now + timedelta(minutes=1)).digest == stitch.replay(place.log_url).digest
    assert stitch.replay(place.log_url, until=now - timedelta(hours=1)) == View()
    with pytest.raises(stitch.InvalidRequest) as refused:
        stitch.replay(place.log_url, until=datetime(2026, 1, 1))
    assert refused.value.field == "until"


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(stitch.InvalidRequest) as refused:
        stitch.replay(f"sqlite://{tmp_path / 'none.db'}")
    assert refused.value.field == "log"


async def test_it_takes_an_open_log_inside_a_running_loop() -> None:
    place = Place.in_memory()
    with place.publisher() as pub:
        pub.publish(weights(0))
    log: EventLog = place.memory_log()
    assert stitch.replay(log).digest == stitch.replay(place.log_url).digest
    await log.bounds(Stream.PUBLICATIONS)
