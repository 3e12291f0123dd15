"""A trainer that changes its mind and dies, as a process of its own: publishes, rewinds, opens new runs, kills itself midway.

Arguments: log URL, store URL, seed. Prints a line of JSON for each version that `publish` said was accepted. It takes up what the
log tells, whatever an earlier life of it left; the first version comes from a random base.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

import stitch
from stitch.core.errors import StitchError
from stitch.core.ids import PolicyId
from stitch.core.lineage import PolicyLineage
from stitch.engines.reference.model import ModelConfig, init, to_bf16
from stitch.engines.reference.serve import init_checkpoint
from stitch.trainer.attempt import Progress, Step
from stitch.trainer.publisher import Publisher

POLICY: Final = PolicyId("math")
SMALL: Final = ModelConfig(embedding=8, context=4, hidden=16)
DEATH: Final = 0.02
"""Chance of dying at each step of each publish or claim."""
PAUSE_SECONDS: Final = (0.1, 0.9)
"""Between two versions: some are followed, some are passed over."""


class Trainer:
    """One life: opens the policy in some way, publishes a few versions, and opens it again."""

    def __init__(self, log: str, store: str, draw: random.Random) -> None:
        self._log, self._store, self._draw = log, store, draw
        self._weights = to_bf16(init(SMALL, draw.randrange(1 << 20)))

    def work(self) -> None:
        while True:
            with self._opened() as publisher:
                for _ in range(self._draw.randrange(2, 8)):
                    self._publish(publisher)
                    time.sleep(self._draw.uniform(*PAUSE_SECONDS))

    def _opened(self) -> Publisher:
        known = stitch.replay(self._log).lineage.policy(POLICY)
        return Publisher.open(policy=POLICY, log=self._log, store=self._store, progress=self._perhaps_die, **self._opening(known))

    def _opening(self, known: PolicyLineage) -> dict[str, Any]:
        if known.owner is None or known.tip is None:
            base = Path(tempfile.mkdtemp(prefix="base-"))
            init_checkpoint(base, seed=1, config=SMALL)
            return {"run": "r1", "base": base}
        chance = self._draw.random()
        if chance < 0.4:
            path = [version.ref.number for version in known.path(known.tip) if version.ref.run == known.owner.run]
            return {"run": known.owner.run, "boot_version": self._draw.choice(path[:6])}
        if chance < 0.6:
            chosen = self._draw.choice(sorted(known.versions, key=lambda ref: (ref.run, ref.number)))
            source = f"{chosen.run}/weight_v{chosen.number:06d}"
            return {"run": f"r{len(known.runs) + 1}", "boot_version": source, "take_over": True}
        return {"run": known.owner.run}

    def _publish(self, publisher: Publisher) -> None:
        self._step()
        done = publisher.publish(self._weights, kind=self._draw.choice(["auto", "auto", "full"]), timeout=60)
        print(json.dumps({"run": done.ref.run, "number": done.ref.number, "weights_digest": done.weights_digest}), flush=True)

    def _step(self) -> None:
        """A little learning, so that a delta is a delta."""
        if self._draw.random() < 0.2:
            self._weights = to_bf16(init(SMALL, self._draw.randrange(1 << 20)))
            return
        name = self._draw.choice(sorted(self._weights))
        changed = np.array(self._weights[name])
        changed.reshape(-1)[self._draw.randrange(changed.size)] += 1
        self._weights = {**self._weights, name: changed}

    def _perhaps_die(self, progress: Progress) -> None:
        if progress.step in Step and self._draw.random() < DEATH:
            os.kill(os.getpid(), signal.SIGKILL)


def main(log: str, store: str, seed: str) -> None:
    trainer = Trainer(log, store, random.Random(seed))
    while True:
        try:
            trainer.work()
        except StitchError as error:  # beaten by its own earlier life's record, or the log is away: it opens anew
            print(json.dumps({"error": str(error)}), flush=True)
            time.sleep(PAUSE_SECONDS[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
