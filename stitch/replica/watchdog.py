"""The watchdog: gives the engine up where it answers no more, and judges it only while it should answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from stitch.engines.port import Engine, EngineFailed
from stitch.replica.activate import ReplicaFailed, drifted
from stitch.replica.targets import Serving


async def watch(
    engine: Engine,
    *,
    judged: Callable[[], bool],
    serving: Callable[[], Serving | None],
    interval: float,
    failures: int,
    ended: Callable[[], Awaitable[str]] | None,
) -> None:
    """Looks at the engine every `interval` seconds until cancelled.

    `judged` says whether it should make progress at the moment; a look that an activation came into does not count. `serving` is
    what it should hold: where somebody else gave it another version, nothing that it says can be relied on. `ended` waits for the
    end of an engine of our own and says how it ended. Raises ReplicaFailed after so many failed looks in a row, or at once where
    the process ended or holds another version.
    """
    if ended is None:
        await _look(engine, judged, serving, interval, failures)
        return
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_look(engine, judged, serving, interval, failures))
        tasks.create_task(_fail_with(ended))


async def _look(
    engine: Engine, judged: Callable[[], bool], serving: Callable[[], Serving | None], interval: float, failures: int
) -> None:
    failed = 0
    while True:
        await asyncio.sleep(interval)
        before = serving()
        if not judged():
            failed = 0
            continue
        try:
            report = await engine.report()
        except EngineFailed:
            report = None
        if not judged() or serving() is not before:
            failed = 0
            continue
        wrong = None if report is None or before is None else drifted(report, before)
        if wrong is not None:
            raise ReplicaFailed(f"{wrong}: somebody else changed it")
        failed = failed + 1 if report is None else 0
        if failed >= failures:
            raise ReplicaFailed(f"the engine at {engine.url} did not answer {failures} times in a row")


async def _fail_with(ended: Callable[[], Awaitable[str]]) -> None:
    raise ReplicaFailed(await ended())
