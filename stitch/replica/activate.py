"""The swap: from one version in the engine to the next, without a wrong answer on the way.

First, with the gate open, requests that cannot live on are waited for, within a limit; what is left is given up, retryable. Then
the gate closes, the engine pauses, loads, is confirmed by its own report, the reported version flips, the engine resumes, the
gate opens. The time with the gate closed is the pause. Any failure after the engine was told to pause ends the replica, save a
refusal by the engine with its old weights confirmed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from stitch.core.errors import StitchError
from stitch.engines.port import Engine, EngineFailed, EngineReport, LoadRefused, PauseMode
from stitch.replica.config import KvScope, Mode, ReplicaConfig
from stitch.replica.gate import Gate, Ticket
from stitch.replica.targets import Serving, Target

log = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 5.0
"""How long the gate stays closed for requests that came while others were waited for."""
GIVE_UP_SECONDS: Final = 10.0
"""How long requests that were given up may take to end: an abort in the engine, and an answer to the client. Twice this, the
settling, and the defaults for draining and for the swap make 115 s: less than a slot of the budget lasts."""
BOOT_LOOK_SECONDS: Final = 0.1
CONFIRMING_LABEL: Final = "unconfirmed"
"""Set before a load whose success could else not be told from what the engine said before; no version's label."""

Probe = Callable[[], Awaitable[None]]
"""Raises ReplicaFailed where the engine computes something else than the version should."""


class ReplicaFailed(StitchError):
    """The replica cannot vouch for its engine any more: it stops serving and is to be replaced."""

    exit_code: ClassVar[int] = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """What came of an activation. `refused` says why the old version serves on, None where the new one serves."""

    pause_ms: float
    refused: str | None = None


def drifted(report: EngineReport, serving: Serving) -> str | None:
    """How what the engine says differs from what it shall serve; None where it does not."""
    if (report.model_path, report.label) == (serving.model_path, serving.label):
        return None
    return f"the engine holds {report.model_path} under label {report.label!r}, not {serving.ref} from {serving.model_path}"


class Activation:
    """Changes versions of one engine behind one gate. One call at a time, and none may be cancelled: shield it."""

    def __init__(self, engine: Engine, gate: Gate, config: ReplicaConfig) -> None:
        self.swapping = False
        """From the first order to the engine until it is known what it holds; stays true where that failed."""
        self._engine, self._gate, self._config = engine, gate, config
        self._mode = config.mode

    @property
    def _quiesce(self) -> bool:
        """Whether nothing may live across a load: by choice, or since the engine could not tell such a request's versions."""
        return self._mode is Mode.QUIESCE or self._engine.carry_mode is None

    # --- the first version -------------------------------------------------------------------------------------------------

    async def wait_until_answering(self) -> None:
        """Waits for an engine that somebody else runs, and may have left paused. Raises ReplicaFailed where it takes too long."""
        await self._wait_until(self._engine.alive, lambda: True)

    async def wait_until_ready(self, running: Callable[[], bool]) -> None:
        """Waits until an engine of our own takes requests. Raises ReplicaFailed where it ends first, or takes too long."""
        await self._wait_until(self._engine.ready, running)

    async def _wait_until(self, up: Callable[[], Awaitable[bool]], running: Callable[[], bool]) -> None:
        due = time.monotonic() + self._config.boot_seconds
        while not await up():
            if not running():
                raise ReplicaFailed("the engine ended while it started")
            if time.monotonic() >= due:
                raise ReplicaFailed(f"the engine was not up within {self._config.boot_seconds:g} s")
            await asyncio.sleep(BOOT_LOOK_SECONDS)

    async def boot(self, path: Path, target: Target, probe: Probe | None) -> Swap:
        """An engine that was started on the folder is told which version that is."""
        return await self._supervised(self._adopt(path, target, probe), self._config.boot_seconds)

    async def join(self, path: Path, target: Target, probe: Probe | None) -> Swap:
        """An engine that ran before is given the version, whatever it says that it holds. It may have been left paused, and
        with requests that nobody waits for."""
        return await self._supervised(self._take_over(path, target, probe), self._config.boot_seconds)

    async def _adopt(self, path: Path, target: Target, probe: Probe | None) -> Swap:
        serving = _serving(target, str(path))
        await self._engine.set_label(serving.label)
        await self._confirm(serving)
        await self._check(probe)
        self._gate.flip(serving)
        self._gate.open()
        return Swap(pause_ms=0.0)

    async def _take_over(self, path: Path, target: Target, probe: Probe | None) -> Swap:
        serving = _serving(target, str(path))
        await self._engine.abort(None)
        await self._engine.pause(PauseMode.ABORT if PauseMode.ABORT in self._engine.pause_modes else PauseMode.RETRACT)
        await self._engine.set_label(CONFIRMING_LABEL)
        try:
            await self._engine.load(path, serving.label, flush_cache=True)
        except LoadRefused as refusal:
            await self._engine.resume()  # nothing is served; the pause ends all the same
            return Swap(pause_ms=0.0, refused=str(refusal))
        await self._confirm(serving)
        await self._engine.resume()
        await self._check(probe)
        self._gate.flip(serving)
        self._gate.open()
        return Swap(pause_ms=0.0)

    # --- every other -------------------------------------------------------------------------------------------------------

    async def change(self, path: Path | None, target: Target, probe: Probe | None, *, afresh: bool = False) -> Swap:
        """From what serves to `target`. `path` is None where the weights are the same, so that the label alone changes.

        A version with probes is taken as in `quiesce` mode: nothing may be computed with it before they passed. So it is where
        the engine is loaded `afresh`, because what it holds is in doubt: nothing that it computed lives on. Raises ReplicaFailed.
        """
        old = self._gate.serving
        assert old is not None
        swaps = path is not None
        everything = old.ref.run != target.ref.run or (swaps and (self._quiesce or afresh or probe is not None))
        self._gate.leave_for(target.ref)
        try:
            left = await self._drain(target, everything=everything)
        except BaseException:
            self._gate.leave_for(None)
            raise
        if left:
            pause_ms = self._gate.open()
            self._gate.leave_for(None)
            return Swap(pause_ms=pause_ms, refused=f"{len(left)} requests did not end, though they were given up")
        if path is None:
            return await self._supervised(self._relabel(old, target), self._config.swap_seconds)
        carry = None if self._quiesce or afresh or probe is not None else self._carry()
        return await self._supervised(self._load(old, path, target, probe, carry), self._config.swap_seconds)

    async def _drain(self, target: Target, *, everything: bool) -> set[Ticket]:
        """Returns with the gate closed, and whatever would not end."""
        due = time.monotonic() + self._config.drain_seconds
        waited = await self._gate.ended(self._gate.must_end(target.ref, everything=everything), max(due - time.monotonic(), 0.0))
        if waited:
            await self._end(waited, target)
        self._gate.close()
        # While those were waited for, others may have come that cannot live on either.
        late = self._gate.must_end(target.ref, everything=everything)
        late = await self._gate.ended(late, SETTLE_SECONDS) if late else late
        return await self._end(late, target) if late else late

    async def _end(self, tickets: set[Ticket], target: Target) -> set[Ticket]:
        self._gate.give_up(tickets, f"the replica takes {target.ref}, and this request could not go on under it")
        return await self._gate.ended(tickets, GIVE_UP_SECONDS)

    async def _relabel(self, old: Serving, target: Target) -> Swap:
        """The same weights under another name: nothing pauses."""
        serving = _serving(target, old.model_path)
        self._gate.expect(serving.ref)
        await self._engine.set_label(serving.label)
        await self._confirm(serving)
        self._gate.flip(serving)
        return Swap(pause_ms=self._gate.open())

    async def _load(self, old: Serving, path: Path, target: Target, probe: Probe | None, carry: PauseMode | None) -> Swap:
        serving = _serving(target, str(path))
        await self._engine.pause(carry or PauseMode.ABORT)
        ambiguous = serving.model_path == old.model_path
        if ambiguous:
            await self._engine.set_label(CONFIRMING_LABEL)
        try:
            await self._engine.load(path, serving.label, flush_cache=self._flushes(carry))
        except LoadRefused as refusal:
            if ambiguous:
                await self._engine.set_label(old.label)
            await self._confirm(old)
            await self._engine.resume()
            return Swap(pause_ms=self._gate.open(), refused=str(refusal))
        await self._confirm(serving)
        if probe is None:
            self._gate.flip(serving)
            await self._engine.resume()
        else:
            await self._engine.resume()
            await self._check(probe)
            self._gate.flip(serving)
        return Swap(pause_ms=self._gate.open())

    def _carry(self) -> PauseMode | None:
        """How requests live across the load. What is held in place keeps the cache, which must go where no prefix shall outlive its
        version."""
        if self._config.kv_scope is KvScope.VERSION and PauseMode.RETRACT in self._engine.pause_modes:
            return PauseMode.RETRACT
        return self._engine.carry_mode

    def _flushes(self, carry: PauseMode | None) -> bool:
        """Whether the load drops the KV cache: where no request lives on, or none needs what it had and no prefix shall outlive its
        version. A request that the engine holds unbegun would otherwise find prefixes of the version at which it was admitted."""
        return carry is None or (carry is PauseMode.RETRACT and self._config.kv_scope is KvScope.VERSION)

    # --- what all of them need ---------------------------------------------------------------------------------------------

    async def _confirm(self, serving: Serving) -> None:
        wrong = drifted(await self._engine.report(), serving)
        if wrong is not None:
            raise ReplicaFailed(wrong)

    async def _check(self, probe: Probe | None) -> None:
        if probe is not None:
            await probe()

    async def _supervised(self, swap: Awaitable[Swap], limit: float) -> Swap:
        """A pause always ends: by success, by a confirmed refusal, or with the replica. `limit` in seconds."""
        self.swapping = True
        try:
            async with asyncio.timeout(limit):
                result = await swap
        except TimeoutError as error:
            raise ReplicaFailed(f"the engine did not take the version within {limit:g} s") from error
        except EngineFailed as error:
            raise ReplicaFailed(str(error)) from error
        self.swapping = False
        return result


def _serving(target: Target, model_path: str) -> Serving:
    return Serving(target=target, label=str(target.ref.number), model_path=model_path)
