"""Starting on a log, and going on when it is not what it was: real gateways, replicas and publishers over real logs.

Reading to the end has a deadline. What cannot be read stops the fold that must not skip it, and is counted where it may be skipped.
A log that was truncated or recreated is never followed in silence.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from stitch.core.errors import LogDiverged, Unavailable
from stitch.core.events import ChannelPointer, Phase, ReplicaState, RunClaimed, Transition
from stitch.core.ids import EventId, ReplicaId
from stitch.gateway.config import GatewayConfig
from stitch.gateway.serve import run_gateway
from stitch.log import follow
from stitch.log.events import append, draft, read
from stitch.log.kafka import KafkaLog
from stitch.log.kafka_settings import parse_kafka_url
from stitch.log.opening import open_log
from stitch.log.port import Draft, Stream
from stitch.log.read import read_all
from stitch.log.views import fleet_follower, lineage_follower, pointers_follower
from stitch.trainer.publisher import Publisher
from tests.log.stuck import StuckLog
from tests.replica.world import World, ref, unique_log
from tests.support.examples import POLICY, examples
from tests.support.provision import eventually
from tests.trainer.places import weights

WAIT: Final = 60.0
POISON: Final = b"\xc3\x01 not what any schema says"


def future(name: str) -> Draft:
    """The event as a later release might write it: framed and marked as ever, by a schema that nobody here knows."""
    record = draft(examples()[name], source="later")
    return replace(record, value=record.value[:2] + b"\xff" * 8 + record.value[10:])


def beat(name: str = "replica-0", sequence: int = 0) -> ReplicaState:
    """A replica that serves, at an address where nobody is."""
    state = examples()["replica_state"]
    assert isinstance(state, ReplicaState)
    return replace(
        state,
        replica=ReplicaId(name),
        life=EventId(f"life of {name}"),
        event_id=EventId(f"{name}-{sequence}"),
        incarnation=None if sequence == 0 else state.incarnation,
        transition=Transition.JOINED if sequence == 0 else Transition.HEARTBEAT,
        sequence=sequence,
        phase=Phase.SERVING,
        url="http://127.0.0.1:9",
    )


class Seen:
    """A gateway from outside."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = url, http

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._http.get(self._url + path) as response:
            return response.status, await (response.json() if path != "/metrics" else response.text())

    async def ready(self, wanted: int) -> Any:
        """What /readyz says once it answers so."""
        told: Any = None

        async def holds() -> bool:
            nonlocal told
            status, told = await self.get("/readyz")
            return status == wanted

        await eventually(holds, f"/readyz {wanted}", timeout=WAIT)
        return told

    async def frozen(self, stream: str) -> str:
        """Why /readyz says that the stream is followed no more, once it does."""
        told: Any = None

        async def holds() -> bool:
            nonlocal told
            _, told = await self.get("/readyz")
            return bool(told["streams"][stream]["frozen"])

        await eventually(holds, f"{stream} is frozen", timeout=WAIT)
        return str(next(reason for reason in told["reasons"] if reason.startswith(f"{stream}:")))

    async def replicas(self) -> set[str]:
        _, told = await self.get("/replicas")
        return {each["replica"] for each in told["replicas"] if each["in_rotation"]}


@asynccontextmanager
async def gateway(log_url: str) -> AsyncIterator[Seen]:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = GatewayConfig(log=log_url, policy=POLICY, deadline=2.0)
    task = asyncio.create_task(run_gateway(config, ready=told.set_result, grace=0))
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT)) as http:
            yield Seen(await asyncio.wait_for(told, WAIT), http)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- to the end, under a deadline --------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize("view", [lineage_follower, fleet_follower, pointers_follower])
async def test_reading_to_an_end_that_never_comes_is_given_up_in_time(view: Callable[..., Any]) -> None:
    async with StuckLog() as log:
        follower = view(log)
        await log.append(follower.stream, Draft(key="k", value=b"v"))
        task = asyncio.create_task(follower.run())
        with pytest.raises(Unavailable, match=r"not read to its end within 0\.2 s"):
            await follower.catch_up(0.2)
        assert not follower.healthy
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.kafka
@pytest.mark.integration
async def test_views_are_caught_up_where_every_topic_ends_in_control_batches(kafka_log_url: str) -> None:
    settings = parse_kafka_url(kafka_log_url)
    async with KafkaLog.of_url(kafka_log_url) as log:
        await log.setup(create=True)
        await append(log, examples()["run_claimed"], source="test")
        servers = ",".join(settings.servers)
        async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=settings.namespace) as stranger:
            for stream in (Stream.PUBLICATIONS, Stream.ACTIVATIONS, Stream.POINTERS):
                await stranger.begin_transaction()
                record = future("channel_pointer")
                await stranger.send_and_wait(settings.topic(stream), record.value, key=b"k", headers=list(record.headers))
                await stranger.abort_transaction()
        async with gateway(kafka_log_url) as seen:
            told = await seen.ready(200)
            assert all(each["caught_up"] for each in told["streams"].values())


# --- what cannot be read -----------------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["poison", "future"])
@pytest.mark.parametrize("stream", [Stream.PUBLICATIONS, Stream.ACTIVATIONS])
async def test_a_gateway_meets_a_record_that_it_cannot_read(stream: Stream, kind: str) -> None:
    """One that must not be skipped ends readiness with the reason, and the table stays; an optional one is skipped and counted."""
    url = unique_log()
    skipped = kind == "future" and stream is Stream.ACTIVATIONS
    bad = future("replica_state" if skipped else "run_claimed") if kind == "future" else Draft(key="math", value=POISON)
    async with open_log(url) as log:
        await append(log, examples()["run_claimed"], source="test")
        await append(log, beat(), source="test")
        async with gateway(url) as seen:
            await seen.ready(200)
            await log.append(stream, bad)
            await append(log, beat("replica-1"), source="test")
            if not skipped:
                assert "upgrade" in await seen.frozen(stream.value)
                assert len((await seen.ready(503))["reasons"]) == 1
                assert "replica-0" in await seen.replicas()
                status, _ = await seen.get("/livez")
                assert status == 200
                return

            async def newcomer() -> bool:
                return await seen.replicas() == {"replica-0", "replica-1"}

            await eventually(newcomer, "what follows is read", timeout=WAIT)
            told = await seen.ready(200)
            assert told["streams"]["activations"]["skipped"] == {"stitch.replica_state.v1": 1}
            _, text = await seen.get("/metrics")
            assert 'stitch_gateway_events_skipped{stream="activations",type="stitch.replica_state.v1"} 1' in text


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["poison", "future"])
async def test_a_gateway_that_starts_on_an_unreadable_decision_never_says_that_it_is_ready(kind: str) -> None:
    url = unique_log()
    async with open_log(url) as log:
        await append(log, examples()["run_claimed"], source="test")
        await log.append(Stream.PUBLICATIONS, future("version_published") if kind == "future" else Draft(key="m", value=POISON))
        async with gateway(url) as seen:
            await seen.frozen("publications")
            await seen.ready(503)


@asynccontextmanager
async def world(folder: Path, log_url: str) -> AsyncIterator[World]:
    made = World(folder, log_url)
    await made.begin()
    try:
        yield made
    finally:
        await made.end()


@pytest.mark.integration
async def test_a_replica_goes_on_by_pointers_where_the_decisions_cannot_be_read(tmp_path: Path) -> None:
    """And what is optional is skipped: the pointers and activations hold an event of a later release each."""
    async with (
        world(tmp_path, unique_log()) as here,
        world(tmp_path, unique_log()) as there,
        here.trainer(),
        there.trainer() as trainer,
    ):
        await here.events.append(Stream.POINTERS, future("channel_pointer"))
        await here.events.append(Stream.ACTIVATIONS, future("replica_state"))
        replica = await here.replica()
        await replica.serves(ref(0))
        assert (await replica.info())["log"]["skipped"] == {"activations": {"stitch.replica_state.v1": 1}}
        await here.events.append(Stream.PUBLICATIONS, Draft(key=POLICY, value=POISON))
        # Who can read the record goes on publishing; its pointers are all that the replica hears of it.
        await trainer.publish()
        newest = read((await read_all(there.events, Stream.POINTERS))[-1])
        assert isinstance(newest, ChannelPointer)
        await append(here.events, newest, source="a later release")
        await replica.serves(ref(1))
        info = await replica.info()
        assert info["target"]["origin"] == "pointer"
        assert "publications" in info["log"]
        assert info["log"]["publications"]
        status, _ = await replica.get("/readyz")
        assert status == 200
        status, _ = await replica.generate(tokens=2)
        assert status == 200


@pytest.mark.integration
async def test_a_replica_goes_on_by_the_log_where_pointers_and_activations_cannot_be_read(tmp_path: Path) -> None:
    async with world(tmp_path, unique_log()) as here, here.trainer() as trainer:
        replica = await here.replica(slot_seconds=0.5)
        await replica.serves(ref(0))
        for stream in (Stream.POINTERS, Stream.ACTIVATIONS, Stream.ROLLOUTS):
            await here.events.append(stream, Draft(key="k", value=POISON))
        published = await trainer.publish()
        await replica.serves(published)

        async def said() -> bool:
            return bool((await replica.info())["log"]["pointer"])

        await eventually(said, "the replica says that it cannot read its pointer", timeout=WAIT)
        status, _ = await replica.get("/readyz")
        assert status == 200


# --- a log that is another ---------------------------------------------------------------------------------------------------


async def _recreate_sqlite(url: str) -> None:
    path = Path(url.removeprefix("sqlite://"))
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
    async with open_log(url) as log:
        await log.setup(create=True)


async def _truncate_sqlite(url: str) -> None:
    """Only the first record of each stream is left, as after a restore from an older copy."""
    with closing(sqlite3.connect(url.removeprefix("sqlite://"))) as connection, connection:
        for stream in (Stream.PUBLICATIONS, Stream.ACTIVATIONS):
            connection.execute(f'DELETE FROM {stream.value} WHERE "offset" > 0')
            connection.execute("UPDATE streams SET next = 1 WHERE name = ?", (stream.value,))


async def _recreate_kafka(url: str) -> None:
    settings = parse_kafka_url(url)
    topics = [settings.topic(stream) for stream in Stream]
    admin = AIOKafkaAdminClient(bootstrap_servers=list(settings.servers))
    await admin.start()
    try:
        await admin.delete_topics(topics)

        async def gone() -> bool:
            return not set(topics) & set(await admin.list_topics())

        await eventually(gone, "the topics are deleted", timeout=WAIT)
    finally:
        await admin.close()
    async with KafkaLog.of_url(url) as log:
        await log.setup(create=True)


async def _recreate_longer(url: str, recreate: Callable[[str], Awaitable[None]]) -> None:
    """With more records than the log had, of another history."""
    await recreate(url)
    async with open_log(url) as log:
        for number in range(8):
            await append(log, replace(_claim(), event_id=EventId(f"other-{number}")), source="other")
            await append(log, beat("other", number), source="other")


_ANOTHER: Final[dict[str, Callable[[str], Awaitable[None]]]] = {
    "sqlite-truncated": _truncate_sqlite,
    "sqlite-empty": _recreate_sqlite,
    "sqlite-longer": partial(_recreate_longer, recreate=_recreate_sqlite),
    "kafka-empty": _recreate_kafka,
    "kafka-longer": partial(_recreate_longer, recreate=_recreate_kafka),
}


@pytest.mark.chaos
@pytest.mark.parametrize("how", [pytest.param(h, marks=[pytest.mark.kafka] if "kafka" in h else []) for h in _ANOTHER])
async def test_a_log_that_is_another_stops_everybody_loudly(how: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The gateway says why and keeps its table, a publisher raises LogDiverged; also where the new log is longer than the old."""
    url = request.getfixturevalue("kafka_log_url") if "kafka" in how else f"sqlite://{tmp_path / 'log.db'}"
    async with open_log(url) as log:
        await log.setup(create=True)
        for sequence in range(2):
            await append(log, beat(sequence=sequence), source="test")

    def opened() -> Publisher:
        return Publisher.open(policy=POLICY, run="r1", log=url, store=f"memory://{tmp_path.name}", timeout=WAIT)

    publisher = await asyncio.to_thread(opened)
    try:
        await asyncio.to_thread(publisher.publish, weights(0))
        async with gateway(url) as seen:
            await seen.ready(200)
            assert await seen.replicas() == {"replica-0"}
            await _ANOTHER[how](url)
            for stream in ("publications", "activations"):
                assert follow.WAY_OUT in await seen.frozen(stream)
            await seen.ready(503)
            assert await seen.replicas() == {"replica-0"}
            with pytest.raises(LogDiverged):
                await asyncio.to_thread(publisher.publish, weights(1), timeout=WAIT)
    finally:
        await asyncio.to_thread(publisher.close)


def _claim() -> RunClaimed:
    claim = examples()["run_claimed"]
    assert isinstance(claim, RunClaimed)
    return claim


@pytest.mark.chaos
async def test_a_replica_serves_on_where_its_log_is_another(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path / 'log.db'}"
    async with world(tmp_path, url) as here, here.trainer():
        replica = await here.replica()
        await replica.serves(ref(0))
        await _recreate_sqlite(url)

        async def said() -> bool:
            return "replaced" in str((await replica.info())["log"]["publications"])

        await eventually(said, "the replica says that its log is another", timeout=WAIT)
        status, answer = await replica.generate(tokens=4)
        assert status == 200
        assert answer["meta_info"]["weight_version_start"] == 0
        status, _ = await replica.get("/readyz")
        assert status == 200
