"""Publishing, as coroutines of one event loop: claim, then for each version bytes, manifest, event, pointers.

Every rule about what counts is in `stitch.core.writer` and the fold; here is only the order of the steps. Nothing is ever
deleted: bytes of an attempt that failed may belong to a decision that still lands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stitch.core.anchors import AnchorRule
from stitch.core.errors import CorruptObject, InvalidRequest, Unavailable, VersionConflict
from stitch.core.events import RunVersion, VersionPublished
from stitch.core.ids import Digest, PolicyId, RunId, VersionNumber, VersionRef, WriterId
from stitch.core.lineage import PolicyLineage, Version
from stitch.core.manifest import BaseRef, Kind, Manifest, ManifestRef
from stitch.core.writer import (
    BaseOffer,
    Candidate,
    Fate,
    Opening,
    Session,
    already_published,
    check_owned,
    plan_claim,
    plan_publication,
)
from stitch.log.views import new_event_id
from stitch.store.manifests import attempt_prefix, base_prefix
from stitch.trainer.attempt import Attempt, Step, pauses
from stitch.trainer.blobs import Blobs
from stitch.trainer.decisions import Decisions
from stitch.trainer.parts import Content, Ready, Receipts, Standing
from stitch.weights.encode import Encoded, LocalFile

ANCHORS: Final = AnchorRule()
CLAIM_AGAIN_SECONDS: Final = (0.05, 2.0)
"""First and longest pause after a claim was beaten: long enough for another opener to finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """An accepted version. `bytes_written` is what its own files weigh, `offset` where the log holds the decision."""

    ref: VersionRef
    kind: Kind
    manifest_key: str
    weights_digest: Digest
    bytes_written: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the next version builds on. `tip_manifest` is that of `tip`, `base_manifest` that of `base`."""

    number: VersionNumber
    tip: Version | None
    tip_manifest: Manifest | None
    full: bool
    base: Version | None
    """What is needed to read what is given: of a delta its base; of a version that is there, where the change to it is given,
    that version."""
    base_manifest: Manifest | None
    retried: Version | None
    """What an earlier call left undecided and this one found to be accepted, unless another number is asked for."""
    settled: bool = False
    """Whether only the weights' digest is still of interest: the number is taken, or the claim was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What a trainer adds to a version: its own metadata, and prompts with expected log-probabilities."""

    metadata: Mapping[str, Any]
    probes: Sequence[Mapping[str, Any]]


class Author:
    """The right to publish, and its use. One call at a time."""

    def __init__(self, decisions: Decisions, blobs: Blobs, policy: PolicyId, run: RunId, writer: WriterId) -> None:
        self._decisions, self._blobs = decisions, blobs
        self.policy: Final = policy
        self.run: Final = run
        self.writer: Final = writer
        self._session: Session | None = None
        self._known: tuple[ManifestRef, Manifest] | None = None
        """The manifest that was written last: mostly the tip's."""

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    @property
    def lineage(self) -> PolicyLineage:
        """As far as it was read."""
        return self._decisions.policy

    # --- claim ---

    async def open(self, opening: Opening, encoded_base: Encoded | None, attempt: Attempt) -> None:
        """Claims, and on a new head again, until a claim counts. Raises Fenced or VersionConflict where none can."""
        waits = pauses(*CLAIM_AGAIN_SECONDS)
        policy = await self._decisions.read_on(attempt)
        plan_claim(policy, opening, new_event_id())  # refuses what is hopeless before a base is uploaded
        if encoded_base is not None and opening.base is not None and policy.greatest(opening.run) is None:
            opening = await self._upload_base(opening, opening.base.number, encoded_base, attempt)
        while True:
            claim = plan_claim(policy, opening, new_event_id())
            if await self._decisions.settle(claim, attempt) is Fate.ACCEPTED:
                break
            if attempt.expired:
                raise Unavailable(f"run {opening.run}: every claim within {attempt.timeout:g} s was beaten by another writer")
            await asyncio.sleep(min(attempt.remaining, next(waits)))
            policy = await self._decisions.read_on(attempt)
        self._session = self._decisions.session
        attempt.report(Step.ACCEPTED)
        await self._decisions.write_pointers()
        attempt.report(Step.DONE)

    async def _upload_base(self, opening: Opening, number: VersionNumber, encoded: Encoded, attempt: Attempt) -> Opening:
        prefix = base_prefix(self.policy, self.run, number, encoded.weights_digest)
        attempt.report(Step.ENCODED)
        stored = await self._blobs.upload(prefix, (*encoded.weights, *encoded.files), attempt)
        manifest = Manifest(
            policy=self.policy,
            run=self.run,
            number=number,
            epoch=None,
            kind=Kind.FULL,
            codec=encoded.codec,
            parent=None,
            base=None,
            tensors=encoded.tensors,
            weights_digest=encoded.weights_digest,
            weights=stored[: len(encoded.weights)],
            files=stored[len(encoded.weights) :],
        )
        ref = await self._write_manifest(manifest, None, attempt)
        return replace(opening, base=BaseOffer(number=number, manifest=ref))

    # --- publish ---

    async def prepare(self, ready: Ready, attempt: Attempt) -> Plan:
        """Settles what an earlier call left undecided, then plans. Raises Fenced and VersionConflict before any work is done,
        InvalidRequest for a delta directory that is not against the tip."""
        number = ready.number
        retried = await self._settle_earlier(attempt)
        retried = retried if retried is not None and number in (None, retried.ref.number) else None
        policy = await self._decisions.read_on(attempt)
        if retried is not None and policy.epoch != self.session.epoch:
            # An accepted version is never reported as Fenced: first it is found out whether these are its weights.
            return await self._settled(retried.ref.number, retried, ready, attempt, retried=retried)
        check_owned(policy, self.session)
        wanted = next_number(policy, self.run) if number is None else number
        known = policy.versions.get(RunVersion(run=self.run, number=wanted))
        if known is not None:
            return await self._settled(wanted, known, ready, attempt, retried=retried)
        already_published(policy, self.session, wanted, Digest(""))
        tip = policy.versions[policy.tip] if policy.tip is not None else None
        if ready.against is not None:
            _check_against(ready.against, tip, self.run)
        if tip is None and ready.kind is Kind.DELTA:
            raise InvalidRequest(f"kind: run {self.run} has no version yet that a delta could be against", field="kind")
        full = tip is None or ready.kind is Kind.FULL
        if tip is not None and ready.kind is None:
            full = ready.doubted or ANCHORS.wants_after(policy, tip.ref)
        manifest = None if tip is None else await self._manifest_of(tip, attempt)
        needs_base = not full or ready.against is not None
        return Plan(
            number=wanted,
            tip=tip,
            tip_manifest=manifest,
            full=full,
            base=tip if needs_base else None,
            base_manifest=manifest if needs_base else None,
            retried=retried,
        )

    async def _settled(
        self, number: VersionNumber, version: Version, ready: Ready, attempt: Attempt, *, retried: Version | None
    ) -> Plan:
        """The version is there. A change is held against its bytes, whole weights against its digest."""
        manifest = None
        if ready.against is not None:
            manifest = await self._manifest_of(version, attempt)
            if manifest.base is not None and manifest.base.number != ready.against:
                raise VersionConflict(
                    f"version {number} of run {self.run} was published against {manifest.base.number}, "
                    f"and this directory is against {ready.against}"
                )
        return Plan(
            number=number,
            tip=None,
            tip_manifest=None,
            full=True,
            base=None if manifest is None else version,
            base_manifest=manifest,
            retried=retried,
            settled=True,
        )

    def prefix(self, plan: Plan) -> str:
        """What the keys of the version's objects begin with."""
        return attempt_prefix(self.policy, self.run, plan.number, self.session.epoch)

    @property
    def tip_weights(self) -> Digest | None:
        """The weights digest of the policy's tip."""
        tip = self.lineage.tip
        return None if tip is None else self.lineage.versions[tip].manifest.weights_digest

    def anchors(self, plan: Plan) -> tuple[ManifestRef, ...]:
        """Full forms that were added to versions below the base."""
        if plan.base is None:
            return ()
        return tuple(version.anchor for version in self.lineage.chain(plan.base.ref) if version.anchor is not None)

    def present(self, plan: Plan, weights: Digest) -> Publication | None:
        """The publication of these weights under this number, if there is one. Raises Fenced and VersionConflict."""
        if plan.retried is not None and plan.retried.manifest.weights_digest == weights:
            return self._publication(plan.retried)
        check_owned(self.lineage, self.session)
        present = already_published(self.lineage, self.session, plan.number, weights)
        return None if present is None else self._publication(present)

    async def carried(self, plan: Plan, given: tuple[LocalFile, ...], attempt: Attempt) -> tuple[LocalFile, ...]:
        """What goes along with the weights: what was given with them, else what went along with the version before."""
        if given or plan.tip_manifest is None:
            return given
        return await self._blobs.carried(plan.tip_manifest, attempt)

    async def commit(self, plan: Plan, content: Content, stored: Receipts, notes: Notes, attempt: Attempt) -> Publication:
        """Describes what was uploaded and decides. On return the version is durable and accepted."""
        manifest = self._describe(plan, content, stored, notes)
        base = None if manifest.base is None else plan.tip_manifest
        ref = await self._write_manifest(manifest, base, attempt)
        candidate = Candidate(
            number=plan.number,
            kind=manifest.kind,
            base=None if manifest.base is None else RunVersion(run=manifest.base.run, number=manifest.base.number),
            parent=manifest.parent,
            manifest=ref,
            size=sum(file.size for file in (*manifest.weights, *manifest.files)),
        )
        return await self._decide(candidate, attempt)

    def standing(self) -> Standing:
        """As far as the log was read."""
        tip = self.lineage.tip
        return Standing(
            writer=self.writer,
            epoch=self.session.epoch,
            head=None if tip is None else tip.of(self.policy),
            next_number=next_number(self.lineage, self.run),
        )

    async def _decide(self, candidate: Candidate, attempt: Attempt) -> Publication:
        policy = await self._decisions.read_on(attempt)
        event = plan_publication(policy, self.session, candidate, new_event_id())
        if await self._decisions.settle(event, attempt) is Fate.REFUSED:
            check_owned(self.lineage, self.session)
            why = self.lineage.verdicts.get(event.event_id)
            raise VersionConflict(f"version {event.number} of run {self.run} was refused: {why}")
        version = self._version_of(event)
        attempt.report(Step.ACCEPTED)
        await self._decisions.write_pointers()
        attempt.report(Step.DONE)
        return self._publication(version)

    async def _settle_earlier(self, attempt: Attempt) -> Version | None:
        """The version that an earlier call left undecided, if it was accepted."""
        earlier = self._decisions.unsettled
        if not isinstance(earlier, VersionPublished) or await self._decisions.settle(earlier, attempt) is Fate.REFUSED:
            return None
        await self._decisions.write_pointers()
        return self._version_of(earlier)

    def _describe(self, plan: Plan, content: Content, stored: Receipts, notes: Notes) -> Manifest:
        """The manifest, once all that it names is durable."""
        base = None
        if content.kind is Kind.DELTA:
            assert plan.tip is not None
            base = BaseRef(run=plan.tip.ref.run, number=plan.tip.ref.number, manifest=plan.tip.manifest)
        return Manifest(
            policy=self.policy,
            run=self.run,
            number=plan.number,
            epoch=self.session.epoch,
            kind=content.kind,
            codec=content.codec,
            parent=None if plan.tip is None else plan.tip.ref.number,
            base=base,
            tensors=content.tensors,
            weights_digest=content.weights_digest,
            weights=stored.weights,
            files=stored.files,
            probes=tuple(notes.probes),
            metadata=notes.metadata,
        )

    async def _write_manifest(self, manifest: Manifest, base: Manifest | None, attempt: Attempt) -> ManifestRef:
        ref = await self._blobs.write_manifest(manifest, base, attempt)
        self._known = (ref, manifest)
        attempt.report(Step.DESCRIBED)
        return ref

    async def _manifest_of(self, version: Version, attempt: Attempt) -> Manifest:
        if self._known is None or self._known[0] != version.manifest:
            try:
                self._known = (version.manifest, await self._blobs.read_manifest(version.manifest, attempt))
            except CorruptObject as error:
                raise CorruptObject(f"{version.ref}, on which the next version builds: {error}") from error
        return self._known[1]

    def _version_of(self, event: VersionPublished) -> Version:
        return self.lineage.versions[RunVersion(run=event.run, number=event.number)]

    def _publication(self, version: Version) -> Publication:
        return Publication(
            ref=version.ref.of(self.policy),
            kind=version.kind,
            manifest_key=version.manifest.key,
            weights_digest=version.manifest.weights_digest,
            bytes_written=version.size,
            offset=version.position.offset,
        )


def _check_against(base: int, tip: Version | None, run: RunId) -> None:
    """A delta directory counts only against the version that it was made against."""
    if tip is None or (tip.ref.run, tip.ref.number) != (run, base):
        where = "has no version yet" if tip is None else f"stands at {tip.ref}"
        raise InvalidRequest(
            f"weights: the directory holds a delta against version {base}, and run {run} {where}; publish the versions in "
            f"between first, or a full checkpoint (kind='full' of all tensors)",
            field="weights",
        )


def next_number(policy: PolicyLineage, run: RunId) -> VersionNumber:
    """One above the greatest that was ever accepted in the run; 0 where none was."""
    greatest = policy.greatest(run)
    return VersionNumber(0 if greatest is None else greatest + 1)
