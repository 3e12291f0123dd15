"""Two tensors of the same form compared value by value, in bounded memory.

A *step* is the way from one representable number to the next: a unit in the last place of a floating-point number, 1 of an integer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stitch.weights.header import DTYPES
from stitch.weights.host import HostTensor

THREADS: Final = min(4, os.cpu_count() or 1)
"""Tensors compared at once; each holds some twenty bytes per value of a chunk."""
CHUNK_VALUES: Final = 1 << 20
NORM_BLOCK: Final = 1 << 16
"""Values whose squares are added up in single precision: few enough for four digits."""
SINGLE: Final = np.dtype(np.float32)
TINY_SQUARE: Final = 1e-25
_Array = np.ndarray[Any, np.dtype[Any]]
_POWERS: Final = np.left_shift(np.uint64(1), np.arange(64, dtype=np.uint64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """By how much the values of a tensor changed.

    `changed` values differ bit for bit. Of those whose distance is known, steps[k] moved by 2^k steps up to, not including,
    2^(k+1): steps[0] by exactly one. `largest` is the greatest |difference|, `relative` the difference's norm over the norm of
    the old tensor, `nonfinite` the count of changed values that now are infinite or not a number; None where values were not looked
    at, `relative` also where the old tensor is all zero. What is not finite, before or after, counts in neither of the first two.
    """

    changed: int
    steps: tuple[int, ...] = ()
    largest: float | None = None
    relative: float | None = None
    nonfinite: int | None = None

    @property
    def by_one(self) -> int:
        """Values that moved to a neighbouring number."""
        return self.steps[0] if self.steps else 0

    @property
    def magnitude(self) -> tuple[float, float]:
        """To sort by: the relative change where it is known, else the mean distance in steps, as far as the bins tell."""
        if self.relative is not None:
            return self.relative, self.largest or 0.0
        known = sum(self.steps)
        return sum(count * 2.0**k for k, count in enumerate(self.steps)) / known if known else 0.0, float(self.changed)


def compare(old: HostTensor, new: HostTensor, check: Callable[[], None] = lambda: None) -> Moved:
    """How the values of `new` differ from those of `old`, which has the same dtype and shape. `check` raises to stop."""
    before, after = _flat(old), _flat(new)
    total = _Sum()
    for start in range(0, before.size, CHUNK_VALUES):
        check()
        total.add(before[start : start + CHUNK_VALUES], after[start : start + CHUNK_VALUES])
    return total.moved()


class _Sum:
    """What the chunks so far come to."""

    def __init__(self) -> None:
        self._changed = self._nonfinite = 0
        self._bins = np.zeros(64, np.int64)
        self._largest = self._square = self._norm = 0.0

    def add(self, old: _Array, new: _Array) -> None:
        where = np.flatnonzero(_units(old) != _units(new))
        self._changed += where.size
        with np.errstate(all="ignore"):
            self._norm += _norm_square(old)
            if not where.size:
                return
            distance = _distance(old[where], new[where])
            bins = np.searchsorted(_POWERS, distance[distance > 0], side="right") - 1
            self._bins += np.bincount(bins, minlength=64)
            after = new[where].astype(np.float64)
            self._nonfinite += int(np.count_nonzero(~np.isfinite(after)))
            difference = np.abs(after - old[where].astype(np.float64))
            self._largest = max(self._largest, float(difference[np.isfinite(difference)].max(initial=0.0)))
            self._square += _square_sum(difference)

    def moved(self) -> Moved:
        filled = np.flatnonzero(self._bins)
        return Moved(
            changed=self._changed,
            steps=tuple(int(n) for n in self._bins[: int(filled[-1]) + 1]) if filled.size else (),
            largest=self._largest,
            relative=math.sqrt(self._square / self._norm) if self._norm else None,
            nonfinite=self._nonfinite,
        )


def _norm_square(values: _Array) -> float:
    """Of the finite values. It reads every value of a model: in single precision, block by block, where that will do."""
    if values.dtype.itemsize > SINGLE.itemsize or values.dtype.kind in "iu":
        return _square_sum(values.astype(np.float64))
    total = 0.0
    for start in range(0, values.size, NORM_BLOCK):
        block = values[start : start + NORM_BLOCK]
        single = _single(block)
        square = float(np.dot(single, single))
        # What overflows, and what almost vanishes, is computed again with the wider range.
        total += square if TINY_SQUARE < square < math.inf else _square_sum(block.astype(np.float64))
    return total


def _single(values: _Array) -> np.ndarray[Any, np.dtype[np.float32]]:
    if values.dtype != DTYPES["BF16"]:
        return values.astype(SINGLE, copy=False)
    wide: np.ndarray[Any, np.dtype[np.uint32]] = _units(values).astype(np.uint32) << np.uint32(16)
    return wide.view(SINGLE)


def _square_sum(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Of the finite values."""
    total = float(np.dot(values, values))
    if math.isfinite(total):
        return total
    finite = values[np.isfinite(values)]
    return float(np.dot(finite, finite))


def _flat(tensor: HostTensor) -> _Array:
    return np.frombuffer(tensor.data, DTYPES[tensor.dtype]) if tensor.data.nbytes else np.empty(0, DTYPES[tensor.dtype])


def _units(values: _Array) -> _Array:
    """The bits, as unsigned integers."""
    return values.view(np.dtype(f"<u{values.dtype.itemsize}"))


def _distance(old: _Array, new: _Array) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """In steps. From -0 to +0 there are none."""
    one, other = _order(old), _order(new)
    # The difference of two signed numbers always fits the unsigned one, in which subtraction wraps.
    greater, less = np.maximum(one, other).view(np.uint64), np.minimum(one, other).view(np.uint64)
    distance: np.ndarray[Any, np.dtype[np.uint64]] = greater - less
    return distance


def _order(values: _Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Whole numbers in the order of the values, neighbours next to each other."""
    bits = 8 * values.dtype.itemsize
    units = _units(values).astype(np.uint64)
    if values.dtype.kind in "ub" or values.dtype == DTYPES["F8_E8M0"]:
        return (units ^ np.uint64(1 << 63)).view(np.int64) if bits == 64 else units.view(np.int64)
    if values.dtype.kind == "i":
        return values.astype(np.int64)
    magnitude = (units & np.uint64((1 << (bits - 1)) - 1)).view(np.int64)
    return np.where(units >> np.uint64(bits - 1), -magnitude, magnitude)
