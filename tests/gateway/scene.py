"""A log, fake replicas on loopback, and a gateway over both.

A fake replica speaks a replica's side of the contract (statuses, headers, activation records); what it answers is scripted.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import aiohttp

from stitch.core.events import ChannelMoved, Event, Phase, ReplicaState, RunClaimed, RunVersion, Transition, VersionPublished
from stitch.core.ids import (
    LATEST,
    ChannelName,
    Digest,
    Epoch,
    EventId,
    Generation,
    Incarnation,
    PolicyId,
    PoolName,
    ReplicaId,
    RunId,
    Sequence,
    VersionNumber,
    WriterId,
)
from stitch.core.manifest import Kind, ManifestRef
from stitch.gateway.config import GatewayConfig
from stitch.gateway.serve import run_gateway
from stitch.http.server import ClientGone, Receive, Scope, Send, read_body, serve, until_disconnect
from stitch.log.events import append
from stitch.log.memory import MemoryLog
from stitch.log.port import Stream
from stitch.log.views import new_event_id

P: Final = PolicyId("p")
R1: Final = RunId("r1")
R2: Final = RunId("r2")
BOUND: Final = 20.0
"""Seconds that no step takes unless it hangs."""

Json = dict[str, Any]


def version(number: int, run: RunId = R1) -> RunVersion:
    return RunVersion(run=run, number=VersionNumber(number))


def manifest(number: int) -> ManifestRef:
    return ManifestRef(key=f"p/r1/{number}", digest=Digest(f"{number:064x}"), weights_digest=Digest(f"{number:064x}"))


async def until(holds: Callable[[], bool], what: str = "") -> None:
    """Polls until it holds."""
    deadline = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


class Trainer:
    """Writes decisions. It knows the head, as a publisher does."""

    def __init__(self, log: MemoryLog, policy: PolicyId = P) -> None:
        self.log, self.policy = log, policy
        self.run = R1
        self.head: EventId | None = None
        self.tip: VersionNumber | None = None
        self.epoch = 0

    async def claim(self, run: RunId = R1, boot: int | None = None, alias: RunVersion | None = None) -> None:
        self.run, self.epoch = run, self.epoch + 1
        self.tip = None if boot is None else VersionNumber(boot)
        await self._decide(
            RunClaimed(
                policy=self.policy,
                run=run,
                event_id=new_event_id(),
                writer=WriterId("w"),
                expected_head=self.head,
                boot=self.tip,
                alias=alias,
            )
        )

    async def publish(self, *numbers: int) -> None:
        for number in numbers:
            assert self.head is not None
            event = VersionPublished(
                policy=self.policy,
                run=self.run,
                number=VersionNumber(number),
                event_id=new_event_id(),
                writer=WriterId("w"),
                epoch=Epoch(self.epoch),
                expected_head=self.head,
                parent=self.tip,
                kind=Kind.FULL,
                base=None,
                manifest=manifest(number),
                size=1,
            )
            self.tip = VersionNumber(number)
            await self._decide(event)

    async def move(self, channel: str, target: RunVersion, sequence: int = 0) -> None:
        await append(
            self.log,
            ChannelMoved(
                policy=self.policy,
                channel=ChannelName(channel),
                target=target,
                event_id=new_event_id(),
                writer=WriterId("w"),
                expected_sequence=Sequence(sequence),
            ),
            source="test",
        )

    async def _decide(self, event: RunClaimed | VersionPublished) -> None:
        self.head = event.event_id
        await append(self.log, event, source="test")


@dataclass(slots=True)
class Seen:
    """A request that reached a replica."""

    path: str
    query: str
    headers: dict[str, str]
    body: bytes


class FakeReplica:
    """One replica. `behave` answers a request; the default echoes the body with the versions that it serves."""

    def __init__(self, log: MemoryLog, name: str, *, policy: PolicyId = P, heartbeat_ms: int = 200, capacity: int = 8) -> None:
        self.log = log
        self.url = ""
        self.seen: list[Seen] = []
        self.gone = 0
        self.active = 0
        self.most_active = 0
        self.behave: Callable[[Seen, Send], Any] = self.echo
        self.hold: asyncio.Event | None = None
        """While set, answers wait for it."""
        self._sequence = 0
        life = new_event_id()
        self.state = ReplicaState(
            replica=ReplicaId(name),
            life=life,
            incarnation=None,
            sequence=0,
            transition=Transition.JOINED,
            event_id=life,
            phase=Phase.JOINING,
            policy=policy,
            channel=LATEST,
            pool=PoolName("main"),
            url="",
            engine="fake",
            capacity=capacity,
            heartbeat_ms=heartbeat_ms,
            generation=Generation(0),
        )

    async def join(self, **fields: Any) -> None:
        """The first record of this life."""
        self.state = replace(self.state, url=self.url, **fields)
        end = (await self.log.bounds(Stream.ACTIVATIONS)).end
        await append(self.log, self.state, source="test")
        self.state = replace(self.state, incarnation=Incarnation(end))

    async def tell(self, transition: Transition = Transition.HEARTBEAT, **fields: Any) -> None:
        self._sequence += 1
        self.state = replace(
            self.state, transition=transition, sequence=self._sequence, event_id=EventId(uuid.uuid4().hex), **fields
        )
        await append(self.log, self.state, source="test")

    async def serving(self, number: int, run: RunId = R1, **fields: Any) -> None:
        """Tells that it serves the version now."""
        await self.tell(Transition.ACTIVATED, phase=Phase.SERVING, serving=version(number, run), **fields)

    async def beat(self) -> None:
        """Heartbeats until cancelled."""
        while True:
            await self.tell()
            await asyncio.sleep(self.state.heartbeat_ms / 1000)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        seen = Seen(scope["path"], scope["query_string"].decode(), headers, await read_body(scope["headers"], receive))
        self.seen.append(seen)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            async with until_disconnect(receive):
                if self.hold is not None:
                    await self.hold.wait()
                await self.behave(seen, send)
        except ClientGone:
            self.gone += 1
        finally:
            self.active -= 1

    async def echo(self, seen: Seen, send: Send) -> None:
        serving = self.state.serving
        told = [
            (b"x-stitch-policy", self.state.policy.encode()),
            (b"x-stitch-replica", self.state.replica.encode()),
            (b"x-stitch-run", (serving.run if serving else "").encode()),
            (b"x-stitch-version-start", str(serving.number if serving else "").encode()),
            (b"x-stitch-request-id", seen.headers["x-stitch-request-id"].encode()),
        ]
        await whole(send, 200, seen.body, *told)


async def whole(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """A whole answer."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


def says(status: int, *headers: tuple[bytes, bytes]) -> Callable[[Seen, Send], Any]:
    """A behaviour: always this status."""

    async def behave(seen: Seen, send: Send) -> None:
        await whole(send, status, b'{"error":{"type":"Scripted"}}', *headers)

    return behave


@dataclass(frozen=True, slots=True)
class Got:
    """An answer that a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        return json.loads(self.body)

    @property
    def replica(self) -> str:
        return self.headers["x-stitch-replica"]


class Scene:
    """What a test plays with. Everything that it opens is closed when it ends."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.name = f"g{uuid.uuid4().hex}"
        self.log = MemoryLog(self.name)
        self.trainer = Trainer(self.log)
        self.http = aiohttp.ClientSession()
        self.url = ""
        self._stack = stack

    async def replica(self, name: str, *, number: int | None = None, **fields: Any) -> FakeReplica:
        """A replica on loopback that has joined, and serves `number` where it is given."""
        known = {key: fields.pop(key) for key in ("policy", "heartbeat_ms", "capacity") if key in fields}
        replica = FakeReplica(self.log, name, **known)
        replica.url = await self._stack.enter_async_context(serve(replica, grace=0))
        await replica.join(**fields)
        if number is not None:
            await replica.serving(number)
        return replica

    def beating(self, *replicas: FakeReplica) -> None:
        """Lets them send heartbeats until the scene ends."""
        for replica in replicas:
            self.background(replica.beat())

    def background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._stack.push_async_callback(_stop, task)
        return task

    async def gateway(self, **options: Any) -> str:
        """A gateway that has read the log; its URL. The last one is `self.url`."""
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        options = {"policy": P, "deadline": 5.0} | options
        task = self.background(run_gateway(GatewayConfig(log=f"memory://{self.name}", **options), ready=told.set_result, grace=0))
        done, _ = await asyncio.wait({told, task}, return_when=asyncio.FIRST_COMPLETED, timeout=BOUND)
        assert told in done, task
        self.url = told.result()
        async with asyncio.timeout(BOUND):
            while (await self.get("/readyz")).status != 200:
                await asyncio.sleep(0.01)
        return self.url

    async def ask(self, path: str = "/generate", body: Any = None, *, url: str | None = None, **headers: str) -> Got:
        """POST; headers by keyword, as `min_version`."""
        raw = body if isinstance(body, bytes) else json.dumps({"text": "x"} if body is None else body).encode()
        named = {f"X-Stitch-{name.replace('_', '-')}": value for name, value in headers.items()}
        data = io.BytesIO(raw)
        async with asyncio.timeout(BOUND), self.http.post((url or self.url) + path, data=data, headers=named) as response:
            return Got(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def get(self, path: str, *, url: str | None = None, **headers: str) -> Got:
        async with asyncio.timeout(BOUND), self.http.get((url or self.url) + path, headers=headers) as response:
            return Got(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def table(self, *, url: str | None = None) -> dict[str, Json]:
        """/replicas by name."""
        return {each["replica"]: each for each in (await self.get("/replicas", url=url)).json["replicas"]}

    async def sees(self, holds: Callable[[dict[str, Json]], bool], *, url: str | None = None) -> None:
        """Polls the table until it holds."""
        async with asyncio.timeout(BOUND):
            while not holds(await self.table(url=url)):
                await asyncio.sleep(0.01)


async def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """A fresh scene."""
    async with AsyncExitStack() as stack:
        it = Scene(stack)
        stack.push_async_callback(it.log.aclose)
        stack.push_async_callback(it.http.close)
        yield it


__all__ = ["BOUND", "R1", "R2", "Event", "FakeReplica", "Got", "P", "Scene", "Seen", "Trainer", "says", "scene", "until", "version"]
