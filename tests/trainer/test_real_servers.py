"""The same over Apache Kafka and an S3 server."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stitch.core.errors import Fenced, InvalidRequest
from stitch.core.manifest import Kind
from stitch.log.opening import open_log
from stitch.trainer.attempt import Progress, Step
from tests.support.s3 import S3Server
from tests.trainer.places import PATIENCE, Place, same, weights


async def create_streams(url: str) -> None:
    async with open_log(url) as log:
        await log.setup(create=True)


@pytest.mark.integration
@pytest.mark.kafka
@pytest.mark.s3
def test_publish_take_over_and_rewind(kafka_log_url: str, s3_store_url: str) -> None:
    place = Place(kafka_log_url, s3_store_url)
    with pytest.raises(InvalidRequest, match="topics create"):
        place.publisher()
    asyncio.run(create_streams(kafka_log_url))
    with place.publisher() as first:
        kinds = [first.publish(weights(number)).kind for number in range(4)]
        assert kinds == [Kind.FULL, Kind.DELTA, Kind.DELTA, Kind.DELTA]
        with place.publisher(boot_version=1) as second:
            with pytest.raises(Fenced):
                first.publish(weights(9))
            assert second.publish(weights(10)).ref.number == 4
    policy = place.policy()
    assert [version.ref.number for version in policy.path(policy.tip)] == [4, 1, 0]
    assert same(place.read_back(4)[0], weights(10))
    place.check_durable()
    place.check_pointers()


@pytest.mark.integration
@pytest.mark.kafka
@pytest.mark.s3
def test_racing_openers(kafka_log_url: str, s3_store_url: str) -> None:
    place = Place(kafka_log_url, s3_store_url)
    asyncio.run(create_streams(kafka_log_url))
    with ThreadPoolExecutor(2) as pool:
        pubs = list(pool.map(lambda _: place.publisher(), range(2)))
    try:
        accepted = 0
        for pub in pubs:
            try:
                pub.publish(weights(0))
                accepted += 1
            except Fenced:
                pass
        assert accepted == 1
    finally:
        for pub in pubs:
            pub.close()
    assert place.numbers() == [0]


@pytest.mark.chaos
@pytest.mark.s3
def test_a_store_that_dies_is_waited_out(s3_server: S3Server, tmp_path: Path) -> None:
    place = Place(f"sqlite://{tmp_path / 'log.db'}", s3_server.url)
    waiting = threading.Event()

    def listen(progress: Progress) -> None:
        if progress.step is Step.WAITING:
            waiting.set()

    with place.publisher(progress=listen) as pub:
        pub.publish(weights(0))
        s3_server.kill()
        future = pub.publish_async(weights(1))
        assert waiting.wait(PATIENCE)
        assert not future.done()
        s3_server.restart()
        assert future.result(PATIENCE).ref.number == 1
    place.check_durable()
    assert same(place.read_back(1)[0], weights(1))
