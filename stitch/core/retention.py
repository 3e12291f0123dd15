"""Which versions are kept and why, which are retired, and whose bytes are free then (rule 7).

Pure. A collector acts on a view that is old by the time it acts, so everything that is called free here stays free, whatever is
decided later (docs/adr/0006-retention.md has the argument). What is wrong in a view can only be that it is too old, and then too
much is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Final

from stitch.core.errors import Unavailable
from stitch.core.events import Phase, RunVersion
from stitch.core.fleet import Fleet, Member
from stitch.core.ids import LATEST, Epoch, ReplicaId, RunId, VersionNumber
from stitch.core.lineage import Channel, PolicyLineage, Position, Version

RETAIN: Final = 16
"""Newest versions on the path to the tip that are kept by default: as many as a chain has, so about one model more than needed."""
GRACE_MS: Final = 60 * 60 * 1000
"""From a retirement to the end of its bytes, by the log's clock: longer than a replica stages, so that one which began before it
heard of the retirement comes to its end."""

_OVER: Final = frozenset({Phase.LEFT, Phase.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one look at the views comes to.

    `kept`: each unretired version that must stay, with the reasons, newest first. `retire`: the others, in an order in which the
    fold accepts each: what builds on a version goes before it.
    """

    kept: Mapping[RunVersion, tuple[str, ...]]
    retire: tuple[RunVersion, ...]


def plan(policy: PolicyLineage, fleet: Fleet | None, *, retain: int = RETAIN) -> Plan:
    """Keeps the tip, what channels name and would fall back to, the `retain` newest on the path to the tip, what a replica serves,
    holds staged or wants, and all that those are built from.

    `fleet` is None where no view of it is caught up; then nothing can be planned: raises Unavailable.
    """
    if fleet is None:
        raise Unavailable("retention: the view of the fleet is not caught up, so nobody knows what the replicas use")
    why: dict[RunVersion, list[str]] = {}
    for ref, reason in _roots(policy, fleet, retain):
        if policy.versions[ref].retired is None:
            why.setdefault(ref, []).append(reason)
    for root in list(why):
        above = root
        for version in islice(policy.chain(root), 1, None):
            if version.ref in why:
                above = version.ref
                continue
            why[version.ref] = [f"{above} is built from it"]
            above = version.ref
    unretired = sorted((v for v in policy.versions.values() if v.retired is None), key=_age, reverse=True)
    return Plan(
        kept={version.ref: tuple(why[version.ref]) for version in unretired if version.ref in why},
        retire=tuple(version.ref for version in unretired if version.ref not in why),
    )


def after(policy: PolicyLineage, plan: Plan, at: Position) -> PolicyLineage:
    """What the lineage would be with the plan carried out at that moment: for a look ahead."""
    versions = policy.versions.mutate()
    for ref in plan.retire:
        versions[ref] = replace(versions[ref], retired=at)
    return replace(policy, versions=versions.finish())


def used(policy: PolicyLineage, fleet: Fleet) -> dict[RunVersion, str]:
    """The versions that replicas serve, hold staged or want, each with who does, as far as the lineage knows them.

    A replica that fell silent counts as long as the view has it: it may still be loading.
    """
    found: dict[RunVersion, set[ReplicaId]] = {}
    for replica, member in fleet.members.items():
        for ref in _uses(policy, member):
            found.setdefault(ref, set()).add(replica)
    return {ref: _named(sorted(replicas)) for ref, replicas in found.items()}


def due(policy: PolicyLineage, fleet: Fleet, *, now_ms: int, grace_ms: int = GRACE_MS) -> frozenset[RunVersion]:
    """The retired versions whose grace is over at `now_ms` by the log's clock, and which no replica uses any more."""
    in_use = {version.ref for ref in used(policy, fleet) for version in policy.chain(ref)}
    return frozenset(
        version.ref
        for version in policy.versions.values()
        if version.retired is not None and version.retired.time_ms + grace_ms <= now_ms and version.ref not in in_use
    )


# --- bytes -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a version, as the prefix of its keys tells it. A base checkpoint has no epoch, but the start of its weights
    digest in `base`."""

    run: RunId
    number: VersionNumber
    epoch: Epoch | None
    base: str | None = None

    @property
    def ref(self) -> RunVersion:
        return RunVersion(run=self.run, number=self.number)


class Fate(StrEnum):
    """What becomes of an object."""

    KEPT = "kept"
    WAITING = "waiting"
    """Of a retired version: its grace is not over, or a replica uses it."""
    FREE = "free"
    UNKNOWN = "unknown"
    """This log does not account for it: left, and listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What becomes of an object, and why."""

    fate: Fate
    why: str


_NAMED: Final = Judgement(fate=Fate.KEPT, why="a version that is kept names it")
_WAITING: Final = Judgement(fate=Fate.WAITING, why="retired; its grace is not over, or a replica uses it")
_RETIRED: Final = Judgement(fate=Fate.FREE, why="retired, and its grace is over")
_OVER_EPOCH: Final = Judgement(fate=Fate.FREE, why="of no accepted version, and its epoch is over")
_OPEN_EPOCH: Final = Judgement(fate=Fate.KEPT, why="of the present epoch: it may still come to be named")
_DEAD_BASE: Final = Judgement(fate=Fate.FREE, why="a base checkpoint that no claim can name any more")
_OPEN_BASE: Final = Judgement(fate=Fate.KEPT, why="a base checkpoint that a claim may still name")
_NO_SUCH_RUN: Final = Judgement(fate=Fate.UNKNOWN, why="of a run that this log does not know")
_NO_SUCH_EPOCH: Final = Judgement(fate=Fate.UNKNOWN, why="of an epoch that this log has not come to")


def judge(policy: PolicyLineage, attempt: Attempt, *, due: Collection[RunVersion], named: bool, lingers: bool = False) -> Judgement:
    """What becomes of an object of the attempt. A manifest of an unretired version names it, or is it, where it is `named`; one of
    a retired version that is not `due`, where it `lingers`."""
    if named:
        return _NAMED
    version = policy.versions.get(attempt.ref)
    if version is not None and version.retired is not None:
        # Its number is never used again, and nobody can add an anchor to it: whatever lies under it goes.
        return _RETIRED if attempt.ref in due and not lingers else _WAITING
    run = policy.runs.get(attempt.run)
    if attempt.epoch is None:
        # Only the first claim of a run may name a base.
        return _DEAD_BASE if run is not None and (run.greatest is not None or run.superseded) else _OPEN_BASE
    if run is None:
        return _NO_SUCH_RUN
    if attempt.epoch > policy.epoch:
        return _NO_SUCH_EPOCH
    return _OVER_EPOCH if attempt.epoch < policy.epoch else _OPEN_EPOCH


# --- what is kept ----------------------------------------------------------------------------------------------------------------


def _roots(policy: PolicyLineage, fleet: Fleet, retain: int) -> Iterator[tuple[RunVersion, str]]:
    if policy.tip is not None:
        yield policy.tip, "the tip"
    for name, channel in sorted(policy.channels.items()):
        if channel.target is not None:
            yield channel.target, f"channel {name} names it"
            back = _way_back(policy, channel, is_latest=name == LATEST)
            if back is not None:
                yield back, f"channel {name} falls back to it where {channel.target} is quarantined"
    newest = (version for version in policy.path(policy.tip) if version.retired is None)
    for version in islice(newest, retain):
        yield version.ref, f"among the {retain} newest"
    for ref, who in sorted(used(policy, fleet).items(), key=lambda item: str(item[0])):
        yield ref, f"in use by {who}"


def _way_back(policy: PolicyLineage, channel: Channel, *, is_latest: bool) -> RunVersion | None:
    """Where a quarantine of the target would move the channel: as the fold has it."""
    assert channel.target is not None
    bad = _same_weights(policy, channel.target)
    earlier = (v.ref for v in policy.path(policy.tip)) if is_latest else reversed(channel.history)
    return next((ref for ref in earlier if policy.eligible(ref) and bad.isdisjoint(_same_weights(policy, ref))), None)


def _same_weights(policy: PolicyLineage, ref: RunVersion) -> set[RunVersion]:
    """The version and those that it is an alias of: one quarantine takes them all."""
    found = {ref}
    while (source := policy.versions[ref].alias_of) is not None:
        found.add(ref := source)
    return found


def _uses(policy: PolicyLineage, member: Member) -> Iterator[RunVersion]:
    state = member.state
    if state.policy == policy.policy and state.phase not in _OVER:
        for ref in (state.serving, state.staged, state.target):
            if ref is not None and ref in policy.versions:
                yield ref


def _named(replicas: list[ReplicaId]) -> str:
    others = len(replicas) - 1
    return f"replica {replicas[0]}" + (f" and {others} other{'s' if others > 1 else ''}" if others else "")


def _age(version: Version) -> int:
    return version.position.offset
