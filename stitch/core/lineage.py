"""The lineage fold: which claims and versions count, what lives, and where each channel stands.

This is the one compare-and-set of Stitch. Every reader applies the same decisions in the log's order by the same rules, so
every reader accepts and ignores the same ones. `apply` never raises on a decision that does not count: it returns the same
lineage with the reason remembered. The rules are numbered as in the publication protocol (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from immutables import Map

from stitch.core.dependents import counted
from stitch.core.events import (
    AnchorAdded,
    ChannelMoved,
    Decision,
    FormatRaised,
    RunClaimed,
    RunVersion,
    VersionPublished,
    VersionQuarantined,
    VersionRetired,
)
from stitch.core.frozen import changer, maker
from stitch.core.ids import (
    LATEST,
    ChannelName,
    Epoch,
    EventId,
    Offset,
    PolicyId,
    RunId,
    Sequence,
    VersionNumber,
    WriterId,
)
from stitch.core.manifest import Kind, ManifestRef

CHANNEL_HISTORY: Final = 64
"""Earlier targets of a channel that are remembered, for the way back from a quarantine."""


class Verdict(StrEnum):
    """What became of a decision, for every reader alike."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE_HEAD = "stale_head"
    STALE_EPOCH = "stale_epoch"
    STALE_SEQUENCE = "stale_sequence"
    RUN_NOT_CURRENT = "run_not_current"
    RUN_SUPERSEDED = "run_superseded"
    BOOT_NOT_LIVING = "boot_not_living"
    BOOT_MISSING = "boot_missing"
    SOURCE_UNUSABLE = "source_unusable"
    NUMBER_NOT_GREATER = "number_not_greater"
    PARENT_NOT_TIP = "parent_not_tip"
    BASE_UNUSABLE = "base_unusable"
    VERSION_UNKNOWN = "version_unknown"
    VERSION_NEEDED = "version_needed"
    VERSION_UNUSABLE = "version_unusable"
    WEIGHTS_DIFFER = "weights_differ"
    NOTHING_TO_DO = "nothing_to_do"
    CHANNEL_NOT_MOVABLE = "channel_not_movable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the log holds a record. `time_ms` is the log's clock."""

    offset: Offset
    time_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """An accepted version.

    `base` is what its delta is against. `alias_of` names the version of another run that it is the same as; then the bytes are
    that version's. `anchor` is a full form that was added later.
    """

    ref: RunVersion
    parent: RunVersion | None
    kind: Kind
    base: RunVersion | None
    alias_of: RunVersion | None
    manifest: ManifestRef
    size: int
    epoch: Epoch
    event_id: EventId
    writer: WriterId
    position: Position
    anchor: ManifestRef | None = None
    anchor_size: int = 0
    abandoned: bool = False
    quarantined: bool = False
    retired: Position | None = None

    @property
    def link(self) -> RunVersion | None:
        """The version whose bytes are needed to build this one; None where it has a full form of its own."""
        return None if self.anchor is not None else self.alias_of or self.base


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One numbering. `greatest` is the greatest number ever accepted in it."""

    greatest: VersionNumber | None = None
    superseded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim that owns the policy."""

    run: RunId
    writer: WriterId
    epoch: Epoch
    event_id: EventId
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A named pointer: its count of moves, its target, the targets before, and the decision that moved it last or gave its
    target a nearer anchor."""

    sequence: Sequence
    target: RunVersion | None
    history: tuple[RunVersion, ...]
    source: EventId
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLineage:
    """All that was decided of one policy."""

    policy: PolicyId
    head: EventId | None = None
    owner: Claim | None = None
    tip: RunVersion | None = None
    runs: Map[RunId, Run] = field(default_factory=Map)
    versions: Map[RunVersion, Version] = field(default_factory=Map)
    channels: Map[ChannelName, Channel] = field(default_factory=Map)
    verdicts: Map[EventId, Verdict] = field(default_factory=Map)
    """What the first copy of each decision came to; it stands for good."""
    dependents: Map[RunVersion, int] = field(default_factory=Map, compare=False, repr=False)
    """How many unretired versions are built on the version directly. It follows from `versions`, and is no part of the state."""

    @property
    def epoch(self) -> Epoch:
        """The count of accepted claims."""
        return self.owner.epoch if self.owner else Epoch(0)

    def living(self, ref: RunVersion) -> bool:
        """Whether the version is on the path to the tip, in the run that owns the head, and unretired."""
        version = self.versions.get(ref)
        return (
            version is not None
            and self.owner is not None
            and ref.run == self.owner.run
            and not version.abandoned
            and version.retired is None
        )

    def eligible(self, ref: RunVersion) -> bool:
        """Whether a channel may name the version: accepted, unretired, not quarantined under any of its names."""
        version = self.versions.get(ref)
        if version is None or version.retired is not None:
            return False
        while not version.quarantined:
            if version.alias_of is None:
                return True
            version = self.versions[version.alias_of]
        return False

    def path(self, ref: RunVersion | None) -> Iterator[Version]:
        """The version and its ancestors, newest first."""
        while ref is not None:
            version = self.versions[ref]
            yield version
            ref = version.parent

    def chain(self, ref: RunVersion) -> Iterator[Version]:
        """The versions whose bytes are needed to build this one, itself first, down to the nearest full form."""
        at: RunVersion | None = ref
        while at is not None:
            version = self.versions[at]
            yield version
            at = version.link

    def nearest_anchor(self, ref: RunVersion) -> tuple[RunVersion, ManifestRef]:
        """The first version down the chain that has a full form, and that form's manifest."""
        *_, last = self.chain(ref)
        return last.ref, last.anchor or last.manifest

    def latest_target(self) -> RunVersion | None:
        """The tip, or its nearest eligible ancestor."""
        return next((v.ref for v in self.path(self.tip) if self.eligible(v.ref)), None)

    def greatest(self, run: RunId) -> VersionNumber | None:
        """The greatest number ever accepted in the run."""
        known = self.runs.get(run)
        return known.greatest if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """All policies of a namespace, and the format level that its writers may use."""

    level: int = 1
    policies: Map[PolicyId, PolicyLineage] = field(default_factory=Map)

    def policy(self, policy: PolicyId) -> PolicyLineage:
        """The policy's lineage; an empty one where nothing was decided yet."""
        return self.policies.get(policy) or PolicyLineage(policy=policy)


make_position: Final = maker(Position)
"""As the class: for whoever makes one for each record."""
_ref: Final = maker(RunVersion)
_version: Final = maker(Version)
_run: Final = maker(Run)
_channel: Final = maker(Channel)
_with: Final = changer(PolicyLineage)
_lineage: Final = maker(Lineage)


def apply(lineage: Lineage, decision: Decision, at: Position) -> tuple[Lineage, Verdict]:
    """The lineage after the decision, and what became of it."""
    if isinstance(decision, FormatRaised):
        if decision.level <= lineage.level:
            return lineage, Verdict.NOTHING_TO_DO
        return replace(lineage, level=decision.level), Verdict.ACCEPTED
    before = lineage.policy(decision.policy)
    if decision.event_id in before.verdicts:
        return lineage, Verdict.DUPLICATE
    verdict = _judge(before, decision)
    after = _take(before, decision, at) if verdict is Verdict.ACCEPTED else before
    after = _with(after, verdicts=after.verdicts.set(decision.event_id, verdict))
    return _lineage(level=lineage.level, policies=lineage.policies.set(decision.policy, after)), verdict


# --- the rules: pure questions to the lineage before -----------------------------------------------------------------------


def _judge(policy: PolicyLineage, decision: Decision) -> Verdict:
    match decision:
        case RunClaimed():
            return _judge_claim(policy, decision)
        case VersionPublished():
            return _judge_publication(policy, decision)
        case AnchorAdded():
            return _judge_anchor(policy, decision)
        case ChannelMoved():
            return _judge_move(policy, decision)
        case VersionQuarantined():
            version = policy.versions.get(decision.version)
            if version is None:
                return Verdict.VERSION_UNKNOWN
            return Verdict.NOTHING_TO_DO if version.quarantined else Verdict.ACCEPTED
        case VersionRetired():
            return _judge_retirement(policy, decision)
        case FormatRaised():
            raise AssertionError("of the namespace, not of a policy")


def _judge_claim(policy: PolicyLineage, claim: RunClaimed) -> Verdict:
    """Rule 1."""
    if claim.expected_head != policy.head:
        return Verdict.STALE_HEAD
    run = policy.runs.get(claim.run, Run())
    if run.superseded:
        return Verdict.RUN_SUPERSEDED
    if run.greatest is not None:
        boot = claim.boot
        if boot is None or claim.alias is not None or claim.base is not None:
            return Verdict.BOOT_MISSING
        return Verdict.ACCEPTED if policy.living(RunVersion(run=claim.run, number=boot)) else Verdict.BOOT_NOT_LIVING
    if claim.alias is not None:
        source = policy.versions.get(claim.alias)
        usable = source is not None and source.retired is None and claim.base is None and claim.boot is not None
        return Verdict.ACCEPTED if usable else Verdict.SOURCE_UNUSABLE
    return Verdict.ACCEPTED if (claim.base is None) == (claim.boot is None) else Verdict.BOOT_MISSING


def _judge_publication(policy: PolicyLineage, publication: VersionPublished) -> Verdict:
    """Rule 3."""
    if policy.owner is None or publication.epoch != policy.epoch:
        return Verdict.STALE_EPOCH
    if publication.run != policy.owner.run:
        return Verdict.RUN_NOT_CURRENT
    if publication.expected_head != policy.head:
        return Verdict.STALE_HEAD
    parent = None if publication.parent is None else _ref(run=publication.run, number=publication.parent)
    if parent != policy.tip:
        return Verdict.PARENT_NOT_TIP
    greatest = policy.greatest(publication.run)
    if greatest is not None and publication.number <= greatest:
        return Verdict.NUMBER_NOT_GREATER
    if (publication.base is None) != (publication.kind is Kind.FULL):
        return Verdict.BASE_UNUSABLE
    if publication.base is not None:
        base = policy.versions.get(publication.base)
        if base is None or base.retired is not None:
            return Verdict.BASE_UNUSABLE
    return Verdict.ACCEPTED


def _judge_anchor(policy: PolicyLineage, anchor: AnchorAdded) -> Verdict:
    """Rule 7: it counts only in its epoch."""
    if anchor.epoch != policy.epoch:
        return Verdict.STALE_EPOCH
    version = policy.versions.get(anchor.version)
    if version is None:
        return Verdict.VERSION_UNKNOWN
    if version.retired is not None:
        return Verdict.VERSION_UNUSABLE
    if version.kind is Kind.FULL or version.anchor is not None:
        return Verdict.NOTHING_TO_DO
    same = anchor.manifest.weights_digest == version.manifest.weights_digest
    return Verdict.ACCEPTED if same else Verdict.WEIGHTS_DIFFER


def _judge_move(policy: PolicyLineage, move: ChannelMoved) -> Verdict:
    """Rule 6."""
    if move.channel == LATEST:
        return Verdict.CHANNEL_NOT_MOVABLE
    channel = policy.channels.get(move.channel)
    if move.expected_sequence != (channel.sequence if channel else 0):
        return Verdict.STALE_SEQUENCE
    return Verdict.ACCEPTED if policy.eligible(move.target) else Verdict.VERSION_UNUSABLE


def _judge_retirement(policy: PolicyLineage, retirement: VersionRetired) -> Verdict:
    """Rule 7."""
    version = policy.versions.get(retirement.version)
    if version is None:
        return Verdict.VERSION_UNKNOWN
    if version.retired is not None:
        return Verdict.NOTHING_TO_DO
    return Verdict.VERSION_NEEDED if needed(policy, retirement.version) else Verdict.ACCEPTED


def needed(policy: PolicyLineage, ref: RunVersion) -> bool:
    """Whether a channel, the tip, or another unretired version needs the version's bytes.

    Direct links suffice: what an unretired version is built on is never retired, so a longer chain shows at its first link.
    """
    return ref == policy.tip or ref in policy.dependents or any(channel.target == ref for channel in policy.channels.values())


# --- the changes: the decision counts ---------------------------------------------------------------------------------------


def _take(policy: PolicyLineage, decision: Decision, at: Position) -> PolicyLineage:
    match decision:
        case RunClaimed():
            return _take_claim(policy, decision, at)
        case VersionPublished():
            return _take_publication(policy, decision, at)
        case AnchorAdded():
            return _take_anchor(policy, decision, at)
        case ChannelMoved():
            return _move(policy, decision.channel, decision.target, decision.event_id, at)
        case VersionQuarantined():
            return _take_quarantine(policy, decision, at)
        case VersionRetired():
            link = policy.versions[decision.version].link
            return _with(_change(policy, decision.version, retired=at), dependents=counted(policy.dependents, link, -1))
        case FormatRaised():
            raise AssertionError("of the namespace, not of a policy")


def _change(policy: PolicyLineage, ref: RunVersion, **fields: object) -> PolicyLineage:
    version = replace(policy.versions[ref], **fields)  # type: ignore[arg-type]  # the callers name fields of Version
    return replace(policy, versions=policy.versions.set(ref, version))


def _move(policy: PolicyLineage, name: ChannelName, target: RunVersion | None, source: EventId, at: Position) -> PolicyLineage:
    old = policy.channels.get(name)
    history = old.history if old else ()
    if old and old.target is not None and old.target != target:
        history = (*history, old.target)[-CHANNEL_HISTORY:]
    channel = _channel(
        sequence=Sequence((old.sequence if old else 0) + 1), target=target, history=history, source=source, position=at
    )
    return _with(policy, channels=policy.channels.set(name, channel))


def _take_claim(policy: PolicyLineage, claim: RunClaimed, at: Position) -> PolicyLineage:
    epoch = Epoch(policy.epoch + 1)
    boot = None if claim.boot is None else RunVersion(run=claim.run, number=claim.boot)
    runs = policy.runs
    if policy.owner is not None and policy.owner.run != claim.run:
        runs = runs.set(policy.owner.run, replace(runs[policy.owner.run], superseded=True))
    runs = runs.set(claim.run, runs.get(claim.run, Run()))
    versions = policy.versions
    if boot is not None and boot not in versions:
        versions = versions.set(boot, _boot_version(policy, claim, boot, epoch, at))
        runs = runs.set(claim.run, replace(runs[claim.run], greatest=boot.number))
    elif boot is not None:
        for beyond in policy.path(policy.tip):
            if beyond.ref == boot:
                break
            versions = versions.set(beyond.ref, replace(beyond, abandoned=True))
    owner = Claim(run=claim.run, writer=claim.writer, epoch=epoch, event_id=claim.event_id, position=at)
    dependents = counted(policy.dependents, claim.alias, 1)
    after = replace(policy, head=claim.event_id, owner=owner, tip=boot, runs=runs, versions=versions, dependents=dependents)
    return _move(after, LATEST, after.latest_target(), claim.event_id, at)


def _boot_version(policy: PolicyLineage, claim: RunClaimed, boot: RunVersion, epoch: Epoch, at: Position) -> Version:
    """The version that a new run begins with: another's under a number of its own, or a base checkpoint."""
    source = policy.versions[claim.alias] if claim.alias is not None else None
    manifest = source.manifest if source else claim.base
    assert manifest is not None
    return Version(
        ref=boot,
        parent=source.parent if source else None,
        kind=source.kind if source else Kind.FULL,
        base=source.base if source else None,
        alias_of=source.ref if source else None,
        manifest=manifest,
        size=0,
        epoch=epoch,
        event_id=claim.event_id,
        writer=claim.writer,
        position=at,
    )


def _take_publication(policy: PolicyLineage, published: VersionPublished, at: Position) -> PolicyLineage:
    ref = _ref(run=published.run, number=published.number)
    version = _version(
        ref=ref,
        parent=policy.tip,
        kind=published.kind,
        base=published.base,
        alias_of=None,
        manifest=published.manifest,
        size=published.size,
        epoch=published.epoch,
        event_id=published.event_id,
        writer=published.writer,
        position=at,
    )
    run = policy.runs[published.run]
    after = _with(
        policy,
        head=published.event_id,
        tip=ref,
        versions=policy.versions.set(ref, version),
        dependents=counted(policy.dependents, published.base, 1),
        runs=policy.runs.set(published.run, _run(greatest=ref.number, superseded=run.superseded)),
    )
    # The newest version is the tip, and nobody can have quarantined or retired it yet.
    return _move(after, LATEST, ref, published.event_id, at)


def _take_anchor(policy: PolicyLineage, added: AnchorAdded, at: Position) -> PolicyLineage:
    """Rule 5: pointers carry the nearest anchor, so the channels that build on the version have a new decision behind them.

    Without it no pointer would be written again, and who knows the pointer alone would look for the old anchor, which may go.
    """
    channels = policy.channels
    for name, channel in policy.channels.items():
        if channel.target is not None and any(v.ref == added.version for v in policy.chain(channel.target)):
            channels = channels.set(name, replace(channel, source=added.event_id, position=at))
    after = _change(policy, added.version, anchor=added.manifest, anchor_size=added.size)
    return replace(after, channels=channels, dependents=counted(policy.dependents, policy.versions[added.version].link, -1))


def _take_quarantine(policy: PolicyLineage, quarantine: VersionQuarantined, at: Position) -> PolicyLineage:
    """Rule 6: every channel that names the version goes back to its newest earlier target that is still eligible.

    The weights are what is bad, so the versions that it is an alias of are quarantined with it.
    """
    after = policy
    bad: RunVersion | None = quarantine.version
    while bad is not None:
        after = _change(after, bad, quarantined=True)
        bad = policy.versions[bad].alias_of
    for name, channel in sorted(policy.channels.items()):
        if channel.target is None or after.eligible(channel.target):
            continue
        if name == LATEST:
            target = after.latest_target()
        else:
            target = next((t for t in reversed(channel.history) if after.eligible(t)), None)
        after = _move(after, name, target, quarantine.event_id, at)
    return after
