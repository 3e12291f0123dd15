"""Weights in the three forms that a trainer hands over: a mapping, an iterable of pairs, a checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stitch.weights.host import HostTensor, as_array, check_tensor_name, host_tensor, host_tensors
from stitch.weights.safetensors import open_checkpoint

__all__ = ["HostTensor", "Weights", "as_array", "check_tensor_name", "host_tensor", "host_tensors", "iterate"]

Weights = Mapping[str, Any] | Iterable[tuple[str, Any]] | Path
"""Tensors are numpy arrays, torch tensors or HostTensor. An iterable is read once and never held as a whole."""


def iterate(weights: Weights) -> Iterator[HostTensor]:
    """The tensors, one at a time. A tensor's bytes are good until the next one is taken.

    Raises InvalidRequest naming what is no tensor, CorruptObject for a directory whose files are damaged.
    """
    if not isinstance(weights, Path):
        yield from host_tensors(weights)
        return
    with open_checkpoint(weights) as checkpoint:
        yield from checkpoint.tensors()
