"""The agent: the life of a replica, from joining to leaving. It stages, asks for a slot, activates, and says so.

The parts do the work: the reconciler knows the target, the staging area brings it here, the budget gives the word, the activation
swaps, the announcer tells. Nothing here touches a request's bytes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stitch.core.errors import Fenced, InvalidRequest, StitchError
from stitch.core.events import Phase, RunVersion, Transition
from stitch.engines.opening import open_engine
from stitch.engines.port import Engine
from stitch.http.upstream import Upstream
from stitch.replica.activate import Activation, Probe, ReplicaFailed, Swap
from stitch.replica.announcer import Announcer
from stitch.replica.budget import LOOK_SECONDS, Budget
from stitch.replica.config import ReplicaConfig
from stitch.replica.gate import Gate
from stitch.replica.probes import run_probes
from stitch.replica.reconciler import Reconciler
from stitch.replica.supervisor import Supervisor, command_of
from stitch.replica.targets import Serving, Target, target_at
from stitch.replica.watchdog import watch
from stitch.store.manifests import read_manifest
from stitch.store.port import BlobStore
from stitch.weights.staging import Staged, Staging, StagingCancelled, Verify

log = logging.getLogger(__name__)

BACKOFF_SECONDS: Final = (1.0, 60.0)
"""First and longest pause after a version could not be staged or was refused; a newer target ends it."""
FLEET_SECONDS: Final = 10.0
"""How long a joining replica waits to read what the fleet says, before it goes without."""
FAREWELL_SECONDS: Final = 5.0
"""How long the last record may take to be written. The lease ends the replica for the others anyway."""
TARGET_SECONDS: Final = 2.0
"""After which a replica says that its channel names no version, and between two looks at why."""
BOOT_ATTEMPTS: Final = 2
"""Starts of our own engine: between choosing a free port and its use another program may take it."""

Probes = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Where versions come from, where they are staged, and the client by which the engine is asked probes."""

    store: BlobStore
    staging: Staging
    upstream: Upstream


class Agent:
    """Run `run` as a task; it ends by raising ReplicaFailed or Fenced. `leave` ends a life in good order."""

    def __init__(self, config: ReplicaConfig, *, gate: Gate, reconciler: Reconciler, announcer: Announcer, disk: Disk) -> None:
        self.gate, self.reconciler, self.announcer = gate, reconciler, announcer
        self.engine: Engine | None = None
        self.caught_up = False
        """Whether the replica was ready once."""
        self.activations = 0
        self.staging = disk.staging
        self._config, self._store, self._upstream = config, disk.store, disk.upstream
        self._budget = Budget(announcer, replica=config.replica, pool=config.pool, slot_seconds=config.slot_seconds)
        self._supervisor = Supervisor(command_of(config.engine, config.command)) if config.supervised else None
        self._activation: Activation | None = None
        self._busy = asyncio.Lock()
        """Held while the engine is being changed: the watchdog does not judge it then."""
        self._following: asyncio.Task[None] | None = None
        self._taking: RunVersion | None = None
        self._doubt = asyncio.Event()
        """Set where the buffer that the engine was loaded from proved damaged: the version is built anew and loaded again."""
        self._leaving = False

    # --- life --------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Joins and follows the channel until cancelled. Raises a group of ReplicaFailed, Fenced or what else broke."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reconciler.run(), name="reconciler")
            tasks.create_task(self._watch_fence(), name="fence")
            self._following = tasks.create_task(self._live(tasks), name="life")

    async def leave(self, *, timeout: float) -> None:
        """Drains: admits nothing more, lets an activation end, waits for what is in flight, says that it left."""
        self._leaving = True
        self._say(Phase.DRAINING, Transition.DRAINING)
        self.gate.shut_for("the replica is leaving; the request was not started")
        if self._following is not None and not self._following.done():
            self._following.cancel()
            await asyncio.wait({self._following})
        left = await self.gate.ended(set(self.gate.in_flight), timeout)
        if left:
            self.gate.give_up(left, "the replica is leaving, and its time is over")
            await self.gate.ended(left, FAREWELL_SECONDS)
        self._say(Phase.LEFT, Transition.LEFT)
        await self.announcer.flushed(FAREWELL_SECONDS)

    async def fail(self, reason: str, *, of_engine: bool) -> None:
        """The last word of a replica that cannot go on. Where the engine failed, what it was taking at that moment is to blame."""
        self._leaving = True
        swapping = of_engine and self._activation is not None and self._activation.swapping
        target = self._taking if swapping else None
        self.gate.shut_for("the replica failed; the request was not started")
        self.gate.give_up(set(self.gate.in_flight), f"the replica failed: {reason}")
        state = self.announcer.state
        state.target, state.serving, state.weights_digest, state.error = target, None, None, reason
        self._budget.release()
        self._say(Phase.FAILED, Transition.LEFT if target is None else Transition.ACTIVATION_FAILED)
        await self.gate.ended(set(self.gate.in_flight), FAREWELL_SECONDS)
        await self.announcer.flushed(FAREWELL_SECONDS)

    async def aclose(self) -> None:
        """Ends the engine, if it is ours, and its client."""
        if self._supervisor is not None:
            await self._supervisor.stop()
        if self.engine is not None:
            await self.engine.aclose()

    @property
    def ready(self) -> bool:
        """True from the first catch-up until it drains or fails, also during an activation."""
        return self.caught_up and not self._leaving and not self.gate.shut

    @property
    def phase(self) -> Phase:
        return self.announcer.state.phase

    async def _live(self, tasks: asyncio.TaskGroup) -> None:
        await self._come_up()
        tasks.create_task(self._watch_engine(), name="watchdog")
        if self._config.verify is Verify.INCREMENTAL:
            tasks.create_task(self._scrub(), name="scrub")
        await self._follow()

    # --- the first version -------------------------------------------------------------------------------------------------

    async def _come_up(self) -> None:
        """From joining to serving. Takes no capacity away, so it needs no slot."""
        await self._read_fleet()
        delay = BACKOFF_SECONDS[0]
        while True:
            target = await self._first_target()
            self.announcer.state.phase = Phase.LOADING
            found = await self._stage(target)
            if found is not None and await self._start(*found):
                return
            await self._pause_for(delay, target)
            delay = min(2 * delay, BACKOFF_SECONDS[1])

    async def _read_fleet(self) -> None:
        due = time.monotonic() + FLEET_SECONDS
        while not self.announcer.readable and time.monotonic() < due:
            await self.announcer.changed(LOOK_SECONDS)

    async def _first_target(self) -> Target:
        """The channel's target, or its nearest ancestor that is not held back. Where there is none, the target is tried again:
        a replica that serves nothing takes no capacity away."""
        target = await self._any_target()
        if not self._budget.held(target.ref):
            return target
        lineage = self.reconciler.lineage
        for version in lineage.path(target.ref if target.ref in lineage.versions else None):
            if lineage.eligible(version.ref) and not self._budget.held(version.ref):
                log.warning("%s is held back: it failed before; taking %s", target.ref, version.ref)
                return target_at(lineage, version.ref, target.generation, target.sequence, target.offset)
        return target

    async def _any_target(self) -> Target:
        """The channel's target; while it names none, the records say so."""
        finding = asyncio.create_task(self.reconciler.newer_than(None))
        try:
            while not (await asyncio.wait({finding}, timeout=TARGET_SECONDS))[0]:
                if (what := self.reconciler.why_no_target()) != self.announcer.state.error:
                    self._note_trouble(what)
            return finding.result()
        finally:
            finding.cancel()

    async def _start(self, target: Target, staged: Staged, probes: Probes) -> bool:
        """Whether the first version serves now."""
        self._taking = target.ref
        self._say(Phase.CATCHING_UP, Transition.ACTIVATION_STARTED)
        async with self._busy:
            if self._supervisor is None:
                swap = await self._join(target, staged, probes)
            else:
                swap = await self._boot(self._supervisor, target, staged, probes)
        if swap.refused is not None:
            self._note_refusal(Phase.LOADING, target, swap)
            return False
        self._mark_active(staged)
        self.caught_up = True
        self._note_activation(target)
        return True

    async def _join(self, target: Target, staged: Staged, probes: Probes) -> Swap:
        assert self._config.engine_url is not None
        activation = self._activation or self._attach(self._config.engine_url)
        await activation.wait_until_answering()
        return await self._shielded(activation.join(staged.path, target, self._probe(probes)))

    async def _boot(self, supervisor: Supervisor, target: Target, staged: Staged, probes: Probes) -> Swap:
        for attempt in range(BOOT_ATTEMPTS):
            activation = self._attach(await supervisor.start(staged.path))
            activation.swapping = True  # it loads the version from its first moment
            try:
                await activation.wait_until_ready(lambda: supervisor.running)
                break
            except ReplicaFailed:
                activation.swapping = not supervisor.could_not_start
                await supervisor.stop()
                if attempt == BOOT_ATTEMPTS - 1:
                    raise
                assert self.engine is not None
                await self.engine.aclose()
        return await self._shielded(activation.boot(staged.path, target, self._probe(probes)))

    def _attach(self, url: str) -> Activation:
        self.engine = open_engine(self._config.engine, url)
        self._activation = Activation(self.engine, self.gate, self._config)
        return self._activation

    # --- following ---------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        delay = BACKOFF_SECONDS[0]
        while not self._leaving:
            serving = self.gate.serving
            assert serving is not None
            target = await self._next_target(serving)
            if target.ref == serving.ref and not self._doubt.is_set():
                self._keep(target)
                continue
            if await self._take(target):
                delay = BACKOFF_SECONDS[0]
                continue
            await self._pause_for(delay, target)
            delay = min(2 * delay, BACKOFF_SECONDS[1])

    async def _next_target(self, serving: Serving) -> Target:
        """A newer target; or what serves, where it is to be loaded again."""
        newer = asyncio.create_task(self.reconciler.newer_than(serving.target.order))
        doubt = asyncio.create_task(self._doubt.wait())
        try:
            await asyncio.wait({newer, doubt}, return_when=asyncio.FIRST_COMPLETED)
            if newer.done():
                return newer.result()
        finally:
            newer.cancel()
            doubt.cancel()
        known = self.reconciler.target
        return known if known is not None and known.ref == serving.ref else serving.target

    def _keep(self, target: Target) -> None:
        """The channel moved to what serves already."""
        assert self.gate.serving is not None
        self.gate.serving = replace(self.gate.serving, target=target)
        self.announcer.state.following = target.sequence
        self.announcer.state.target = target.ref
        self._say(self.phase, Transition.HEARTBEAT)

    async def _take(self, target: Target) -> bool:
        """Whether the target, or a newer one that came while it was staged, serves now."""
        serving = self.gate.serving
        assert serving is not None
        if self._held(target):
            return False
        staged: Staged | None = None
        probes: Probes = ()
        if target.manifest.weights_digest == serving.weights_digest and not self._doubt.is_set():
            self.announcer.state.target = target.ref
        else:
            found = await self._stage(target)
            if found is None:
                return False
            target, staged, probes = found
        try:
            await self._budget.acquire()
            return not self._held(target) and await self._change(target, staged, probes)
        finally:
            self._budget.release()

    def _held(self, target: Target) -> bool:
        held = self._budget.held(target.ref)
        if held:
            self._note_trouble(f"{target.ref} is held back: it failed on others of the pool, and serves on none")
        return held

    async def _change(self, target: Target, staged: Staged | None, probes: Probes) -> bool:
        assert self._activation is not None
        self._taking = target.ref
        path = None if staged is None else staged.path
        async with self._busy:
            self._say(Phase.ACTIVATING, Transition.ACTIVATION_STARTED)
            swap = await self._shielded(self._activation.change(path, target, self._probe(probes), afresh=self._doubt.is_set()))
        self._budget.release()
        self.announcer.state.pause_ms = swap.pause_ms
        if swap.refused is not None:
            self._note_refusal(Phase.SERVING, target, swap)
            return False
        if staged is not None:
            self._doubt.clear()
            self._mark_active(staged)
        self._note_activation(target)
        return True

    def _mark_active(self, staged: Staged) -> None:
        try:
            self.staging.mark_active(staged)
        except InvalidRequest:  # while it was loaded, a scrub found its buffer damaged
            self._doubt.set()

    # --- staging -----------------------------------------------------------------------------------------------------------

    async def _stage(self, target: Target) -> tuple[Target, Staged, Probes] | None:
        """The target staged, or a newer one: a newer head while staging re-targets once. None where it failed."""
        found = await self._stage_one(target, retarget=True)
        if isinstance(found, Target):
            log.info("re-targeting from %s to %s", target.ref, found.ref)
            target = found
            found = await self._stage_one(target, retarget=False)
        return None if found is None or isinstance(found, Target) else (target, *found)

    async def _stage_one(self, target: Target, *, retarget: bool) -> tuple[Staged, Probes] | Target | None:
        state = self.announcer.state
        state.target, state.staged = target.ref, None
        self._say(self.phase, Transition.STAGE_STARTED)
        cancelled = threading.Event()
        staging = asyncio.create_task(asyncio.to_thread(self._stage_now, target, cancelled), name=f"stage {target.ref}")
        newer = asyncio.create_task(self.reconciler.newer_than(target.order))
        try:
            await asyncio.wait({staging, newer} if retarget else {staging}, return_when=asyncio.FIRST_COMPLETED)
            if not staging.done():
                cancelled.set()
            found = await asyncio.shield(staging)
        except StagingCancelled:
            return await newer
        except (StitchError, OSError, KeyError) as error:
            self._note_trouble(f"staging {target.ref}: {error}")
            self._say(self.phase, Transition.STAGE_FAILED)
            return None
        finally:
            newer.cancel()
            cancelled.set()
            if not staging.done():
                # A thread cannot be killed: it looks at `cancelled` between tensors, and must end before the store is closed.
                await asyncio.wait({staging})
                staging.exception()
        staged = found[0]
        log.info("staged %s in %.2f s: %d bytes downloaded", staged.ref, staged.seconds, staged.bytes_downloaded)
        state.staged = target.ref
        self._say(self.phase, Transition.STAGED)
        return found

    def _stage_now(self, target: Target, cancelled: threading.Event) -> tuple[Staged, Probes]:
        """In a thread of its own."""
        ref = target.ref.of(self._config.policy)
        staged = self.staging.stage(ref, target.manifest, anchors=target.anchors, cancelled=cancelled.is_set)
        return staged, read_manifest(self._store, target.manifest).probes

    async def _pause_for(self, seconds: float, target: Target) -> None:
        """After a failure: the next attempt comes later, with a newer target, or with another way to the same."""
        try:
            async with asyncio.timeout(seconds * random.uniform(0.75, 1.25)):  # noqa: S311 # jitter, no secret
                await self.reconciler.other_than(target)
        except TimeoutError:
            return

    def _probe(self, probes: Probes) -> Probe | None:
        if not probes:
            return None

        async def ask() -> None:
            assert self.engine is not None
            await run_probes(self.engine, self._upstream, probes, life=self.announcer.life)

        return ask

    # --- supervision -------------------------------------------------------------------------------------------------------

    async def _shielded(self, swap: Coroutine[Any, Any, Swap]) -> Swap:
        """Lets a swap come to its end, which is bounded, whatever becomes of its caller: a pause must not be left behind."""
        task = asyncio.create_task(swap, name="swap")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("activation: %s", error)
            raise

    async def _watch_fence(self) -> None:
        while self.announcer.fenced_by is None:
            await self.announcer.changed(LOOK_SECONDS)
        raise Fenced(f"replica {self._config.replica} was joined again (incarnation {self.announcer.fenced_by}): this life leaves")

    async def _watch_engine(self) -> None:
        assert self.engine is not None
        await watch(
            self.engine,
            judged=lambda: not self._busy.locked(),
            serving=lambda: self.gate.serving,
            interval=self._config.watchdog_seconds,
            failures=self._config.watchdog_failures,
            ended=self._supervisor.ended if self._supervisor is not None else None,
        )

    async def _scrub(self) -> None:
        """Reads what is staged now and then, where a staging alone does not; `Staging.scrub` says what that finds."""
        while True:
            await asyncio.sleep(self._config.scrub_seconds * random.uniform(0.75, 1.25))  # noqa: S311 # jitter, no secret
            stopped = threading.Event()
            reading = asyncio.create_task(asyncio.to_thread(self.staging.scrub, stopped=stopped.is_set), name="scrubbing")
            try:
                found = await asyncio.shield(reading)
            finally:
                stopped.set()
                if not reading.done():
                    await asyncio.wait({reading})
                    reading.exception()
            for damage in found:
                self._note_trouble(f"buffer {damage.buffer} was damaged: {damage.what}")
                if damage.active:
                    log.error("what the engine was loaded from is damaged: it is built anew, and loaded again")
                    self._doubt.set()

    # --- telling -----------------------------------------------------------------------------------------------------------

    def _say(self, phase: Phase, transition: Transition) -> None:
        state = self.announcer.state
        state.phase = Phase.DRAINING if self._leaving and phase not in (Phase.LEFT, Phase.FAILED) else phase
        self.announcer.announce(transition)

    def _note_trouble(self, what: str) -> None:
        """Every record says so from here on, until an activation."""
        log.warning("%s", what)
        self.announcer.state.error = what

    def _note_activation(self, target: Target) -> None:
        self.activations += 1
        state = self.announcer.state
        state.error = None
        state.following, state.serving, state.staged, state.target = target.sequence, target.ref, None, target.ref
        state.weights_digest = target.manifest.weights_digest
        self._say(Phase.SERVING, Transition.ACTIVATED)

    def _note_refusal(self, phase: Phase, target: Target, swap: Swap) -> None:
        self._note_trouble(f"activating {target.ref}: {swap.refused}")
        self._say(phase, Transition.ACTIVATION_FAILED)
