"""The demo's processes: a gateway, replicas with their engines, and a follower of what they say."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stitch.cli.demo.ledger import Ledger
from stitch.core.events import Event, ReplicaState
from stitch.core.ids import PolicyId, ReplicaId
from stitch.core.lineage import PolicyLineage, Position
from stitch.log.opening import open_log
from stitch.log.views import fleet_follower, lineage_follower
from stitch.pools.children import Child
from stitch.pools.local import LocalPool

POLICY: Final = PolicyId("demo")
RUN: Final = "demo-1"
HEARTBEAT_SECONDS: Final = 1.0
"""Twice as often as by default, so that a killed replica leaves the table within seconds."""
START_SECONDS: Final = 60.0
"""Bound on the gateway listening, and on the first replica serving."""
STOP_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is running."""

    gateway_url: str
    pool: LocalPool
    ledger: Ledger
    killed: list[ReplicaId]

    async def wait_for(self, replicas: int) -> None:
        """Until so many replicas serve. Raises Unavailable where one ended instead."""
        async with asyncio.timeout(START_SECONDS):
            while self.alive() < replicas:  # noqa: ASYNC110 # the ledger is filled by the same loop; a look costs nothing
                await asyncio.sleep(0.05)

    def alive(self) -> int:
        """Replicas that run and said that they serve."""
        return sum(1 for m in self.pool.members() if m.exit_code is None and self.ledger.serving(m.replica))

    async def add_replica(self) -> None:
        """One more, which joins at the version of the moment."""
        running = sum(1 for m in self.pool.members() if m.exit_code is None)
        await self.pool.scale(running + 1)
        self.ledger.added += 1
        self.ledger.notes.append(f"added {self.pool.members()[-1].replica}")

    async def kill_replica(self) -> None:
        """The oldest one, with its engine, without a word."""
        victim = next(m.replica for m in self.pool.members() if m.exit_code is None)
        self.killed.append(victim)
        await self.pool.kill(victim)
        self.ledger.killed += 1
        self.ledger.notes.append(f"killed {victim}, with requests in flight")


@asynccontextmanager
async def scene(*, workdir: Path, log_url: str, store_url: str, ledger: Ledger) -> AsyncIterator[Scene]:
    """Starts the gateway and follows the replicas; ends every process afterwards, whatever happened."""
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(open_log(log_url))
        await log.setup(create=True)
        fleet, lineage = fleet_follower(log), lineage_follower(log)
        fleet.listeners.append(lambda event, at: _heard(ledger, event, at))
        lineage.listeners.append(lambda event, at: _decided(ledger, lineage.state.policy(POLICY)))
        for follower in (fleet, lineage):
            stack.push_async_callback(_cancel, asyncio.create_task(follower.run()))
        gateway = await Child.start("gateway", _gateway_command(log_url), log=workdir / "logs" / "gateway.log")
        stack.push_async_callback(gateway.stop, STOP_SECONDS)
        options = ["--log", log_url, "--store", store_url, "--policy", POLICY, "--engine", "reference"]
        options += ["--heartbeat", str(HEARTBEAT_SECONDS)]
        pool = await stack.enter_async_context(LocalPool(workdir=workdir, options=options))
        url = (await gateway.ready(START_SECONDS))["url"]
        yield Scene(gateway_url=url, pool=pool, ledger=ledger, killed=[])


def _gateway_command(log_url: str) -> list[str]:
    command = [sys.executable, "-m", "stitch", "gateway", "--json", "--port", "0", "--log", log_url, "--policy", POLICY]
    return [*command, "--parent-pid", str(os.getpid())]


def _heard(ledger: Ledger, event: Event, at: Position) -> None:
    if isinstance(event, ReplicaState):
        ledger.heard(event)


def _decided(ledger: Ledger, policy: PolicyLineage) -> None:
    for version in policy.path(policy.tip):
        if version.ref.number in ledger.digests:
            break
        ledger.published(version.ref.number, version.manifest.weights_digest)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
