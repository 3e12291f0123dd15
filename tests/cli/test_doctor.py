"""`stitch doctor` finds what is wrong with a log and a store, and says how to mend it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from stitch.cli import doctor
from stitch.cli.doctor import Check, State, examine
from stitch.core.errors import VersionConflict
from stitch.core.events import FormatRaised
from stitch.core.ids import EventId, WriterId
from stitch.log.events import append
from stitch.log.follow import Follower
from stitch.log.opening import open_log
from stitch.log.port import Draft, Stream
from stitch.log.views import lineage_follower, pointers_follower, write_pointers
from stitch.store.memory import MemoryStore
from stitch.store.opening import open_store
from stitch.store.port import Body, Receipt
from stitch.wire.codec import MAGIC, encode
from tests.core.builders import History, chain_of
from tests.support.cluster import stitch
from tests.support.examples import examples
from tests.support.provision import START_TIMEOUT_S
from tests.trainer.places import Place, weights

pytestmark = pytest.mark.integration

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Two versions in SQLite and a folder."""
    made = Place.on_disk(tmp_path)
    with made.publisher() as publisher:
        publisher.publish(weights(1))
        publisher.publish(weights(2))
    return made


def _wrong(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.state is State.MEND}


async def _log_of(history: History, url: str) -> None:
    async with open_log(url) as log:
        await log.setup(create=True)
        for decision in history.log:
            await append(log, decision, source="test")


async def test_a_sound_place_has_nothing_to_mend(place: Place) -> None:
    checks = await examine(place.log_url, place.store_url)
    assert {check.state for check in checks} == {State.OK}, checks
    found = {check.name: check.found for check in checks}
    assert found["channel pointers"] == "1, abreast of the decisions"
    assert found["versions"].startswith("the manifests of the ")
    with open_store(place.store_url) as store:
        assert [entry.key for entry in store.entries("") if not entry.key.startswith("p/")] == [], "what it wrote, it removed"


def test_the_command_tells_a_program_and_a_person(place: Place) -> None:
    told = json.loads(stitch("doctor", "--json", "--log", place.log_url, "--store", place.store_url).stdout)
    assert told["ok"] is True
    assert {"name", "state", "found", "mend"} == set(told["checks"][0])
    done = stitch("doctor", "--log", f"{place.log_url}x", "--store", f"{place.store_url}x", check=False)
    assert done.returncode == 1
    assert f"make it with: stitch topics create --log {place.log_url}x" in done.stdout
    assert "mkdir -p " in done.stdout
    assert not Path(place.store_url.removeprefix("file://") + "x").exists(), "a mistyped folder is not made"


def test_one_of_the_two_must_be_named() -> None:
    done = stitch("doctor", check=False, env={"STITCH_LOG": "", "STITCH_STORE": ""})
    assert done.returncode == 2


async def test_either_is_checked_alone(place: Place) -> None:
    assert {check.name.split()[0] for check in await examine(place.log_url, None)} == {"log", "stream", "format", "channel"}
    assert {check.name.split()[0] for check in await examine(None, place.store_url)} == {"store"}


@pytest.mark.parametrize("url", ["nowhere", "ftp://x", "kafka://127.0.0.1:1/x?nonsense=1"])
async def test_a_wrong_url_is_a_finding(url: str) -> None:
    assert list(_wrong(await examine(url, None))) == ["log"]


async def test_pointers_that_stay_behind_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REPAIR_SECONDS", 0.0)
    url = f"sqlite://{tmp_path / 'log.db'}"
    await _log_of(chain_of("r1/0", "r1/1"), url)
    wrong = _wrong(await examine(url, None))
    assert list(wrong) == ["channel pointers"]
    assert wrong["channel pointers"].found == "behind the decisions: p/latest"
    assert "start a replica of the policy, or publish" in wrong["channel pointers"].mend


async def test_pointers_that_somebody_repairs_meanwhile_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REPAIR_SECONDS", 60.0)
    url = f"sqlite://{tmp_path / 'log.db'}"
    await _log_of(chain_of("r1/0", "r1/1"), url)
    looked = asyncio.Event()
    sleep = asyncio.sleep

    async def seen(seconds: float) -> None:
        looked.set()
        await sleep(0.01)

    monkeypatch.setattr("stitch.cli.doctor.asyncio.sleep", seen)
    examining = asyncio.create_task(examine(url, None))
    await looked.wait()
    async with open_log(url) as log:
        lineages, pointers = lineage_follower(log), pointers_follower(log)
        tasks = [asyncio.create_task(follower.run()) for follower in (lineages, pointers)]
        await lineages.catch_up()
        assert await write_pointers(log, lambda: lineages.state, pointers, source="repairer") == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert _wrong(await examining) == {}


async def test_a_level_above_this_release_says_upgrade(place: Place) -> None:
    raised = encode(FormatRaised(level=2, event_id=EventId("f"), writer=WriterId("w")), source="a later release")
    async with open_log(place.log_url) as log:
        await log.append(Stream.PUBLICATIONS, Draft(key=raised.key, value=raised.value, headers=raised.headers))
    wrong = _wrong(await examine(place.log_url, place.store_url))
    assert list(wrong) == ["stream publications"]
    assert "upgrade it" in wrong["stream publications"].mend


async def test_poison_in_the_decisions_is_found(place: Place) -> None:
    async with open_log(place.log_url) as log:
        await log.append(Stream.PUBLICATIONS, Draft(key="p", value=b"poison"))
    assert _wrong(await examine(place.log_url, None))["stream publications"].found == "holds what cannot be read"


async def test_what_others_write_and_this_release_skips_is_noted(place: Place) -> None:
    state = encode(examples()["replica_state"], source="a later release")
    async with open_log(place.log_url) as log:
        unknown = MAGIC + bytes(8) + state.value[10:]
        await log.append(Stream.ACTIVATIONS, Draft(key=state.key, value=unknown, headers=state.headers))
    notes = [check for check in await examine(place.log_url, None) if check.state is State.NOTE]
    assert [check.name for check in notes] == ["stream activations"]
    assert "skipped 1 of stitch.replica_state.v1" in notes[0].found


async def test_a_slow_log_is_noted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLOW_LOG_MS", 0.0)
    notes = [check.name for check in await examine(place.log_url, None) if check.state is State.NOTE]
    assert notes == ["log latency"]


async def test_a_log_that_stops_answering_is_a_finding(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def mute(follower: Follower[object]) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Follower, "run", mute)
    monkeypatch.setattr(doctor, "READ_SECONDS", 0.05)
    wrong = _wrong(await examine(place.log_url, None))
    assert wrong["stream publications"].found == "cannot be reached"


async def test_the_store_of_another_prefix_is_found(place: Place, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    wrong = _wrong(await examine(place.log_url, f"file://{tmp_path / 'other'}"))
    assert list(wrong) == ["versions"]
    assert "is this the store (and prefix) that the trainer writes to?" in wrong["versions"].mend


async def test_a_full_disk_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1 << 40, 1 << 40, 5 << 20))
    wrong = _wrong(await examine(place.log_url, place.store_url))
    assert list(wrong) == ["log disk", "store disk"]
    assert wrong["store disk"].found.startswith("5 MiB free in ")


class Overwriting(MemoryStore):
    """What many servers do with If-None-Match: nothing."""

    def put(self, key: str, body: Body) -> Receipt:
        try:
            return super().put(key, body)
        except VersionConflict:
            self.delete(key)
            return self.put(key, body)


async def test_a_store_that_overwrites_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "open_store", lambda url: Overwriting("overwriting"))
    checks = await examine(None, "memory://overwriting")
    (wrong,) = (check for check in checks if check.state is State.MEND)
    assert "conditional writes do not hold" in wrong.found
    assert wrong.mend.startswith("use a store that honours If-None-Match")
    assert "store creates" not in {check.name for check in checks}


# --- the real thing --------------------------------------------------------------------------------------------------------------


@pytest.mark.kafka
@pytest.mark.s3
async def test_kafka_and_s3(kafka_log_url: str, s3_store_url: str, kafka_url: str) -> None:
    async with open_log(kafka_log_url) as log:
        wrong = _wrong(await examine(kafka_log_url, s3_store_url))
        assert list(wrong) == ["log settings"]
        assert f"stitch topics create --log {kafka_log_url}" in wrong["log settings"].mend

        await log.setup(create=True)
        checks = await examine(kafka_log_url, s3_store_url)
        assert _wrong(checks) == {}
        settings = next(check for check in checks if check.name == "log settings")
        assert settings.state is State.NOTE
        assert "one copy of each record" in settings.found  # it has one broker
        assert {"store creates", "store checksums", "store reads", "store speed"} <= {check.name for check in checks}

    topic = f"{kafka_log_url.rpartition('/')[2]}.{Stream.PUBLICATIONS}"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_url)
    await admin.start()
    try:
        change = {"cleanup.policy": "compact", "unclean.leader.election.enable": "true"}
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=change)])
    finally:
        await admin.close()

    async def refused() -> Check | None:
        return _wrong(await examine(kafka_log_url, None)).get("log settings")

    async with asyncio.timeout(START_TIMEOUT_S):
        while (found := await refused()) is None:  # a broker takes a change of settings up after a moment
            await asyncio.sleep(0.1)
    assert f"--alter --entity-type topics --entity-name {topic}" in found.mend
    assert "cleanup.policy=delete" in found.mend
    with open_store(s3_store_url) as store:
        assert list(store.entries("")) == []


@pytest.mark.s3
async def test_a_bucket_that_is_missing(s3_url: str) -> None:
    bucket = s3_url.removeprefix("s3://").partition("?")[0].partition("/")[0]
    checks = await examine(None, s3_url.replace(f"s3://{bucket}", f"s3://{bucket}-nowhere", 1))
    assert {check.state for check in checks} == {State.MEND}
    assert any(f"{bucket}-nowhere" in check.found + check.mend for check in checks)


@pytest.mark.kafka
async def test_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.log.kafka_topics.SETUP_TIMEOUT_S", 1.0)
    wrong = _wrong(await examine("kafka://127.0.0.1:1/stitch", None))
    assert wrong["log settings"].found == "cannot be reached"
