"""Compaction: full forms of versions whose chains are long, added without a trainer.

A version is staged as a replica would stage it, verified tensor by tensor, and uploaded as a full checkpoint under its own number
and the present epoch; then AnchorAdded says that it is there. Whoever dies in between leaves bytes of an open epoch, which nobody
deletes before that epoch is over, and a later run uploads the same ones to the same keys.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from stitch.core.anchors import AnchorRule, source_of
from stitch.core.errors import Unavailable, VersionGone
from stitch.core.events import AnchorAdded, RunVersion
from stitch.core.ids import Epoch, WriterId
from stitch.core.lineage import PolicyLineage, Verdict, Version
from stitch.core.manifest import Codec, Kind, Manifest, StoredFile
from stitch.log.views import new_event_id
from stitch.operators.ledger import Ledger
from stitch.operators.versions import added_anchors
from stitch.store.manifests import attempt_prefix, object_key, read_manifest, write_manifest
from stitch.store.port import BlobStore, Cancelled, Receipt
from stitch.weights.safetensors import open_checkpoint
from stitch.weights.staging import Staging

CLAIM_TRIES: Final = 3
"""Uploads of one version that a claim may make stale; whoever claims more often than a model is uploaded is not to be outrun."""
UPLOAD_THREADS: Final = 8

Progress = Callable[[str, int, int], None]
"""Told what is being done, and bytes of how many; 0 of 0 where that is not known."""
T = TypeVar("T")


def silent(step: str, done: int, total: int) -> None:
    """Listens to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What a joiner needs for a version: so many deltas, and bytes of them and of the full form at their end, as far as known."""

    ref: RunVersion
    deltas: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
    """A version that has a full form now. `before` is the chain that it had."""

    before: Chain
    size: int
    manifest_key: str


@dataclass(slots=True, kw_only=True)
class Report:
    """What a run did; of a dry run, `planned` is what one would do. `skipped` has a reason for each version that needed nothing."""

    policy: str
    dry_run: bool
    planned: tuple[Chain, ...] = ()
    anchored: list[Anchored] = field(default_factory=list)
    skipped: list[tuple[RunVersion, str]] = field(default_factory=list)


class Compactor:
    """Of one policy. `workdir` takes a staged model, perhaps two. `run` raises CorruptObject where a version's bytes are not what
    they must be, Unavailable, OutcomeUnknown; what was anchored before stays so, and another run goes on."""

    def __init__(
        self,
        ledger: Ledger,
        store: BlobStore,
        workdir: Path,
        *,
        writer: WriterId,
        rule: AnchorRule | None = None,
        progress: Progress = silent,
    ) -> None:
        self._ledger, self._store, self._workdir, self._writer = ledger, store, workdir, writer
        self._rule, self._progress = rule or AnchorRule(), progress

    async def run(self, wanted: Sequence[RunVersion] = (), *, dry_run: bool = False) -> Report:
        """Anchors the wanted versions; where none is given, those whose chains the rule finds too long or too heavy."""
        policy = await self._ledger.read_on()
        report = Report(policy=policy.policy, dry_run=dry_run)
        refs = [source_of(policy, policy.versions[ref]).ref for ref in wanted] or self._rule.overdue(policy)
        refs = sorted(dict.fromkeys(refs), key=lambda ref: policy.versions[ref].position.offset)  # each stages on the one before
        todo = []
        for ref in refs:
            reason = _has_full_form(policy.versions[ref])
            if reason is None:
                todo.append(ref)
            else:
                report.skipped.append((ref, reason))
        report.planned = tuple(chain_of(policy, ref) for ref in todo)
        if not dry_run and todo:
            with Staging(self._workdir, self._store) as staging:
                for ref in todo:
                    await self._anchor(ref, staging, report)
        return report

    async def _anchor(self, ref: RunVersion, staging: Staging, report: Report) -> None:
        path: Path | None = None
        for _ in range(CLAIM_TRIES):
            policy = await self._ledger.read_on()
            version = _present(policy, ref)
            if (reason := _has_full_form(version)) is not None:
                report.skipped.append((ref, reason))
                return
            if path is None:
                path = await self._stage(policy, version, staging)
            before = chain_of(policy, ref)
            event = await self._upload(policy, version, path)
            self._progress(f"{ref}: deciding", 0, 0)
            verdict = await self._ledger.settle(event)
            if verdict is Verdict.ACCEPTED:
                report.anchored.append(Anchored(before=before, size=event.size, manifest_key=event.manifest.key))
                await self._ledger.write_pointers()
                return
            if verdict is not Verdict.STALE_EPOCH:
                report.skipped.append((ref, f"the anchor was refused: {verdict.value}"))
                return
            # A trainer claimed meanwhile; the bytes lie under an epoch that is over, where the collector finds them.
        raise Unavailable(f"{ref}: trainers claimed the policy {CLAIM_TRIES} times while it was uploaded; run this again later")

    async def _stage(self, policy: PolicyLineage, version: Version, staging: Staging) -> Path:
        cancelled = threading.Event()

        def stage() -> Path:
            staged = staging.stage(
                version.ref.of(policy.policy),
                version.manifest,
                anchors=added_anchors(policy, version.ref),
                progress=partial(self._progress, f"{version.ref}: downloading"),
                cancelled=cancelled.is_set,
            )
            return staged.path

        return await _in_thread(stage, cancelled)

    async def _upload(self, policy: PolicyLineage, version: Version, path: Path) -> AnchorAdded:
        """The decision to append, once all that it names is durable."""
        self._progress(f"{version.ref}: uploading", 0, 0)
        cancelled = threading.Event()
        manifest = await _in_thread(partial(self._upload_now, version, policy.epoch, path, cancelled.is_set), cancelled)
        ref = await asyncio.to_thread(write_manifest, self._store, manifest)
        return AnchorAdded(
            policy=policy.policy,
            version=version.ref,
            event_id=new_event_id(),
            writer=self._writer,
            epoch=policy.epoch,
            manifest=ref,
            size=sum(file.size for file in (*manifest.weights, *manifest.files)),
        )

    def _upload_now(self, version: Version, epoch: Epoch, path: Path, cancelled: Cancelled) -> Manifest:
        """The full form's manifest, which names objects of its own attempt alone: what its base shares may go with the base."""
        delta = read_manifest(self._store, version.manifest)
        prefix = attempt_prefix(delta.policy, version.ref.run, version.ref.number, epoch)
        with open_checkpoint(path) as checkpoint:
            names = [*checkpoint.weights]
        count = len(names)
        names += [file.path for file in delta.files]

        def put(name: str) -> Receipt:
            return self._store.put_named(partial(object_key, prefix), path / name, cancelled=cancelled)

        with ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="stitch-compact") as pool:
            receipts = list(pool.map(put, names))
        stored = tuple(
            StoredFile(path=name, key=receipt.key, size=receipt.size, blake3=receipt.blake3)
            for name, receipt in zip(names, receipts, strict=True)
        )
        return Manifest(
            policy=delta.policy,
            run=version.ref.run,
            number=version.ref.number,
            epoch=epoch,
            kind=Kind.FULL,
            codec=Codec.SAFETENSORS,
            parent=delta.parent,
            base=None,
            tensors=delta.tensors,
            weights_digest=delta.weights_digest,
            weights=stored[:count],
            files=stored[count:],
            probes=delta.probes,
            metadata=delta.metadata,
        )


def chain_of(policy: PolicyLineage, ref: RunVersion) -> Chain:
    """What a joiner needs for the version now."""
    *below, bottom = policy.chain(ref)
    deltas = [version for version in below if version.alias_of is None]
    full = bottom.anchor_size if bottom.anchor is not None else bottom.size
    return Chain(ref=ref, deltas=len(deltas), size=full + sum(version.size for version in deltas))


def _has_full_form(version: Version) -> str | None:
    if version.kind is Kind.FULL:
        return "a full checkpoint already"
    return None if version.anchor is None else "anchored already"


def _present(policy: PolicyLineage, ref: RunVersion) -> Version:
    version = policy.versions[ref]
    if version.retired is not None:
        raise VersionGone(f"{ref} was retired at offset {version.retired.offset} meanwhile")
    return version


async def _in_thread(work: Callable[[], T], cancelled: threading.Event | None = None) -> T:
    """A thread cannot be ended from outside: where the caller is cancelled, it is told so, and waited for."""
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled.set()
        await asyncio.wait({task})
        task.exception()
        raise
