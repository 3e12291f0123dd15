"""Which versions satisfy a request, and what to say where none does.

A gateway and a replica judge by the same two steps. `resolve` turns what a request asks for into a run and bounds on the
number, by what is known of the lineage; it refuses for good only what no later record can change. `satisfies` holds a serving
version against the resolved bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from stitch.core.events import RunVersion
from stitch.core.ids import RunId, VersionNumber
from stitch.core.lineage import PolicyLineage


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What a request asks for. Numbers compare within `run`; without one they mean the run that owns the head.

    `max_lag` counts versions on the living path between what serves and the tip.
    """

    run: RunId | None = None
    min_version: VersionNumber | None = None
    exact_version: VersionNumber | None = None
    max_lag: int | None = None

    @property
    def empty(self) -> bool:
        """Whether any version will do."""
        return self == Constraint()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A resolved constraint: a version of `run` (None: any run) from `least` to `greatest`, both included, will do."""

    run: RunId | None = None
    least: VersionNumber | None = None
    greatest: VersionNumber | None = None

    def __str__(self) -> str:
        if self.least is not None and self.least == self.greatest:
            return f"version {self.least} of run {self.run}"
        if self.least is not None:
            return f"version {self.least} or newer of run {self.run}"
        return f"any version of run {self.run}" if self.run else "any version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """No later record can make the constraint hold. `reason` is a sentence for the one who asked."""

    reason: str


def resolve(lineage: PolicyLineage, constraint: Constraint) -> Bounds | Gone:
    """The bounds that the constraint means now, or why it can never hold again."""
    if constraint.empty:
        return Bounds()
    run = constraint.run or (lineage.owner.run if lineage.owner else None)
    if run is None:
        # Nothing was ever claimed: no number can be compared yet, so nothing serves and nothing is gone.
        asked = [n for n in (constraint.min_version, constraint.exact_version) if n is not None]
        return Bounds(least=max(asked, default=VersionNumber(0)))
    known = lineage.runs.get(run)
    if known is not None and known.superseded:
        owner = lineage.owner.run if lineage.owner else None
        return Gone(reason=f"run {run} was superseded by run {owner}")
    if constraint.exact_version is not None:
        gone = _exact_gone(lineage, RunVersion(run=run, number=constraint.exact_version))
        if gone is not None:
            return gone
    floor = _floor(lineage, run, constraint.max_lag)
    lower = [n for n in (constraint.min_version, constraint.exact_version, floor) if n is not None]
    return Bounds(run=run, least=max(lower, default=None), greatest=constraint.exact_version)


def satisfies(lineage: PolicyLineage, bounds: Bounds, serving: RunVersion | None) -> bool:
    """Whether an answer computed by `serving` keeps the bounds.

    A version that this reader has yet to hear of counts, if it is above all that it knows of the run: the one who serves it has
    read its publication.
    """
    if serving is None:
        return False
    if bounds.run is None:
        return bounds.least is None
    if serving.run != bounds.run:
        return False
    if bounds.least is not None and serving.number < bounds.least:
        return False
    if bounds.greatest is not None and serving.number > bounds.greatest:
        return False
    if serving not in lineage.versions:
        greatest = lineage.greatest(serving.run)
        return greatest is None or serving.number > greatest
    return lineage.living(serving) and lineage.eligible(serving)


def lag(lineage: PolicyLineage, serving: RunVersion) -> int | None:
    """Versions on the living path above `serving`; None where it is not on the path."""
    for distance, version in enumerate(lineage.path(lineage.tip)):
        if version.ref == serving:
            return distance
    return None


def _exact_gone(lineage: PolicyLineage, ref: RunVersion) -> Gone | None:
    version = lineage.versions.get(ref)
    if version is None:
        greatest = lineage.greatest(ref.run)
        if greatest is not None and ref.number < greatest:
            return Gone(reason=f"{ref} was never published, and the run is at {greatest} already")
        return None
    if version.abandoned:
        return Gone(reason=f"{ref} was abandoned: its run went on from an older version")
    if version.retired is not None:
        return Gone(reason=f"{ref} was retired")
    return None if lineage.eligible(ref) else Gone(reason=f"{ref} was quarantined")


def _floor(lineage: PolicyLineage, run: RunId, max_lag: int | None) -> VersionNumber | None:
    """The oldest number of the run that is at most `max_lag` versions below the tip."""
    if max_lag is None or lineage.tip is None or lineage.tip.run != run:
        return None
    within = [v.ref for v in islice(lineage.path(lineage.tip), max_lag + 1) if v.ref.run == run]
    return within[-1].number
