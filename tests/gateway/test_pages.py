"""Membership over real sockets, and what the gateway shows of itself."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from stitch.core.errors import InvalidRequest, Unavailable
from stitch.core.events import Phase, Transition
from stitch.core.ids import ChannelName, Offset
from stitch.gateway.app import create_app
from stitch.gateway.config import GatewayConfig
from stitch.http.server import serve
from stitch.http.upstream import Upstream
from stitch.log.memory import MemoryLog
from stitch.log.port import Bounds, Draft, Reader, Stream
from stitch.log.views import fleet_follower, lineage_follower
from tests.gateway.scene import BOUND, P, Scene, version

pytestmark = pytest.mark.integration


async def test_replicas_come_go_and_lapse(play: Scene) -> None:
    await play.trainer.claim()
    await play.gateway()
    a, b = await play.replica("a", number=0), await play.replica("b", number=0)
    play.beating(a)
    beating = play.background(b.beat())
    await play.sees(lambda t: t.keys() == {"a", "b"} and all(r["in_rotation"] for r in t.values()))
    await a.tell(Transition.DRAINING, phase=Phase.DRAINING)
    await play.sees(lambda t: not t["a"]["in_rotation"])
    await a.serving(0)
    await play.sees(lambda t: t["a"]["in_rotation"])
    beating.cancel()
    await play.sees(lambda t: not t["b"]["in_rotation"])
    assert (await play.table())["b"]["lease_seconds_left"] <= 0
    assert {(await play.ask()).replica for _ in range(10)} == {"a"}
    await a.tell(Transition.LEFT, phase=Phase.LEFT)
    await play.sees(lambda t: "a" not in t)
    got = await play.ask()
    assert (got.status, got.json["error"]["generation_started"]) == (503, False)


async def test_a_log_silent_for_all_keeps_the_table(play: Scene) -> None:
    for name in "ab":
        await play.replica(name, number=0, heartbeat_ms=50)
    await play.gateway()
    async with asyncio.timeout(BOUND):
        while not (await play.get("/replicas")).json["stale"]:
            await asyncio.sleep(0.01)
    assert all(row["in_rotation"] for row in (await play.table()).values())
    assert (await play.ask()).status == 200
    ready = await play.get("/readyz")
    assert (ready.status, ready.json["stale"]) == (200, True)


async def test_an_older_incarnation_is_fenced(play: Scene) -> None:
    old = await play.replica("a", number=0)
    new = await play.replica("a", number=1)
    await play.gateway()
    await old.serving(7)
    await old.tell(Transition.LEFT, phase=Phase.LEFT)
    marker = await play.replica("z", number=1)
    await play.sees(lambda t: "z" in t and t["z"]["in_rotation"])
    row = (await play.table())["a"]
    assert (row["serving"], row["url"]) == ("r1/weight_v000001", new.url)
    assert marker.url != new.url


async def test_two_gateways_agree(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0, 1)
    first = await play.gateway()
    replicas = [await play.replica(name, number=number) for name, number in (("a", 0), ("b", 1), ("c", 1))]
    second = await play.gateway()
    await replicas[2].tell(Transition.DRAINING, phase=Phase.DRAINING)
    for url in (first, second):
        await play.sees(lambda t: len(t) == 3 and not t["c"]["in_rotation"], url=url)
    shown = [await play.table(url=url) for url in (first, second)]
    for table in shown:
        for row in table.values():
            del row["lease_seconds_left"]
    assert shown[0] == shown[1]
    for url in (first, second):
        assert (await play.ask(url=url, min_version="1")).replica == "b"
    homes = [[(await play.ask(url=url, session=str(i))).replica for i in range(10)] for url in (first, second)]
    assert homes[0] == homes[1]


async def test_policies_models_and_replicas(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0, 1, 2)
    await play.trainer.move("stable", version(1))
    await play.replica("a", number=1, channel=ChannelName("stable"))
    await play.gateway()
    [policy] = (await play.get("/policies")).json["policies"]
    assert (policy["policy"], policy["run"], policy["owner"], policy["epoch"]) == ("p", "r1", "w", 1)
    assert (policy["tip"], policy["versions"], policy["replicas"]) == ("r1/weight_v000002", 3, 1)
    assert policy["channels"]["stable"]["target"] == "r1/weight_v000001"
    assert policy["channels"]["latest"]["target"] == "r1/weight_v000002"
    models = (await play.get("/v1/models")).json
    assert models["object"] == "list"
    assert [m["id"] for m in models["data"]] == ["p", "p@latest", "p@stable"]
    assert (await play.get("/v1/models/p@stable")).json["object"] == "model"
    assert (await play.get("/v1/models/q")).status == 404
    row = (await play.table())["a"]
    assert (row["lag"], row["serving"], row["phase"], row["in_flight_here"]) == (1, "r1/weight_v000001", "serving", 0)
    assert "/generate" in (await play.get("/")).json["paths"]


async def test_routes_that_are_not_admitted(play: Scene) -> None:
    replica = await play.replica("a", number=0)
    await play.gateway()
    for path in ("/update_weights_from_disk", "/pause_generation", "/v1/embeddings", "/generate/", "//generate"):
        got = await play.ask(path)
        assert (got.status, got.json["error"]["type"]) == (403, "Forbidden"), path
    assert (await play.get("/get_model_info")).status == 404
    assert (await play.get("/generate")).status == 405
    assert (await play.ask("/policies")).status == 405
    assert not replica.seen


async def test_token(play: Scene) -> None:
    replica = await play.replica("a", number=0)
    url = (await open_gateway(play, token="s3cret"))[0]
    async with asyncio.timeout(BOUND):
        while (await play.get("/readyz", url=url)).status != 200:
            await asyncio.sleep(0.01)
    for path in ("/livez", "/readyz", "/metrics"):
        assert (await play.get(path, url=url)).status == 200
    for path in ("/", "/replicas", "/policies", "/v1/models", "/events", "/nonsense"):
        assert (await play.get(path, url=url)).status == 401
        assert (await play.get(path, url=url, Authorization="Bearer wrong")).status == 401
    assert (await play.ask(url=url)).status == 401
    assert not replica.seen
    async with play.http.post(f"{url}/generate", data=b"{}", headers={"Authorization": "Bearer s3cret"}) as response:
        assert response.status == 200
    assert replica.seen[0].headers["authorization"] == "Bearer s3cret"


async def test_metrics_are_well_formed(play: Scene) -> None:
    await play.replica("a", number=0)
    await play.gateway()
    await play.ask()
    await play.ask(min_version="x")
    got = await play.get("/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"\n]*"(,[a-z]+="[^"\n]*")*\})? [0-9.e+-]+\Z')
    types: dict[str, str] = {}
    for line in got.body.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types
            types[name] = kind
        elif not line.startswith("# HELP "):
            assert sample.match(line), line
    text = got.body.decode()
    assert 'stitch_gateway_answers_total{route="/generate",status="200"} 1' in text
    assert 'stitch_gateway_answers_total{route="/generate",status="400"} 1' in text
    assert 'stitch_gateway_placing_seconds_bucket{le="+Inf"} 1' in text
    assert 'stitch_gateway_replicas{policy="p",phase="serving"} 1' in text
    assert types["stitch_gateway_placing_seconds"] == "histogram"


async def test_events_tell_what_happens(play: Scene) -> None:
    replica = await play.replica("a", number=0)
    await play.gateway()
    async with asyncio.timeout(BOUND), play.http.get(f"{play.url}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert await response.content.readuntil(b"\n\n") == b": listening\n\n"
        await play.trainer.claim()
        told = await response.content.readuntil(b"\n\n")
        assert told.startswith(b"id: publications/0\nevent: RunClaimed\ndata: ")
        await replica.tell()
        await replica.serving(1)
        told = await response.content.readuntil(b"\n\n")
        data = json.loads(told.split(b"data: ", 1)[1])
        assert data["event"]["transition"] == "activated"  # the heartbeat before it is not told
        assert data["event"]["serving"] == {"run": "r1", "number": 1}
    async with asyncio.timeout(BOUND):
        while b"stitch_gateway_event_listeners 0\n" not in (await play.get("/metrics")).body:
            await asyncio.sleep(0.01)


class AwayLog(MemoryLog):
    """A log that can be away."""

    away = False

    async def bounds(self, stream: Stream) -> Bounds:
        self._look()
        return await super().bounds(stream)

    async def reader(self, stream: Stream, start: Offset) -> Reader:
        self._look()
        reader = await super().reader(stream, start)
        poll = reader.poll

        async def looking(timeout: float, max_records: int = 1000) -> object:
            found = await poll(0.02, max_records)
            self._look()
            return found

        reader.poll = looking  # type: ignore[method-assign, assignment]
        return reader

    def _look(self) -> None:
        if self.away:
            raise Unavailable("the log is away")


async def open_gateway(play: Scene, log: MemoryLog | None = None, **options: str) -> tuple[str, MemoryLog]:
    log = log or play.log
    fleet, lineage = fleet_follower(log), lineage_follower(log)
    upstream = await play._stack.enter_async_context(Upstream())
    gateway = create_app(GatewayConfig(log=log.url, policy=P, **options), fleet, lineage, upstream)  # type: ignore[arg-type]
    for follower in (fleet, lineage):
        play.background(follower.run())
    return await play._stack.enter_async_context(serve(gateway, grace=0)), log


async def test_readiness_waits_for_both_streams_and_outlives_the_log(play: Scene) -> None:
    log = AwayLog(play.name)
    log.away = True
    await play.replica("a", number=0)
    play.url, _ = await open_gateway(play, log)
    assert (await play.get("/livez")).status == 200
    ready = await play.get("/readyz")
    assert ready.status == 503
    assert len(ready.json["reasons"]) == 2
    got = await play.ask()
    assert (got.status, got.json["error"]["generation_started"]) == (503, False)
    log.away = False
    async with asyncio.timeout(BOUND):
        while (await play.get("/readyz")).status != 200:
            await asyncio.sleep(0.01)
    assert (await play.ask()).status == 200
    log.away = True
    async with asyncio.timeout(BOUND):
        while not (ready := await play.get("/readyz")).json["stale"]:
            await asyncio.sleep(0.01)
    assert ready.status == 200  # losing the log stops no rollout
    assert "away" in str(ready.json["streams"])
    assert (await play.ask()).status == 200


async def test_a_frozen_fold_ends_readiness(play: Scene) -> None:
    await play.replica("a", number=0)
    await play.gateway()
    await play.log.append(Stream.PUBLICATIONS, Draft(key="p", value=b"no event", headers=()))
    async with asyncio.timeout(BOUND):
        while (ready := await play.get("/readyz")).status == 200:
            await asyncio.sleep(0.01)
    assert "publications" in ready.json["reasons"][0]
    assert (await play.get("/livez")).status == 200


@pytest.mark.parametrize(
    "options", [{"port": 70000}, {"default_max_lag": -1}, {"default_wait": float("nan")}, {"max_waiting": -1}, {"deadline": 0.0}]
)
def test_configuration_is_checked(options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        GatewayConfig(log="memory://", **options)  # type: ignore[arg-type]
    assert refused.value.field in options
    assert "s3cret" not in repr(GatewayConfig(log="memory://", token="s3cret"))
