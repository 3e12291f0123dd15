"""Recorded steps of a real transformer under AdamW (see `_record_steps.py`), for benches and tests. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

RECORDING: Final = Path(__file__).parent / "data" / "adamw_steps.npz"
_ROWS: Final = 1024
_TILED: Final = {
    "self_attn.q_proj": 2048,
    "self_attn.o_proj": 2048,
    "mlp.gate_proj": 4096,
    "mlp.up_proj": 4096,
    "mlp.down_proj": 4096,
}
"""Of a tiled layer: columns of each matrix, of 1024 rows: 4 and 8 MiB in bf16."""

Array = np.ndarray[Any, np.dtype[Any]]
Model = dict[str, Array]


def base() -> Model:
    """The bf16 weights before the first recorded step."""
    return _shaped(_base())


def steps() -> Iterator[Model]:
    """The whole model after each recorded step, arrays of its own each time."""
    return map(_shaped, _states())


def rates() -> list[float]:
    """The learning rate of each step."""
    return list(_about()["rates"])


def tiled(size: int) -> tuple[Model, Iterator[Model]]:
    """Base and steps of a model of about so many bytes (at least one layer of 32 MiB), in tensors as large as those of real models.

    Each matrix is a stretch of the recording's own weights, one after the other, repeated without end; the period, 2.7 MB, is
    longer than the window of zstd 1 and than a codec's chunk, so no compressor profits from the repetition.
    """
    layer = sum(_ROWS * columns for columns in _TILED.values()) * 2
    layers = max(1, round(size / layer))
    return _tile(_base(), layers), (_tile(state, layers) for state in _states())


@cache
def _load() -> dict[str, Array]:
    with np.load(RECORDING) as archive:
        return {name: archive[name] for name in archive.files}


@cache
def _about() -> dict[str, Any]:
    return dict(json.loads(_load()["about"].tobytes()))


def _base() -> Array:
    """All weights, one after the other, as bit patterns."""
    return np.stack([_load()["base_low"], _load()["base_high"]], 1).reshape(-1).view("<u2")


def _states() -> Iterator[Array]:
    state = _base()
    for number in range(1, int(_about()["steps"]) + 1):
        state = state.copy()
        where = np.cumsum(_load()[f"gaps_{number}"], dtype=np.int64) - 1
        state[where] += _load()[f"differences_{number}"].view(np.uint16)
        yield state


def _shaped(state: Array) -> Model:
    model: Model = {}
    position = 0
    for name, shape in _about()["shapes"].items():
        end = position + int(np.prod(shape))
        model[name] = state[position:end].reshape(shape).copy().view(ml_dtypes.bfloat16)
        position = end
    return model


def _tile(state: Array, layers: int) -> Model:
    model: Model = {}
    position = 0
    for layer in range(layers):
        for name, columns in _TILED.items():
            count = _ROWS * columns
            array = np.resize(np.roll(state, -position), count)
            model[f"model.layers.{layer}.{name}.weight"] = array.reshape(columns, _ROWS).view(ml_dtypes.bfloat16)
            position = (position + count) % state.size
    return model
