"""What is explored by default, in seconds, and how a deeper run widens it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.core.model.world import Scope

DEFAULT: Final = (
    Scope(
        name="one-run",
        # A zombie and its restarted successor; the successor may rewind.
        lives=(1, 2),
        boots=("tip", "back"),
        faults=(("timeouts", 2), ("losses", 1), ("crashes", 1)),
    ),
    Scope(
        name="two-publications",
        todo=(2, 1),
        boots=("tip", "back"),
        faults=(("timeouts", 1), ("giveups", 1)),
    ),
    Scope(
        name="unreduced",
        # The same rules without the reduction that relies on them.
        boots=("tip", "back"),
        reduce=False,
        faults=(("timeouts", 1), ("doubles", 1)),
    ),
    Scope(
        name="two-runs",
        # The second run goes on from the first one's tip, under a number of its own.
        runs=("a", "b"),
        start="alias",
        bases=("full", "tip"),
        faults=(("timeouts", 1), ("losses", 1), ("doubles", 1)),
    ),
    Scope(
        name="base-checkpoint",
        # Bases are uploaded before the claim that names them, and collected only when none can name them any more.
        runs=("a", "a"),
        start="base",
        bases=("tip",),
        faults=(("timeouts", 1), ("losses", 1), ("collections", 1)),
    ),
    Scope(
        name="collector",
        # Bytes of a publication whose writer died before it landed.
        lives=(2, 1),
        bases=("full", "tip"),
        faults=(("timeouts", 1), ("crashes", 1), ("collections", 1)),
    ),
    Scope(
        name="retirement",
        # A retirement that lands late, beside a publication that builds on the same version, or a rewind to it.
        todo=(2, 1),
        bases=("full", "oldest"),
        boots=("tip", "back"),
        first=True,
        faults=(("timeouts", 1), ("retirements", 1), ("collections", 1)),
    ),
    Scope(
        name="alias-retirement",
        # An alias shares the bytes of its source, whichever of the two is retired.
        runs=("a", "b"),
        start="alias",
        bases=("full", "tip"),
        first=True,
        faults=(("retirements", 2), ("collections", 1)),
    ),
    Scope(
        name="anchors",
        # Anchors that land late, what they set free, and a claim that ends their epoch.
        todo=(2, 1),
        bases=("tip",),
        first=True,
        faults=(("anchors", 1), ("losses", 1), ("retirements", 1), ("collections", 1)),
    ),
    Scope(
        name="pointers",
        # Slow, lost and late pointers, repair, compaction, and a replica that joins afterwards.
        followers=("either",),
        boots=("tip", "back"),
        faults=(("compactions", 1), ("joins", 1), ("pointer_losses", 1)),
    ),
    Scope(
        name="pointers-alone",
        # A replica whose log consumer is dead, while chains are anchored and collected under it.
        todo=(2, 0),
        bases=("tip",),
        followers=("pointers", "log"),
        faults=(("anchors", 1), ("retirements", 1), ("collections", 1), ("compactions", 1), ("joins", 1)),
    ),
)
MAX_STATES: Final = 60_000
"""Of one scope, by default; each needs far fewer."""


def deeper(scope: Scope, depth: int) -> Scope:
    """The scope with each of its faults `depth` times more, and one more life of the second writer from depth 2 on."""
    if depth == 0:
        return scope
    return replace(
        scope,
        lives=(scope.lives[0], scope.lives[1] + (depth > 1)),
        faults=tuple((name, times + depth) for name, times in scope.faults),
    )
