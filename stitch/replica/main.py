"""Running a replica: all its parts together, for as long as the caller lets it, and its end in good order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, Final

from stitch.core.errors import Fenced, InvalidRequest, Unavailable
from stitch.engines.opening import ENGINES
from stitch.http.server import GRACE_SECONDS, serve
from stitch.http.upstream import Upstream
from stitch.log.opening import open_log
from stitch.log.port import EventLog
from stitch.replica.activate import ReplicaFailed
from stitch.replica.agent import Agent, Disk
from stitch.replica.announcer import Announcer
from stitch.replica.app import ReplicaApp
from stitch.replica.audit import Audit
from stitch.replica.config import ReplicaConfig
from stitch.replica.gate import Gate
from stitch.replica.proxy import Proxy
from stitch.replica.reconciler import Reconciler
from stitch.store.opening import open_store
from stitch.weights.staging import Staging

log = logging.getLogger(__name__)

DONE: Final = 0
FENCED_DRAIN_SECONDS: Final = 30.0
"""How long a life that a newer one replaced finishes its requests; the gateway sends it no more."""


async def run_replica(config: ReplicaConfig, *, ready: Callable[[str], None] | None = None, events: EventLog | None = None) -> int:
    """Runs until it is drained, fenced, fails or is cancelled; returns the exit code: 0, 4 or 70.

    `ready` is told the base URL once it listens; whether it serves, `/readyz` tells. When cancelled it drains first, for up to
    `config.drain_timeout` seconds; a second cancellation ends that. `events` is the client for publications and activations, by
    default one of the configuration's log; the pointer is read over another in any case. Raises InvalidRequest for a bad
    configuration or a log whose streams are missing or wrong, OSError where the address or the working folder cannot be used.
    """
    async with AsyncExitStack() as stack:
        replica = await _build(config, stack, events)
        app = replica.app
        url = await stack.enter_async_context(serve(app, config.host, config.port, grace=GRACE_SECONDS))
        replica.url = config.advertise_url or url
        if ready is not None:
            ready(url)
        return await replica.run()


class _Replica:
    """The parts of one life, put together."""

    def __init__(self, config: ReplicaConfig, events: EventLog, upstream: Upstream, disk: Disk) -> None:
        adapter = ENGINES.get(config.engine)
        if adapter is None:
            raise InvalidRequest(f"engine: {config.engine!r} is not known; use one of {', '.join(sorted(ENGINES))}", field="engine")
        self.url = ""
        self.config = config
        self.drain = asyncio.Event()
        self.reconciler = Reconciler(
            events,
            config.log,
            policy=config.policy,
            channel=config.channel,
            interval=config.reconcile_seconds,
            source=config.source,
            on_lineage=self._lineage_changed,
        )
        self.gate = Gate(lambda: self.reconciler.lineage, capacity=config.capacity, wait_seconds=config.gate_wait_seconds)
        self.announcer = Announcer(events, config, lambda: self.url, lambda: len(self.gate.in_flight))
        self.agent = Agent(config, gate=self.gate, reconciler=self.reconciler, announcer=self.announcer, disk=disk)
        self.audit = Audit(events, config.audit, source=config.source)
        self.app = ReplicaApp(
            config,
            self.agent,
            Proxy(config, self.agent, upstream, self.audit),
            self.audit,
            generation=adapter.generation_routes,
            read_only=adapter.read_only_routes,
            drain=self.drain.set,
        )

    def _lineage_changed(self) -> None:
        self.gate.wake()

    async def run(self) -> int:
        """See run_replica. All tasks have ended when it returns."""
        beside = [
            asyncio.create_task(self.announcer.run(), name="announcer"),
            asyncio.create_task(self.audit.run(), name="audit"),
        ]
        life = asyncio.create_task(self.agent.run(), name="agent")
        asked = asyncio.create_task(self.drain.wait(), name="drain")
        tasks: set[asyncio.Task[Any]] = {*beside, life, asked}
        try:
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await self.agent.leave(timeout=self.config.drain_timeout)
                raise
            return await self._end(tasks - {asked})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.agent.aclose()

    async def _end(self, tasks: set[asyncio.Task[Any]]) -> int:
        """What came first decides how the life ends."""
        errors = [error for task in tasks if task.done() for error in _leaves(task)]
        if not errors:
            await self.agent.leave(timeout=self.config.drain_timeout)
            return DONE
        for error in errors:
            if not isinstance(error, ReplicaFailed | Fenced):
                log.error("the replica broke", exc_info=error)
        error = next((e for e in errors if isinstance(e, ReplicaFailed)), errors[0])
        if isinstance(error, Fenced):
            log.warning("%s", error)
            await self.agent.leave(timeout=min(self.config.drain_timeout, FENCED_DRAIN_SECONDS))
            return Fenced.exit_code
        log.error("terminal: %s", error)
        await self.agent.fail(str(error) or repr(error), of_engine=isinstance(error, ReplicaFailed))
        return ReplicaFailed.exit_code


async def _build(config: ReplicaConfig, stack: AsyncExitStack, events: EventLog | None) -> _Replica:
    if events is None:
        events = await stack.enter_async_context(open_log(config.log))
        try:
            await events.setup(create=events.embedded)
        except Unavailable as error:
            log.warning("the log is away: %s; going on, and trying again", error)
    store = stack.enter_context(open_store(config.store))
    staging = await asyncio.to_thread(
        Staging,
        config.workdir,
        store,
        base=config.base,
        buffers=1 if config.single_buffer else 2,
        verify=config.verify,
        disk_budget=config.disk_budget,
        memory_budget=config.memory_budget,
    )
    stack.callback(staging.close)
    upstream = await stack.enter_async_context(Upstream())
    return _Replica(config, events, upstream, Disk(store=store, staging=staging, upstream=upstream))


def _leaves(task: asyncio.Task[Any]) -> Iterator[BaseException]:
    """The errors that a task ended with, taken out of their groups."""
    error = task.exception()
    pending = [] if error is None else [error]
    while pending:
        each = pending.pop()
        if isinstance(each, BaseExceptionGroup):
            pending.extend(each.exceptions)
        else:
            yield each
