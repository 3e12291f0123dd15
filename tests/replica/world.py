"""A small world for tests of replicas: a log, a store, a trainer that publishes, and replicas with real reference engines."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
from multidict import CIMultiDictProxy

from stitch.core.events import Event, ReplicaState, RunVersion, Transition
from stitch.core.ids import PolicyId, ReplicaId, RunId, VersionNumber
from stitch.core.lineage import Position
from stitch.core.manifest import weights_digest
from stitch.engines.reference.model import ModelConfig, init, to_bf16
from stitch.engines.reference.serve import init_checkpoint
from stitch.log.follow import Follower
from stitch.log.opening import open_log
from stitch.log.port import EventLog, Stream
from stitch.replica.config import ReplicaConfig
from stitch.replica.main import run_replica
from stitch.trainer.author import Publication
from stitch.trainer.publisher import Publisher
from stitch.weights.digest import spec_of
from stitch.weights.tensors import host_tensors
from tests.support.provision import eventually

POLICY: Final = PolicyId("math")
RUN: Final = "r1"
STEP_SECONDS: Final = 60.0
"""Bound on anything that a replica is to reach, on a busy machine."""
SMALL: Final = ModelConfig(embedding=8, context=4, hidden=16)


def ref(number: int, run: str = RUN) -> RunVersion:
    return RunVersion(run=RunId(run), number=VersionNumber(number))


class Trainer:
    """Publishes random versions. `digests` are the truth: what each version's weights hash to."""

    def __init__(self, publisher: Publisher, run: str, digests: dict[RunVersion, str]) -> None:
        self.publisher, self.run, self.digests = publisher, RunId(run), digests
        self._seed = 1000 * len(digests)

    async def publish(self, **options: Any) -> RunVersion:
        self._seed += 1
        weights = to_bf16(init(SMALL, self._seed))
        # Known before it is published: a replica may serve it before the trainer has its answer.
        coming = RunVersion(run=self.run, number=VersionNumber(self.publisher.next_number))
        self.digests[coming] = weights_digest(map(spec_of, host_tensors(weights)))
        return self.note(await asyncio.to_thread(lambda: self.publisher.publish(weights, **options)))

    def note(self, done: Publication) -> RunVersion:
        version = RunVersion(run=done.ref.run, number=done.ref.number)
        self.digests[version] = done.weights_digest
        return version


class World:
    """Everything of one test. `records` are all activations, in the log's order."""

    def __init__(self, folder: Path, log_url: str) -> None:
        self.folder, self.log_url = folder, log_url
        self.store_url = f"file://{folder / 'store'}"
        self.records: list[ReplicaState] = []
        self.digests: dict[RunVersion, str] = {}
        self.events = open_log(log_url)
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=STEP_SECONDS))
        self._runs: list[Running] = []
        self._reading: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        await self.events.setup(create=True)
        follower: Follower[None] = Follower(self.events, Stream.ACTIVATIONS, None, self._take)
        self._reading = asyncio.create_task(follower.run())

    def _take(self, state: None, event: Event, at: Position) -> None:
        if isinstance(event, ReplicaState):
            self.records.append(event)

    async def end(self) -> None:
        for running in self._runs:
            await running.stop()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self.http.close()
        await self.events.aclose()

    @asynccontextmanager
    async def trainer(self, run: str = RUN, *, sizes: ModelConfig = SMALL, **options: Any) -> AsyncIterator[Trainer]:
        """A publisher of the run; a new one begins with a random base of these sizes."""
        if "boot_version" not in options:
            base = self.folder / f"base-{run}"
            if not base.exists():
                init_checkpoint(base, seed=len(run) + ord(run[-1]), config=sizes)
            options["base"] = base
        opened = await asyncio.to_thread(
            lambda: Publisher.open(policy=POLICY, run=run, log=self.log_url, store=self.store_url, **options)
        )
        try:
            trainer = Trainer(opened, run, self.digests)
            await self._note_lineage()
            yield trainer
        finally:
            await asyncio.to_thread(opened.close)

    async def _note_lineage(self) -> None:
        from stitch.log.views import lineage_follower

        follower = lineage_follower(self.events)
        task = asyncio.create_task(follower.run())
        lineage = (await follower.catch_up(STEP_SECONDS)).policy(POLICY)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for version in lineage.versions.values():
            self.digests[version.ref] = version.manifest.weights_digest

    def config(self, name: str = "replica-0", **changes: Any) -> ReplicaConfig:
        config = ReplicaConfig(
            log=self.log_url,
            store=self.store_url,
            policy=POLICY,
            replica=ReplicaId(name),
            workdir=self.folder / "work" / name,
            heartbeat_seconds=0.5,
            reconcile_seconds=0.5,
            drain_seconds=20.0,
            watchdog_seconds=0.3,
            drain_timeout=10.0,
        )
        return replace(config, **changes)

    async def replica(self, name: str = "replica-0", *, events: EventLog | None = None, **changes: Any) -> Running:
        running = Running(self, self.config(name, **changes), events)
        self._runs.append(running)
        await running.listens()
        return running

    def of(self, name: str, *transitions: Transition) -> list[ReplicaState]:
        """The replica's records, of these transitions where any is named."""
        return [r for r in self.records if r.replica == name and (not transitions or r.transition in transitions)]


class Running:
    """A replica in this process, its engine in another."""

    def __init__(self, world: World, config: ReplicaConfig, events: EventLog | None) -> None:
        self.world, self.config = world, config
        self.url = ""
        self._up = asyncio.Event()
        self.task = asyncio.create_task(run_replica(config, ready=self._ready, events=events))

    def _ready(self, url: str) -> None:
        self.url = url
        self._up.set()

    async def listens(self) -> None:
        up = asyncio.create_task(self._up.wait())
        await asyncio.wait({up, self.task}, return_when=asyncio.FIRST_COMPLETED, timeout=STEP_SECONDS)
        up.cancel()
        assert self._up.is_set(), self.task.result() if self.task.done() else "not listening"

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self.task

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.task, STEP_SECONDS)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.world.http.get(self.url + path) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if raw[:1] in (b"{", b"[") else raw.decode()

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any, CIMultiDictProxy[str]]:
        async with self.world.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, json.loads(await response.read()), response.headers

    async def generate(self, *, tokens: int = 8, headers: Mapping[str, str] | None = None, **body: Any) -> tuple[int, Any]:
        request = {"text": "hello", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}, **body}
        status, answer, _ = await self.post("/generate", request, headers)
        return status, answer

    async def info(self) -> Any:
        return (await self.get("/server_info"))[1]

    async def serves(self, version: RunVersion) -> None:
        """Waits until it says that it serves the version, open."""
        text = {"run": version.run, "number": version.number}

        async def holds() -> bool:
            if self.task.done():
                raise AssertionError(f"the replica ended: {self.task!r}")
            info = await self.info()
            serving = info["serving"]
            return serving is not None and serving.items() >= text.items() and info["gate"]["open"]

        await eventually(holds, f"{self.config.replica} serves {version}", timeout=STEP_SECONDS)

    async def engine_url(self) -> str:
        url: str = (await self.info())["engine"]["url"]
        return url

    async def misbehave(self, **faults: Any) -> None:
        async with self.world.http.post(f"{await self.engine_url()}/misbehave", json=faults) as response:
            assert response.status == 200, await response.text()


MISBEHAVING: Final = (
    "{python}",
    "-m",
    "stitch.engines.reference",
    "--model",
    "{model}",
    "--port",
    "{port}",
    "--label",
    "unlabelled",
    "--misbehave-allowed",
)


def misbehaving() -> tuple[str, ...]:
    """The command of a reference engine that takes faults on demand."""
    import sys

    return tuple(part.replace("{python}", sys.executable) for part in MISBEHAVING)


def check_truth(world: World, answer: Any, run: str = RUN) -> None:
    """Holds the versions that an answer reports against the digests of what the engine had in memory, token by token (I3)."""
    meta = answer["meta_info"]
    spans = [(int(s["version"]), s["start"], s["end"]) for s in meta["weight_versions"]]
    assert spans[0][0] == meta["weight_version_start"]
    assert spans[-1][0] == meta["weight_version_end"]
    truth = {n: digest for digest, start, end in meta["weights_digests"] for n in range(start, end)}
    told = {n: world.digests[ref(number, run)] for number, start, end in spans for n in range(start, end)}
    assert told == truth
    assert len(told) == len(answer["output_ids"])


def unique_log() -> str:
    return f"memory://t{uuid.uuid4().hex}"


async def until(condition: Callable[[], bool], what: str) -> None:
    await eventually(condition, what, timeout=STEP_SECONDS)
