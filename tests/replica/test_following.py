"""A replica reaches its channel's target whatever is lost, goes back where the channel does, and keeps the pool's budget."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stitch.core.events import Phase, ReplicaState, Transition
from stitch.core.ids import ChannelName, Offset, WriterId
from stitch.engines.reference.model import ModelConfig, init, to_bf16
from stitch.log.faulty import FaultyLog
from stitch.log.opening import open_log
from stitch.log.port import Bounds, Copies, Draft, EventLog, Reader, Record, Stream
from stitch.operators.ledger import open_ledger
from stitch.operators.steering import move_channel
from stitch.replica.config import Mode
from tests.replica.world import POLICY, Running, World, check_truth, misbehaving, ref, until
from tests.support import provision
from tests.support.provision import eventually

pytestmark = [pytest.mark.integration, pytest.mark.chaos]


class DeafLog(EventLog):
    """A log whose publications are never read again: what a consumer that fell silent looks like."""

    def __init__(self, inner: EventLog) -> None:
        self._inner = inner

    @property
    def url(self) -> str:
        return self._inner.url

    async def setup(self, *, create: bool) -> Copies:
        return await self._inner.setup(create=create)

    async def append(self, stream: Stream, draft: Draft, *, timeout: float | None = None) -> None:
        await self._inner.append(stream, draft, timeout=timeout)

    async def bounds(self, stream: Stream) -> Bounds:
        return await self._inner.bounds(stream)

    async def offset_at(self, stream: Stream, time_ms: int) -> Offset:
        return await self._inner.offset_at(stream, time_ms)

    async def newest(self, stream: Stream) -> Record | None:
        return await self._inner.newest(stream)

    async def reader(self, stream: Stream, start: Offset) -> Reader:
        if stream is Stream.PUBLICATIONS:
            await asyncio.Event().wait()
        return await self._inner.reader(stream, start)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def test_with_the_log_s_consumer_dead_it_follows_the_pointer(world: World) -> None:
    async with DeafLog(open_log(world.log_url)) as deaf:
        replica = await world.replica(events=deaf)
        async with world.trainer() as trainer:
            await replica.serves(ref(0))
            for _ in range(2):
                await replica.serves(await trainer.publish())
        assert (await replica.info())["target"]["origin"] == "pointer"
        status, answer = await replica.generate(weight_version={"run": "r1", "min_version": 2})
        assert status == 200, answer
        check_truth(world, answer)
        await replica.stop()


async def test_every_record_says_what_keeps_a_replica_from_its_target_and_how_long_it_paused(world: World) -> None:
    def beat() -> ReplicaState | None:
        """The last record, where it is a heartbeat."""
        last = world.of("replica-0")[-1:]
        return last[0] if last and last[0].transition is Transition.HEARTBEAT else None

    def beats(error: str | None, pause_ms: float | None = None) -> Callable[[], bool]:
        return lambda: (found := beat()) is not None and (found.error, found.pause_ms) == (error, pause_ms)

    async def move(version: str) -> None:
        async with open_log(world.log_url) as log, open_ledger(log, POLICY, source="/test") as ledger:
            await move_channel(ledger, "held", version, writer=WriterId("op"))

    replica = await world.replica(channel=ChannelName("held"))
    await until(beats("nothing was published under policy math yet"), "it says that there is nothing")
    async with world.trainer() as trainer:
        missing = "channel held names no version yet (there are: latest); stitch channel move held VERSION makes it"
        await until(beats(missing), "it says that its channel names none")
        await trainer.publish()
        await move("0")
        await replica.serves(ref(0))
        await until(beats(None), "nothing keeps it any more")
        await move("1")
        await replica.serves(ref(1))
    (taken,) = [record for record in world.of("replica-0", Transition.ACTIVATED) if record.serving == ref(1)]
    assert taken.pause_ms is not None
    await until(beats(None, taken.pause_ms), "it goes on")
    await replica.stop()


async def test_a_stale_pointer_is_repaired_by_whoever_sees_it(world: World) -> None:
    async with world.trainer() as trainer:
        await trainer.publish()
    # The log loses its pointers: as if the trainer had died between event and pointer, every time.
    other = World(world.folder / "copy", f"{world.log_url}x")
    other.store_url = world.store_url
    await other.begin()
    try:
        reader = await world.events.reader(Stream.PUBLICATIONS, Offset(0))
        for record in await reader.poll(1.0):
            await other.events.append(record.stream, Draft(key=record.key, value=record.value, headers=record.headers))
        await reader.aclose()
        replica = await other.replica()
        await replica.serves(ref(1))

        async def repaired() -> bool:
            return await other.events.newest(Stream.POINTERS) is not None

        await eventually(repaired, "the pointer is written")
    finally:
        await other.end()


async def test_a_rewind_and_a_new_run_are_followed(world: World) -> None:
    replica = await world.replica(command=misbehaving(), drain_seconds=1.0)
    async with world.trainer() as trainer:
        for _ in range(2):
            await replica.serves(await trainer.publish())
    await replica.misbehave(slow_ms=10)
    pinned = asyncio.create_task(replica.generate(tokens=4000, weight_version={"exact_version": 2}))
    free = asyncio.create_task(replica.generate(tokens=400))
    await eventually(lambda: _in_flight(replica, 2), "both are admitted")
    async with world.trainer(boot_version=1):
        await replica.serves(ref(1))
        status, answer = await pinned
        assert (status, answer["error"]["generation_started"], answer["error"]["retryable"]) == (503, True, True)
        status, answer = await free
        assert status == 200
        check_truth(world, answer)
        assert [s["version"] for s in answer["meta_info"]["weight_versions"]] == ["2", "1"]

    # A new run on the same weights: an alias, taken without a pause, but no request lives across the change of run.
    crossing = asyncio.create_task(replica.generate(tokens=4000))
    await eventually(lambda: _in_flight(replica, 1), "it is admitted")
    loaded = (await _report(world, replica))["model_path"]
    async with world.trainer("r2", boot_version=str(ref(1)), take_over=True) as trainer:
        await replica.serves(ref(0, "r2"))
        assert (await _report(world, replica))["model_path"] == loaded, "the weights were loaded again"
        assert (await crossing)[0] == 503
        status, answer = await replica.generate(weight_version={"run": "r2", "exact_version": 0})
        assert status == 200
        check_truth(world, answer, "r2")
        status, answer = await replica.generate(weight_version={"run": "r1", "min_version": 1})
        assert status == 410
        await replica.serves(await trainer.publish())
        status, answer = await replica.generate()
        check_truth(world, answer, "r2")


async def _in_flight(replica: Running, count: int) -> bool:
    return bool((await replica.info())["gate"]["in_flight"] == count)


async def _report(world: World, replica: Running) -> dict[str, str]:
    async with world.http.get(f"{await replica.engine_url()}/model_info") as response:
        found: dict[str, str] = await response.json()
        return found


async def test_in_quiesce_mode_no_request_meets_two_versions(world: World) -> None:
    replica = await world.replica(command=misbehaving(), mode=Mode.QUIESCE)
    async with world.trainer() as trainer:
        await replica.serves(ref(0))
        await replica.misbehave(slow_ms=5)
        stop = asyncio.Event()
        answers = []

        async def ask() -> None:
            while not stop.is_set():
                status, answer = await replica.generate(tokens=60)
                assert status == 200, answer
                check_truth(world, answer)
                answers.append(answer)

        asking = [asyncio.create_task(ask()) for _ in range(3)]
        for _ in range(2):
            await replica.serves(await trainer.publish())
        stop.set()
        await asyncio.gather(*asking)
    assert {len(answer["meta_info"]["weight_versions"]) for answer in answers} == {1}


async def test_a_second_life_of_a_replica_id_fences_the_first(world: World) -> None:
    first = await world.replica()
    async with world.trainer():
        await first.serves(ref(0))
        second = await world.replica(workdir=world.folder / "work" / "elsewhere")
        await second.serves(ref(0))
        assert await first.exit_code() == 4
    assert (await second.get("/readyz"))[0] == 200
    assert (await second.generate())[0] == 200


@pytest.mark.parametrize("fault", [FaultyLog.cut, FaultyLog.bar])
async def test_while_the_log_is_away_it_serves_and_then_tells_the_newest_state(
    world: World, fault: Callable[[FaultyLog], None]
) -> None:
    """Or refuses everything, as where a permission was taken away: no rollout ends by it."""
    async with FaultyLog(open_log(world.log_url)) as faulty:
        replica = await world.replica(events=faulty)
        async with world.trainer() as trainer:
            await replica.serves(ref(0))
            fault(faulty)
            # The pointer comes over another client, so the version is still learned of; the slot is taken blindly.
            await trainer.publish()
            assert (await replica.generate())[0] == 200
            assert (await replica.get("/readyz"))[0] == 200
            before = len(world.of("replica-0"))
            await eventually(lambda: _said(replica), "it notices")
            faulty.mend()
            await replica.serves(ref(1))
        await until(
            lambda: any(r.serving == ref(1) for r in world.of("replica-0")[before:]),
            "the newest state is on the stream",
        )
        await replica.stop()
    assert all(r.incarnation == world.of("replica-0")[1].incarnation for r in world.of("replica-0")[1:])


async def _said(replica: Running) -> bool:
    return (await replica.info())["log"]["activations"] is not None


async def test_a_replica_that_cannot_read_the_stream_goes_after_a_bound(world: World) -> None:
    async with FaultyLog(open_log(world.log_url)) as faulty:
        replica = await world.replica(events=faulty, slot_seconds=1.0)
        async with world.trainer() as trainer:
            await replica.serves(ref(0))
            faulty.cut()
            await replica.serves(await trainer.publish())
            faulty.mend()
        await replica.stop()


async def test_three_replicas_take_their_turns(world: World) -> None:
    names = [f"replica-{n}" for n in range(3)]
    async with world.trainer() as trainer:
        replicas = await asyncio.gather(*(world.replica(name) for name in names))
        for replica in replicas:
            await replica.serves(ref(0))
        await until(lambda: all(world.of(name, Transition.ACTIVATED) for name in names), "all told that they serve")
        begin = len(world.records)
        for _ in range(3):
            newest = await trainer.publish()
        for replica in replicas:
            await replica.serves(newest)
    await until(
        lambda: all(world.of(name)[-1].serving == newest and world.of(name)[-1].phase is Phase.SERVING for name in names),
        "all told that they serve the newest",
    )
    busy: set[str] = set()
    most = 0
    for record in world.records[begin:]:
        (busy.add if record.phase is Phase.ACTIVATING else busy.discard)(record.replica)
        most = max(most, len(busy))
    assert most == 1


async def test_killed_while_staging_it_comes_back_and_converges(sqlite_world: World) -> None:
    """The agent is killed without a word; its engine goes with it, and the next life rebuilds what was half done."""
    world = sqlite_world
    sizes = ModelConfig(embedding=512, context=8, hidden=2048)
    large = to_bf16(init(sizes, 7))
    async with world.trainer(sizes=sizes) as trainer:
        first = _start(world)
        await until(lambda: bool(world.of("killed", Transition.ACTIVATED)), "it serves")
        engines = _engines(first.pid)
        assert engines
        work = asyncio.create_task(asyncio.to_thread(lambda: trainer.publisher.publish(large, kind="full")))
        await until(lambda: len(world.of("killed", Transition.STAGE_STARTED)) == 2, "it stages the second")
        first.kill()
        trainer.note(await work)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines), "its engine is gone")
        second = _start(world)
        await until(
            lambda: world.of("killed")[-1].serving == ref(1) and world.of("killed")[-1].phase is Phase.SERVING,
            "the second life serves the second version",
        )
        assert world.of("killed")[-1].weights_digest == world.digests[ref(1)]
        await asyncio.to_thread(second.stop)


def _start(world: World) -> provision.Running:
    command = [sys.executable, "-m", "stitch", "replica", "--json", "--id", "killed", "--log", world.log_url]
    command += ["--store", world.store_url, "--policy", "math", "--workdir", str(world.folder / "killed"), "--heartbeat", "0.5"]
    return provision.start(command, output=world.folder / "killed.out", name="replica")


def _engines(agent: int) -> list[int]:
    """All processes below the agent."""
    below: list[int] = []
    pending = [agent]
    while pending:
        pid = pending.pop()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found = [int(child) for child in task.read_text().split()]
            below += found
            pending += found
    return below
