"""Measures: `python -m tests.bench NAME [--json] [--small]`.

Each module here with a function `run(options) -> dict` is a bench. What it compares runs in the same process, in turns, so that a
busy machine slows both sides; medians are told. Nothing asserts a time.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`small` shrinks the work to what a smoke test affords: the keys stay, the numbers mean nothing."""

    small: bool = False

    def say(self, text: str) -> None:
        """Progress, beside the result."""
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of each side of a comparison, turn by turn."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, side: str) -> float:
        return statistics.median(self.seconds[side])

    def ratio(self, ours: str, theirs: str) -> float:
        """Median of the turns' own ratios: what slows a whole turn cancels out."""
        return statistics.median(one / other for one, other in zip(self.seconds[ours], self.seconds[theirs], strict=True))


def seconds_of(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def in_turns(sides: Mapping[str, Callable[[], object]], turns: int, *, settle: Callable[[], object] = os.sync) -> Times:
    """Measures each side once per turn, every other turn in reverse order, with `settle` before each (by default all written
    pages reach the disk, so that no side pays for another's)."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(turns):
        for side in sides if turn % 2 == 0 else reversed(sides):
            settle()
            seconds[side].append(seconds_of(sides[side]))
    return Times(seconds=seconds)
