"""Which requests are answered, by whom, and what the others are told: a gateway before fake replicas, over real sockets."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from stitch.core.events import Phase, Transition
from stitch.core.ids import ChannelName, PolicyId
from tests.gateway.scene import R2, Scene, until, version

pytestmark = pytest.mark.integration


async def test_bytes_there_and_back_with_versions(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0)
    replica = await play.replica("a", number=0)
    await play.gateway()
    odd = b'{ "text":  "\xc3\xa9", "unknown": [1.0, 1e400] }'
    got = await play.ask(body=odd)
    assert (got.status, got.body) == (200, odd)
    assert got.headers["x-stitch-run"] == "r1"
    assert got.headers["x-stitch-version-start"] == "0"
    assert got.headers["x-stitch-replica"] == "a"
    assert len(got.headers["x-stitch-request-id"]) == 32
    assert replica.seen[0].body == odd
    assert replica.seen[0].headers["x-stitch-request-id"] == got.headers["x-stitch-request-id"]


async def test_forwards_what_was_asked_with_the_run_that_it_resolved(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0, 1, 2)
    replica = await play.replica("a", number=2)
    await play.gateway()
    async with play.http.post(
        f"{play.url}/v1/completions?x=a%26b",
        json={"model": "p", "weight_version": {"min_version": 1}},
        headers={
            "X-Session-ID": "s",
            "X-Stitch-Max-Lag": "1",
            "X-Stitch-Request-Id": "mine",
            "X-Other": "kept",
            "X-Stitch-Wait": "1",
        },
    ) as response:
        assert response.status == 200
        assert response.headers["X-Stitch-Tip"] == "r1/weight_v000002"
        assert response.headers["X-Stitch-Request-Id"] == "mine"
    seen = replica.seen[0]
    assert (seen.path, seen.query) == ("/v1/completions", "x=a%26b")
    ours = {name: value for name, value in seen.headers.items() if name.startswith("x-s")}
    assert ours == {
        "x-stitch-policy": "p",
        "x-stitch-run": "r1",
        "x-stitch-min-version": "1",
        "x-stitch-max-lag": "1",
        "x-stitch-session": "s",
        "x-stitch-request-id": "mine",
    }
    assert seen.headers["x-other"] == "kept"


async def test_409_has_the_documented_body(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0, 1, 2)
    await play.replica("a", number=1)
    await play.gateway()
    got = await play.ask(body={"text": "x", "weight_version": {"min_version": 5, "exact_version": None}})
    assert got.status == 409
    assert int(got.headers["retry-after"]) >= 1
    error = got.json["error"]
    assert error["type"] == got.json["type"] == "WeightVersionNotReady"
    assert error["retryable"] is True
    assert error["policy"] == "p"
    assert error["required"] == {"run": "r1", "min_version": 5, "exact_version": None}
    assert error["serving"] == "r1/weight_v000001"
    assert error["tip"] == "r1/weight_v000002"
    assert (got.json["target_version"], got.json["applied"]) == (5, 1)
    assert error["request_id"] == got.headers["x-stitch-request-id"]


async def test_before_any_claim(play: Scene) -> None:
    await play.replica("a")
    await play.gateway()
    for headers in ({}, {"min_version": "0"}, {"exact_version": "r1/weight_v000000"}):
        got = await play.ask(**headers)
        assert got.status == 409
        assert got.json["error"]["tip"] is None


async def test_no_replica_of_a_claimed_policy(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0)
    await play.gateway()
    got = await play.ask()
    assert got.status == 503
    assert got.json["error"]["generation_started"] is False
    assert got.headers["retry-after"] == "1"


async def test_410_for_what_can_never_be_met(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0, 2, 3, 4)
    await play.trainer.claim(boot=2)
    await play.trainer.publish(5)
    await play.replica("a", number=5)
    await play.gateway()
    for number, reason in ((4, "abandoned"), (1, "never published")):
        got = await play.ask(exact_version=str(number))
        assert got.status == 410
        assert got.json["error"]["retryable"] is False
        assert reason in got.json["error"]["reason"]
    assert (await play.ask(exact_version="6")).status == 409
    await play.trainer.claim(run=R2, boot=0, alias=version(5))
    await until_gone(play, run="r1", min_version="2")


async def until_gone(play: Scene, **headers: str) -> None:
    async with asyncio.timeout(20):
        while (got := await play.ask(**headers)).status != 410:
            await asyncio.sleep(0.01)
    assert "superseded" in got.json["error"]["reason"]


@pytest.mark.parametrize(
    ("headers", "body", "field"),
    [
        ({"min_version": "-1"}, None, "min_version"),
        ({"wait": "nan"}, None, "wait"),
        ({}, {"weight_version": {"min_version": True}}, "min_version"),
        ({}, {"weight_version": 7}, "weight_version"),
        ({"max_lag": "1"}, {"weight_version": {"min_version": 2.5}}, "min_version"),
        ({}, b'{"weight_version"', "body"),
        ({}, b'["weight_version"]', "body"),
        ({}, b'{"weight_version":' + b"[" * 100_000, "body"),
    ],
)
async def test_400_names_the_field(play: Scene, headers: dict[str, str], body: object, field: str) -> None:
    replica = await play.replica("a", number=0)
    await play.gateway()
    got = await play.ask(body=body, **headers)
    assert got.status == 400
    assert got.json["error"]["type"] == "InvalidRequest"
    assert got.json["error"]["field"] == field
    assert not replica.seen


async def test_policy_must_be_named_where_there_are_several(play: Scene) -> None:
    await play.replica("a", number=0)
    other = await play.replica("b", number=0, policy=PolicyId("q"))
    await play.gateway(policy=None)
    got = await play.ask()
    assert (got.status, got.json["error"]["field"]) == (400, "policy")
    assert (await play.ask(policy="q")).replica == "b"
    assert (await play.ask("/v1/chat/completions", {"model": "q", "messages": []})).replica == "b"
    assert (await play.ask("/v1/chat/completions", {"model": "nobody/knows", "messages": []})).json["error"]["field"] == "model"
    assert len(other.seen) == 2


async def test_constraint_decides_who_may_answer(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0, 1, 2)
    for name, number in (("a", 0), ("b", 1), ("c", 2)):
        await play.replica(name, number=number)
    await play.gateway()
    assert {(await play.ask(exact_version="1")).replica for _ in range(10)} == {"b"}
    assert {(await play.ask(min_version="2")).replica for _ in range(10)} == {"c"}
    assert {(await play.ask(max_lag="0")).replica for _ in range(10)} == {"c"}
    assert {(await play.ask("/v1/completions", {"model": "p@0"})).replica for _ in range(10)} == {"a"}
    assert "a" not in {(await play.ask(max_lag="1")).replica for _ in range(20)}


async def test_default_max_lag(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0, 1, 2)
    await play.replica("a", number=0)
    fresh = await play.replica("b", number=2)
    await play.gateway(default_max_lag=1)
    assert {(await play.ask()).replica for _ in range(10)} == {"b"}
    assert (await play.ask(exact_version="0")).replica == "a"
    assert fresh.seen[0].headers["x-stitch-max-lag"] == "1"


async def test_channel_restricts_to_its_followers(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0)
    await play.trainer.move("canary", version(0))
    await play.replica("a", number=0)
    await play.replica("b", number=0, channel=ChannelName("canary"))
    await play.gateway()
    assert {(await play.ask(channel="canary")).replica for _ in range(10)} == {"b"}
    assert {(await play.ask("/v1/chat/completions", {"model": "p@latest"})).replica for _ in range(10)} == {"a"}
    assert (await play.ask(channel="stable")).status == 409


async def test_waits_for_an_activation(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0)
    replica = await play.replica("a", number=0)
    await play.gateway()
    asking = asyncio.create_task(play.ask(min_version="1", wait="15"))
    await waiting(play, 1)
    await play.trainer.publish(1)
    await replica.serving(1)
    got = await asking
    assert (got.status, got.headers["x-stitch-version-start"]) == (200, "1")


async def test_wait_ends_in_409(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0)
    await play.replica("a", number=0)
    await play.gateway(default_wait=0.2)
    assert (await play.ask(min_version="1")).status == 409
    assert (await play.ask(min_version="1", wait="0.1")).status == 409


async def test_wait_learns_that_it_is_in_vain(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0)
    await play.replica("a", number=0)
    await play.gateway()
    asking = asyncio.create_task(play.ask(min_version="r1/weight_v000001", wait="15"))
    await waiting(play, 1)
    await play.trainer.claim(run=R2, boot=0, alias=version(0))
    assert (await asking).status == 410


async def test_waiting_is_bounded_in_number(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0)
    replica = await play.replica("a", number=0)
    await play.gateway(max_waiting=2)
    asking = [asyncio.create_task(play.ask(min_version="1", wait="15")) for _ in range(2)]
    await waiting(play, 2)
    got = await play.ask(min_version="1", wait="15")
    assert (got.status, got.headers["retry-after"]) == (429, "1")
    await play.trainer.publish(1)
    await replica.serving(1)
    assert [(await each).status for each in asking] == [200, 200]


async def test_full_is_429_and_released_waiters_respect_capacity(play: Scene) -> None:
    replica = await play.replica("a", number=0, capacity=2)
    replica.hold = asyncio.Event()
    await play.gateway(max_waiting=3)
    asking = [asyncio.create_task(play.ask()) for _ in range(5)]
    await waiting(play, 3)
    got = await play.ask()
    assert (got.status, got.json["error"]["type"]) == (429, "Busy")
    assert "retry-after" in got.headers
    replica.hold.set()
    assert [(await each).status for each in asking] == [200] * 5
    assert replica.most_active == 2


async def test_waiters_for_a_version_respect_capacity(play: Scene) -> None:
    await play.trainer.claim()
    await play.trainer.publish(0)
    replica = await play.replica("a", number=0, capacity=2)
    await play.gateway()
    asking = [asyncio.create_task(play.ask(min_version="1", wait="15")) for _ in range(8)]
    await waiting(play, 8)
    replica.hold = asyncio.Event()
    await play.trainer.publish(1)
    await replica.serving(1)
    await until(lambda: replica.active == 2)
    await waiting(play, 6)
    replica.hold.set()
    assert [(await each).status for each in asking] == [200] * 8
    assert replica.most_active == 2


async def test_queue_for_room_ends_at_the_deadline(play: Scene) -> None:
    replica = await play.replica("a", number=0, capacity=1)
    replica.hold = asyncio.Event()
    await play.gateway(deadline=0.2)
    asking = asyncio.create_task(play.ask())
    await until(lambda: replica.active == 1)
    assert (await play.ask()).status == 429
    replica.hold.set()
    assert (await asking).status == 200


async def test_a_waiter_that_leaves_takes_no_place(play: Scene) -> None:
    replica = await play.replica("a", number=0, capacity=1)
    replica.hold = asyncio.Event()
    await play.gateway()
    first = asyncio.create_task(play.ask())
    await until(lambda: replica.active == 1)
    leaving = asyncio.create_task(play.ask())
    await waiting(play, 1)
    leaving.cancel()
    await waiting(play, 0)
    replica.hold.set()
    assert (await first).status == 200
    assert (await play.ask()).status == 200
    assert len(replica.seen) == 2


async def test_sessions_stay_and_strangers_spread(play: Scene) -> None:
    for name in "abcd":
        await play.replica(name, number=0)
    await play.gateway()
    for session in ("s1", "s2", "s3"):
        assert len({(await play.ask(session=session)).replica for _ in range(8)}) == 1
    homes = Counter([(await play.ask(session=f"session-{i}")).replica for i in range(40)])
    assert len(homes) == 4


async def test_load_spreads_over_all(play: Scene) -> None:
    replicas = [await play.replica(name, number=0, capacity=20) for name in "abcd"]
    for replica in replicas:
        replica.hold = asyncio.Event()
    await play.gateway()
    asking = [asyncio.create_task(play.ask()) for _ in range(40)]
    await until(lambda: sum(r.active for r in replicas) == 40)
    # Of two drawn by chance the less loaded: random placing alone would spread far wider.
    assert max(r.active for r in replicas) - min(r.active for r in replicas) <= 6
    for replica in replicas:
        assert replica.hold is not None
        replica.hold.set()
    assert {(await each).status for each in asking} == {200}


async def test_a_session_goes_elsewhere_while_its_replica_is_full(play: Scene) -> None:
    replicas = {name: await play.replica(name, number=0, capacity=1) for name in "ab"}
    await play.gateway()
    home = (await play.ask(session="s")).replica
    replicas[home].hold = asyncio.Event()
    held = asyncio.create_task(play.ask(session="s"))
    await until(lambda: replicas[home].active == 1)
    assert (await play.ask(session="s")).replica != home
    replicas[home].hold.set()
    assert (await held).replica == home


async def test_one_that_is_activating_is_taken_only_where_no_other_will_do(play: Scene) -> None:
    busy = await play.replica("a", number=0)
    await play.replica("b", number=0)
    await busy.tell(Transition.ACTIVATION_STARTED, phase=Phase.ACTIVATING, target=version(1))
    await play.gateway()
    assert {(await play.ask()).replica for _ in range(10)} == {"b"}
    await play.replica("c", number=0, policy=PolicyId("q"))
    only = await play.replica("d", number=0, policy=PolicyId("q2"))
    await only.tell(Transition.ACTIVATION_STARTED, phase=Phase.ACTIVATING)
    await play.sees(lambda t: t.get("d", {}).get("phase") == "activating")
    assert (await play.ask(policy="q2")).replica == "d"


async def waiting(play: Scene, number: int) -> None:
    async with asyncio.timeout(20):
        while f"stitch_gateway_waiting {number}\n" not in (await play.get("/metrics")).body.decode():
            await asyncio.sleep(0.01)
