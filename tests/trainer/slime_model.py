"""For tests of the hooks: the weights of a small model, step by step, and a store that fails when told to."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stitch.log.port import EventLog
from stitch.store.faulty import Fault, FaultyStore
from stitch.store.opening import open_store
from stitch.trainer.publisher import Publisher


def model(step: int) -> dict[str, Any]:
    """After so many steps: with each, 2 % of `body` move by one unit in the last place; every other time, `head` does."""
    rng = np.random.default_rng(7)
    body = rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16)
    units = body.view(np.uint16).reshape(-1)
    for _ in range(step):
        units[rng.integers(0, units.size, units.size // 50)] += np.uint16(1)
    return {"body": body, "frozen": np.arange(4096, dtype=np.int64), "head": np.full(9, (step + 1) // 2, np.float32)}


def smaller(step: int) -> dict[str, Any]:
    """The same model without one of its tensors, as where a trainer does not write all that its first checkpoint held."""
    return {name: tensor for name, tensor in model(step).items() if name != "frozen"}


def fail_by(patch: pytest.MonkeyPatch, log: EventLog | None = None) -> list[Fault]:
    """Faults of the store of every publisher that is opened later; and a log for it, if one is given. Hooks know URLs alone."""
    faults: list[Fault] = []
    opened = Publisher.open

    def open_faulty(**given: Any) -> Publisher:
        store = FaultyStore(open_store(given.pop("store")), *faults)
        return opened(**{**given, "store": store, "log": given["log"] if log is None else log})

    patch.setattr(Publisher, "open", open_faulty)
    return faults
