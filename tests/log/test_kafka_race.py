"""Writers in each other's way over Kafka: one decision wins, everybody knows which, nothing is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stitch.audit.replay import replay
from stitch.core.errors import Fenced
from stitch.core.events import Event, RunClaimed, RunVersion, VersionPublished
from stitch.core.ids import Digest, PolicyId, RunId, VersionNumber, WriterId
from stitch.core.lineage import PolicyLineage
from stitch.core.manifest import Kind, ManifestRef
from stitch.core.writer import Candidate, Fate, Opening, Session, plan_claim, plan_publication
from stitch.log.events import append
from stitch.log.kafka import KafkaLog
from stitch.log.port import EventLog
from stitch.log.views import new_event_id
from stitch.trainer import decisions
from stitch.trainer.attempt import Attempt
from stitch.trainer.decisions import Decisions
from tests.support.kafka import fresh_namespace
from tests.support.kafka_cluster import KafkaCluster
from tests.support.provision import wait_until
from tests.trainer.places import PATIENCE, Place, same, weights

pytestmark = [pytest.mark.chaos, pytest.mark.kafka]

POLICY, RUN = PolicyId("p"), RunId("r1")
ROUNDS = 100
WRITERS = (WriterId("a"), WriterId("b"))


def claim(policy: PolicyLineage, writer: WriterId) -> RunClaimed:
    return plan_claim(policy, Opening(policy=POLICY, run=RUN, writer=writer), new_event_id())


def publication(policy: PolicyLineage, session: Session, number: int, by: int) -> VersionPublished:
    manifest = ManifestRef(key=f"p/r1/{number}.{by}.json", digest=Digest("a" * 64), weights_digest=Digest(f"{by}" * 64))
    candidate = Candidate(
        number=VersionNumber(number),
        kind=Kind.FULL,
        base=None,
        parent=policy.tip.number if policy.tip is not None else None,
        manifest=manifest,
        size=1,
    )
    return plan_publication(policy, session, candidate, new_event_id())


async def test_a_hundred_races_for_one_claim_and_one_version(kafka_log_url: str) -> None:
    async with KafkaLog.of_url(kafka_log_url) as one, KafkaLog.of_url(kafka_log_url) as two:
        await one.setup(create=True)
        racers = [Decisions(log, POLICY, writer) for log, writer in zip((one, two), WRITERS, strict=True)]
        for racer in racers:
            racer.start()
        won = [0, 0]
        winners: list[int] = []
        try:
            for number in range(ROUNDS):
                attempt = Attempt(PATIENCE)
                views = [await racer.read_on(attempt) for racer in racers]
                assert views[0].head == views[1].head
                claims = [claim(view, writer) for view, writer in zip(views, WRITERS, strict=True)]
                fates = await asyncio.gather(*(racer.settle(each, attempt) for racer, each in zip(racers, claims, strict=True)))
                assert sorted(fates) == [Fate.ACCEPTED, Fate.REFUSED]
                owner = fates.index(Fate.ACCEPTED)
                session, lost = racers[owner].session, racers[1 - owner].session
                assert session is not None
                assert session.epoch == number + 1
                views = [await racer.read_on(attempt) for racer in racers]
                if lost is not None:
                    with pytest.raises(Fenced):
                        publication(views[1 - owner], lost, number, 1 - owner)
                # Both with the winner's right, as a process and its restarted twin have it.
                versions = [publication(view, session, number, by) for by, view in enumerate(views)]
                fates = await asyncio.gather(*(racer.settle(each, attempt) for racer, each in zip(racers, versions, strict=True)))
                assert sorted(fates) == [Fate.ACCEPTED, Fate.REFUSED]
                winners.append(fates.index(Fate.ACCEPTED))
                won[winners[-1]] += 1
        finally:
            for racer in racers:
                await racer.aclose()
    policy = await asyncio.to_thread(lambda: replay(kafka_log_url).lineage.policy(POLICY))
    assert policy.epoch == ROUNDS
    found = [policy.versions[RunVersion(run=RUN, number=VersionNumber(number))] for number in range(ROUNDS)]
    assert [version.manifest.weights_digest for version in found] == [f"{by}" * 64 for by in winners]
    assert len(policy.versions) == ROUNDS


# --- whole publishers, with the wire of one of them cut --------------------------------------------------------------------------


class Far:
    """Two ways to one log and one store: publishers of `far` are behind the wire."""

    def __init__(self, cluster: KafkaCluster, folder: Path) -> None:
        url = fresh_namespace(cluster.servers)
        store = f"file://{folder}/store"
        self.wire = cluster.wire
        self.near = Place(url, store)
        self.far = Place(url.replace(cluster.servers, cluster.proxied), store)

    async def create(self) -> None:
        async with KafkaLog.of_url(self.near.log_url) as log:
            await log.setup(create=True)


@pytest.fixture
def scene(kafka_cluster: KafkaCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Far]:
    caplog.set_level(logging.CRITICAL, logger="aiokafka")
    kafka_cluster.heal()
    scene = Far(kafka_cluster, tmp_path)
    asyncio.run(scene.create())
    yield scene
    kafka_cluster.wire.mend()


class Cutter:
    """Does something to the wire at the moment at which the next version's decision is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scene: Far) -> None:
        self._wire, self._append = scene.wire, append
        self._poison: Callable[[], None] | None = None
        self.done = False
        monkeypatch.setattr(decisions, "append", self._appended)

    def arm(self, kind: str, stream: str, **attributes: int) -> None:
        self._poison = partial(self._wire.poison, kind, stream, **attributes)

    async def _appended(self, log: EventLog, event: Event, **options: Any) -> None:
        poison, self._poison = self._poison, None
        if poison is not None:
            poison()
            self.done = True
        await self._append(log, event, **options)


def test_an_acknowledgement_lost_mid_publish_and_a_second_publisher(scene: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of the first lands, its acknowledgement does not; the second goes on from it, the first hears both."""
    monkeypatch.setattr(decisions, "APPEND_SECONDS", 2.0)
    cutter = Cutter(monkeypatch, scene)
    with scene.far.publisher() as first:
        first.publish(weights(0))
        cutter.arm("timeout", "downstream", timeout=0)
        under_way = first.publish_async(weights(1), timeout=PATIENCE)
        wait_until(lambda: cutter.done and scene.near.numbers() == [0, 1], "the record lands", timeout=PATIENCE)
        assert not under_way.done()
        with scene.near.publisher() as second:
            assert second.publish(weights(2)).ref.number == 2
            scene.wire.mend()
            assert under_way.result(PATIENCE).ref.number == 1  # it was accepted, whatever came after
            with pytest.raises(Fenced):
                first.publish(weights(3))
    assert scene.near.numbers() == [0, 1, 2]
    for number in range(3):
        assert same(scene.near.read_back(number)[0], weights(number))
    scene.near.check_durable()
    scene.near.check_pointers()


def test_a_late_publication_loses_to_the_one_that_was_first(scene: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's record crosses the wire only after the second claimed and published that very number."""
    monkeypatch.setattr(decisions, "APPEND_SECONDS", 1.0)
    cutter = Cutter(monkeypatch, scene)
    with scene.far.publisher() as first:
        first.publish(weights(0))
        cutter.arm("latency", "upstream", latency=10_000)
        under_way = first.publish_async(weights(1), timeout=PATIENCE)
        wait_until(lambda: cutter.done, "the record is on its way", timeout=PATIENCE)
        with scene.near.publisher() as second:
            assert second.publish(weights(2)).ref.number == 1
        assert not under_way.done()
        scene.wire.mend()
        with pytest.raises(Fenced):
            under_way.result(PATIENCE)
    assert scene.near.numbers() == [0, 1]
    assert same(scene.near.read_back(1)[0], weights(2))
    scene.near.check_durable()
    scene.near.check_pointers()


def test_a_late_publication_is_settled_by_appending_it_again(scene: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "APPEND_SECONDS", 1.0)
    cutter = Cutter(monkeypatch, scene)
    with scene.far.publisher() as publisher:
        publisher.publish(weights(0))
        cutter.arm("latency", "upstream", latency=2500)
        under_way = publisher.publish_async(weights(1), timeout=PATIENCE)
        wait_until(lambda: cutter.done and scene.near.numbers() == [0, 1], "the late record lands", timeout=PATIENCE)
        scene.wire.mend()
        assert under_way.result(PATIENCE).ref.number == 1
        assert publisher.publish(weights(2)).ref.number == 2
    assert scene.near.numbers() == [0, 1, 2]
    scene.near.check_durable()
    scene.near.check_pointers()
