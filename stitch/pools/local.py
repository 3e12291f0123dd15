"""Replicas and their engines as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stitch.core.ids import ReplicaId, replica_id
from stitch.pools.children import Child
from stitch.pools.port import Pool, PoolMember

START_SECONDS: Final = 60.0
"""Bound on a replica's process listening; its engine may take longer."""
STOP_SECONDS: Final = 10.0
"""From SIGTERM to SIGKILL: short, since a local pool is not asked to finish long rollouts."""


class LocalPool(Pool):
    """Each member is a `stitch replica` process that supervises an engine of its own."""

    def __init__(self, *, workdir: Path, options: Sequence[str], prefix: str = "replica") -> None:
        """`options` are the command line's of `stitch replica`, without id, port and working folder."""
        self._workdir, self._options, self._prefix = workdir, list(options), prefix
        self._children: dict[ReplicaId, Child] = {}
        self._urls: dict[ReplicaId, str] = {}
        self._started = 0

    async def scale(self, replicas: int) -> None:
        running = [child for child in self._children.values() if child.exit_code is None]
        await asyncio.gather(*(surplus.stop(STOP_SECONDS) for surplus in running[replicas:]))
        await asyncio.gather(*(self._start(self._next_id()) for _ in range(replicas - len(running))))

    def members(self) -> Sequence[PoolMember]:
        return [PoolMember(replica=r, url=self._urls.get(r), exit_code=c.exit_code) for r, c in self._children.items()]

    async def kill(self, replica: ReplicaId) -> None:
        await self._children[replica].kill()

    async def aclose(self) -> None:
        await asyncio.gather(*(child.stop(STOP_SECONDS) for child in self._children.values()))

    def _next_id(self) -> ReplicaId:
        self._started += 1
        return replica_id(f"{self._prefix}-{self._started - 1}")

    async def _start(self, name: ReplicaId) -> None:
        command = [sys.executable, "-m", "stitch", "replica", "--json", "--id", name, "--port", "0"]
        command += ["--workdir", str(self._workdir / name), *self._options]
        child = await Child.start(name, [*command, "--parent-pid", str(os.getpid())], log=self._workdir / "logs" / f"{name}.log")
        self._children[name] = child
        self._urls[name] = (await child.ready(START_SECONDS))["url"]
