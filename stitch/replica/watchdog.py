"""The watchdog: gives the engine up where it answers no more, and judges it only while it should answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from stitch.engines.port import Engine
from stitch.replica.activate import ReplicaFailed


async def watch(
    engine: Engine,
    *,
    judged: Callable[[], bool],
    interval: float,
    failures: int,
    ended: Callable[[], Awaitable[str]] | None,
) -> None:
    """Looks at the engine every `interval` seconds until cancelled.

    `judged` says whether it should make progress at the moment; a look that an activation came into does not count. `ended` waits
    for the end of an engine of our own and says how it ended. Raises ReplicaFailed after so many failed looks in a row, or at once
    where the process ended.
    """
    if ended is None:
        await _look(engine, judged, interval, failures)
        return
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_look(engine, judged, interval, failures))
        tasks.create_task(_fail_with(ended))


async def _look(engine: Engine, judged: Callable[[], bool], interval: float, failures: int) -> None:
    failed = 0
    while True:
        await asyncio.sleep(interval)
        if not judged():
            failed = 0
            continue
        alive = await engine.alive()
        failed = 0 if alive or not judged() else failed + 1
        if failed >= failures:
            raise ReplicaFailed(f"the engine at {engine.url} did not answer {failures} times in a row")


async def _fail_with(ended: Callable[[], Awaitable[str]]) -> None:
    raise ReplicaFailed(await ended())
