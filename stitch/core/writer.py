"""What a writer decides: which claim or publication to append next, and what became of the one that it appended.

Pure, and the same code in the publisher and in the exhaustive check of the protocol. A writer appends one decision at a time.
While its fate is open it appends the same decision again, and nothing else; the first copy that any reader meets decides for
good.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from stitch.core.errors import Fenced, VersionConflict
from stitch.core.events import RunClaimed, RunVersion, VersionPublished
from stitch.core.ids import Epoch, EventId, PolicyId, RunId, VersionNumber, WriterId
from stitch.core.lineage import Claim, PolicyLineage, Verdict, Version
from stitch.core.manifest import Kind, ManifestRef


class Fate(StrEnum):
    """What became of an appended decision, as far as the lineage tells."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    OPEN = "open"
    """It may still land, or never: append the same decision again and read on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseOffer:
    """A base checkpoint that a writer brings to a new run: the version number that it shall have, and its manifest."""

    number: VersionNumber
    manifest: ManifestRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a writer wants to open.

    `boot` is the version of the run to go on from, None for its tip. A run without versions may begin with a `base` checkpoint
    or with an `alias` of another run's version, which gets the number `boot` (0 where that is None).
    """

    policy: PolicyId
    run: RunId
    writer: WriterId
    boot: VersionNumber | None = None
    base: BaseOffer | None = None
    alias: RunVersion | None = None
    take_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A claim that was accepted: the right to publish, until another claim is."""

    policy: PolicyId
    run: RunId
    writer: WriterId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A version whose bytes and manifest are durable."""

    number: VersionNumber
    kind: Kind
    base: RunVersion | None
    parent: VersionNumber | None
    manifest: ManifestRef
    size: int


def fate(policy: PolicyLineage, decision: RunClaimed | VersionPublished) -> Fate:
    """First whether this very decision was judged, then whether the head moved on without it.

    The second is a definite no as well: ids are unique, so a head that was left never returns. `policy` is the lineage that the
    decision was planned on, or a later one; to an earlier one its head is as unknown as one that was left.
    """
    verdict = policy.verdicts.get(decision.event_id)
    if verdict is not None:
        return Fate.ACCEPTED if verdict is Verdict.ACCEPTED else Fate.REFUSED
    return Fate.OPEN if policy.head == decision.expected_head else Fate.REFUSED


def plan_claim(policy: PolicyLineage, opening: Opening, event_id: EventId) -> RunClaimed:
    """The claim to append on the present head. Raises Fenced or VersionConflict where none would count or is meant."""
    owner = policy.owner
    run = policy.runs.get(opening.run)
    if run is not None and run.superseded:
        raise Fenced(f"run {opening.run} was superseded: {_owned(owner)}; open a new run")
    if owner is not None and owner.run != opening.run and not opening.take_over:
        raise Fenced(f"policy {policy.policy} is owned: {_owned(owner)}; pass take_over=True to open run {opening.run} instead")
    if run is None or run.greatest is None:
        boot, alias, base = _boot_of_new_run(policy, opening)
    else:
        boot, alias, base = _boot_of_known_run(policy, opening), None, None
    return RunClaimed(
        policy=opening.policy,
        run=opening.run,
        event_id=event_id,
        writer=opening.writer,
        expected_head=policy.head,
        boot=boot,
        alias=alias,
        base=base,
    )


def session_of(claim: RunClaimed, policy: PolicyLineage) -> Session | None:
    """The session that an accepted claim began; None where another claim was accepted since."""
    owner = policy.owner
    if owner is None or owner.event_id != claim.event_id:
        return None
    return Session(policy=claim.policy, run=claim.run, writer=claim.writer, epoch=owner.epoch)


def check_owned(policy: PolicyLineage, session: Session) -> None:
    """Raises Fenced where another claim was accepted since the session's own."""
    owner = policy.owner
    if owner is None or owner.epoch != session.epoch or owner.writer != session.writer:
        raise Fenced(f"run {session.run} of policy {session.policy} lost its claim: {_owned(owner)}")


def already_published(policy: PolicyLineage, session: Session, number: VersionNumber, weights: str) -> Version | None:
    """The living version of that number, where it has the same weights.

    Raises VersionConflict where the number has other weights or is not above every accepted one of the run.
    """
    version = policy.versions.get(RunVersion(run=session.run, number=number))
    greatest = policy.greatest(session.run)
    if version is None:
        if greatest is not None and number <= greatest:
            raise VersionConflict(
                f"version {number} of run {session.run} comes too late: {greatest} was accepted; use {greatest + 1} or more"
            )
        return None
    if version.manifest.weights_digest != weights:
        raise VersionConflict(
            f"version {number} of run {session.run} was published with other weights, and a number is never used twice;"
            f" use {(greatest or 0) + 1}"
        )
    if not policy.living(version.ref):
        raise VersionConflict(
            f"version {number} of run {session.run} was abandoned or retired; publish it as {(greatest or 0) + 1}"
        )
    return version


def plan_publication(policy: PolicyLineage, session: Session, candidate: Candidate, event_id: EventId) -> VersionPublished:
    """The publication to append on the present head. Raises Fenced or VersionConflict where it could not be accepted."""
    check_owned(policy, session)
    greatest = policy.greatest(session.run)
    if greatest is not None and candidate.number <= greatest:
        raise VersionConflict(f"version {candidate.number} of run {session.run} is not above {greatest}, which was accepted")
    assert policy.head is not None
    return VersionPublished(
        policy=session.policy,
        run=session.run,
        number=candidate.number,
        event_id=event_id,
        writer=session.writer,
        epoch=session.epoch,
        expected_head=policy.head,
        parent=candidate.parent,
        kind=candidate.kind,
        base=candidate.base,
        manifest=candidate.manifest,
        size=candidate.size,
    )


def _boot_of_known_run(policy: PolicyLineage, opening: Opening) -> VersionNumber | None:
    if opening.base is not None:
        _check_base(policy, opening.run, opening.base)
    boot = opening.boot
    if boot is None:
        return policy.tip.number if policy.tip is not None else None
    ref = RunVersion(run=opening.run, number=boot)
    if not policy.living(ref):
        why = "was never accepted" if ref not in policy.versions else "was abandoned or retired"
        raise VersionConflict(f"boot version {boot} of run {opening.run} {why}; the tip is {policy.tip}")
    return boot


def _check_base(policy: PolicyLineage, run: RunId, base: BaseOffer) -> None:
    """A base counts only where the run has no version yet; afterwards it must be the one that is there."""
    known = policy.versions.get(RunVersion(run=run, number=base.number))
    if known is None:
        raise VersionConflict(f"base: run {run} has versions already, and {base.number} is none of them; leave base out to go on")
    if known.manifest.weights_digest != base.manifest.weights_digest:
        raise VersionConflict(f"base: version {base.number} of run {run} has other weights; open a new run for this base")


def _boot_of_new_run(policy: PolicyLineage, opening: Opening) -> tuple[VersionNumber | None, RunVersion | None, ManifestRef | None]:
    if opening.alias is not None:
        source = policy.versions.get(opening.alias)
        if source is None or source.retired is not None:
            raise VersionConflict(f"boot version {opening.alias} {'is unknown' if source is None else 'was retired'}")
        return opening.boot or VersionNumber(0), opening.alias, None
    if opening.base is not None:
        return opening.base.number, None, opening.base.manifest
    if opening.boot is not None:
        raise VersionConflict(f"boot version {opening.boot}: run {opening.run} has no version yet; give a base, or leave it out")
    return None, None, None


def _owned(owner: Claim | None) -> str:
    if owner is None:
        return "nobody owns it"
    since = datetime.fromtimestamp(owner.position.time_ms / 1000, UTC).isoformat(timespec="seconds")
    return f"writer {owner.writer} owns it with run {owner.run} since {since}"
