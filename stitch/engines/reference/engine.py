"""The generation loop and its state: weights in memory, requests running and waiting, pause, load, misbehaviour.

Everything happens on one event loop; a step computes one token of every running request, and weights change only between
steps. So each token has exactly one label and one digest, which are noted as it is computed. There is no KV cache: a token
needs its last K neighbours only, which is why an `extra_key` changes nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from stitch.core.errors import InvalidRequest, StitchError
from stitch.engines.port import PauseMode
from stitch.engines.reference import checkpoint
from stitch.engines.reference.model import Array, context_size, logits, to_f32
from stitch.engines.reference.sequence import Sequence

MAX_RUNNING: Final = 64
"""More wait in line: a step stays short enough for the HTTP side to breathe."""
_LOOK_S: Final = 0.05
"""How soon an update that waits for running requests notices a pause."""
DIED: Final = 137
"""Exit status of a death on demand: what a kill by the kernel looks like."""


class UpdateRefused(StitchError):
    """A weight update that was turned down before anything changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What is in memory. `digest` is computed from these arrays, never taken from a file or a request."""

    path: Path
    params: dict[str, Array]
    computing: dict[str, Array]
    """The same parameters as f32."""
    digest: str
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Misbehaviour:
    """Faults on demand, for tests. `hang` is one of load, generate, pause; `die` is now or during_load."""

    slow_ms: float = 0.0
    hang: str | None = None
    refuse_update: bool = False
    half_update: bool = False
    die: str | None = None
    wrong_label: str | None = None


def weights_of(path: Path, params: dict[str, Array]) -> Weights:
    return Weights(
        path=path,
        params=params,
        computing=to_f32(params),
        digest=checkpoint.digest(params),
        context=context_size(params),
    )


class ReferenceEngine:
    """Run `run()` as a task; all methods belong to its event loop."""

    def __init__(self, weights: Weights, label: str) -> None:
        self.weights = weights
        self.label = label
        self.paused: PauseMode | None = None
        self.misbehaviour = Misbehaviour()
        self.tokens = 0
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._updating = 0
        """Updates under way: no request is admitted meanwhile."""
        self._loading = False
        """Weights are being exchanged: no step meanwhile."""
        self._update_lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._told = asyncio.Event()
        """Set, and made anew, whenever faults change."""
        self._idle = asyncio.Event()
        self._idle.set()

    # --- the loop ----------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Computes until cancelled."""
        while True:
            self._admit()
            if not self._running or self.paused is not None or self._loading or self.misbehaviour.hang == "generate":
                self._wake.clear()
                await self._wake.wait()
                continue
            self._step()
            await asyncio.sleep(self.misbehaviour.slow_ms / 1000)

    def _admit(self) -> None:
        if self.paused is None and not self._updating:
            free = MAX_RUNNING - len(self._running)
            self._running += self._waiting[:free]
            del self._waiting[:free]
        self._note_idle()

    def _step(self) -> None:
        weights, label = self.weights, self.label
        contexts = np.asarray([each.context(weights.context) for each in self._running])
        scores = logits(weights.computing, contexts)
        for each, row in zip(self._running, scores, strict=True):
            token, logprob = each.choose(row)
            each.append(token, logprob, label=label, digest=weights.digest)
        self.tokens += len(self._running)
        self._running = [each for each in self._running if each.finish is None]
        self._note_idle()

    def _note_idle(self) -> None:
        if self._running:
            self._idle.clear()
        else:
            self._idle.set()

    # --- requests ----------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Queues a request; it starts at the next step, or once a pause or an update is over."""
        if any(each.rid == sequence.rid for each in (*self._running, *self._waiting)):
            raise InvalidRequest(f"Duplicate request ID detected: {sequence.rid}", field="rid")
        if sequence.sampling.max_new_tokens == 0:
            sequence.end({"type": "length", "length": 0})
            return
        self._waiting.append(sequence)
        self._wake.set()

    def abort(self, rid: str | None) -> None:
        """Ends the request of this id, or every one (None)."""
        for each in (*self._running, *self._waiting):
            if rid is None or each.rid == rid:
                each.abort()
        self._running = [each for each in self._running if each.finish is None]
        self._waiting = [each for each in self._waiting if each.finish is None]
        self._note_idle()
        self._wake.set()

    # --- control -----------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """No token is computed once this returns: steps are never interrupted, so none is half done."""
        await self._hang("pause")
        if mode is PauseMode.ABORT:
            self.abort(None)
        elif mode is PauseMode.RETRACT:
            for each in self._running:
                each.retractions += 1
            self._waiting = self._running + self._waiting
            self._running = []
        self.paused = mode
        self._wake.set()

    def resume(self) -> None:
        self.paused = None
        self._wake.set()

    def set_label(self, label: str) -> None:
        self.label = label

    async def update(self, path: Path, label: str | None, *, flush_cache: bool, abort_all: bool) -> str:
        """Exchanges the weights and returns a message; UpdateRefused leaves the old ones in place.

        While paused it happens at once, and requests that are held go on with the new weights. Otherwise running requests
        finish on the old ones first, and new requests wait.
        """
        if self.misbehaviour.refuse_update:
            raise UpdateRefused("told to refuse")
        if abort_all:
            self.abort(None)
        self._updating += 1
        try:
            async with self._update_lock:
                while self.paused is None and self._running:
                    await self._idle_or_paused()
                if flush_cache and self._running:
                    raise UpdateRefused("requests are held in place, so the cache cannot be flushed: retract or finish them")
                return await self._exchange(path, label)
        finally:
            self._updating -= 1
            self._wake.set()

    async def _idle_or_paused(self) -> None:
        """Returns when no request runs; a pause meanwhile is seen at the next look."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _LOOK_S)

    async def _exchange(self, path: Path, label: str | None) -> str:
        self._loading = True
        try:
            await self._hang("load")
            try:
                params = await asyncio.to_thread(checkpoint.load_matching, path, self.weights.params)
            except (StitchError, OSError) as error:
                raise UpdateRefused(f"Failed to get weights iterator: {error}") from error
            if self.misbehaviour.die == "during_load":
                os._exit(DIED)
            if self.misbehaviour.half_update:
                names = sorted(params)
                params = {**params, **{name: self.weights.params[name] for name in names[len(names) // 2 :]}}
            self.weights = await asyncio.to_thread(weights_of, path, params)
        finally:
            self._loading = False
        message = "Succeeded to update model weights."
        if label is not None:
            self.label = label if self.misbehaviour.wrong_label is None else self.misbehaviour.wrong_label
            message += f" Weight version updated to {label}."
        return message

    def misbehave(self, **changes: object) -> Misbehaviour:
        """Changes the faults named; dies at once where told so."""
        self.misbehaviour = replace(self.misbehaviour, **changes)  # type: ignore[arg-type]
        if self.misbehaviour.die == "now":
            os._exit(DIED)
        self._told.set()
        self._told = asyncio.Event()
        self._wake.set()
        return self.misbehaviour

    async def _hang(self, what: str) -> None:
        """Does not return while the fault lasts."""
        while self.misbehaviour.hang == what:
            await self._told.wait()


def uptime(sequence: Sequence) -> float:
    """Seconds since the request came."""
    return time.monotonic() - sequence.started
