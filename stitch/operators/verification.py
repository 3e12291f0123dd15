"""Whether the bytes of versions are there and right: what `stitch verify` finds out.

Two depths. The shallow one asks the store about every manifest and object: there, and of the right size. The deep one reads every
object, and brings each version that was asked for to a scratch folder as a replica would, so that every tensor is held against its
state digest and all of them against the weights digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from stitch.core.errors import CorruptObject
from stitch.core.events import RunVersion
from stitch.core.lineage import PolicyLineage, Version
from stitch.core.manifest import Manifest, ManifestRef, StoredFile
from stitch.operators.versions import added_anchors, with_chains
from stitch.operators.watched import Watched
from stitch.store.manifests import read_manifest, receipt, verify_version
from stitch.store.port import BlobStore
from stitch.store.scratch import scratch_folder
from stitch.weights.staging import Staging, StagingCancelled

LOOKS_AT_ONCE: Final = 16
"""Questions to the store: each is small, and a bucket answers hundreds a second."""
READS_AT_ONCE: Final = 4
"""Objects that are read for their digests alone. Each lies on the scratch disk for that long."""
CHECK_EVERY_S: Final = 0.2
"""Between two looks at whether to stop."""

Tell = Callable[[str], None]
"""Told what is being done now, for people."""
Cancelled = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a version. `file` is a path in its checkpoint, None where it is not the fault of one file."""

    what: str
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One version. `asked`: named by the operator, rather than needed by one that was. `objects` and `bytes` are those of all its
    forms. `tensors` were brought and verified; None where that was not tried, or failed."""

    version: Version
    asked: bool
    objects: int
    bytes: int
    faults: tuple[Fault, ...]
    tensors: int | None

    @property
    def ok(self) -> bool:
        return not self.faults


def verify_versions(
    store: BlobStore,
    policy: PolicyLineage,
    asked: Sequence[Version],
    *,
    deep: bool = False,
    chain: bool = True,
    scratch: Path | None = None,
    tell: Tell = lambda what: None,
    cancelled: Cancelled = lambda: False,
) -> tuple[Checked, ...]:
    """Checks the versions, and with `chain` all that they are built from; oldest first. What is wrong is in the result.

    `deep` reads each object once, and needs about the size of the greatest version in the folder `scratch` (default: the system's
    for such). Raises Unavailable, NotEnoughSpace, StagingCancelled.
    """
    watched = store if isinstance(store, Watched) else Watched(store)
    named = {version.ref for version in asked}
    members = with_chains(policy, asked) if chain else tuple(asked)
    work = _Verification(watched, policy, [_Member(version=v, asked=v.ref in named) for v in members], cancelled)
    tell(f"looking at {len(members)} version{'s' if len(members) != 1 else ''}")
    work.look()
    if deep:
        with scratch_folder("verify", scratch) as folder:
            work.bring(folder / "staging", tell)
            tell("reading what no version was brought by")
            work.read_rest(folder)
    return work.result()


@dataclass(slots=True, kw_only=True)
class _Member:
    """A version under examination, and what was found so far."""

    version: Version
    asked: bool
    objects: dict[str, StoredFile] = field(default_factory=dict)
    """By key: two forms may share a carried file."""
    faults: list[Fault] = field(default_factory=list)
    declared: int = 0
    """Tensors by its manifest."""
    tensors: int | None = None
    failure: str | None = None
    """Why it could not be brought."""

    def blames(self, file: StoredFile) -> bool:
        return any(fault.file == file.path for fault in self.faults)


class _Verification:
    def __init__(self, store: Watched, policy: PolicyLineage, members: Sequence[_Member], cancelled: Cancelled) -> None:
        self._store, self._policy, self._members, self._cancelled = store, policy, members, cancelled

    # --- shallow -----------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Manifests and objects are there, of the right sizes, and what the log says that they are."""
        self._at_once(LOOKS_AT_ONCE, [partial(self._look_at, member) for member in self._members])

    def _look_at(self, member: _Member) -> None:
        version = member.version
        for ref in (version.manifest, version.anchor):
            if ref is None:
                continue
            manifest, faults = _look_at_form(self._store, ref)
            member.faults += faults
            if manifest is None:
                continue
            member.objects |= {file.key: file for file in (*manifest.weights, *manifest.files)}
            member.declared = len(manifest.tensors)
            member.faults += _differences(self._policy, version, manifest, ref)

    # --- deep --------------------------------------------------------------------------------------------------------------

    def bring(self, workdir: Path, tell: Tell) -> None:
        """Each version that was asked for, oldest first, so that one begins where the one before ended."""
        broken = {member.version.ref for member in self._members if member.faults}
        objects = {key: file.size for member in self._members for key, file in member.objects.items()}
        self._store.announce(0, sum(objects.values()))
        asked = [m for m in self._members if m.asked and not any(link in broken for link in self._chain(m.version))]
        with Staging(workdir, self._store) as staging:
            for index, member in enumerate(asked, start=1):
                version = member.version
                tell(f"bringing {version.ref}" + (f" ({index} of {len(asked)})" if len(asked) > 1 else ""))
                try:
                    staging.stage(
                        version.ref.of(self._policy.policy),
                        version.manifest,
                        anchors=added_anchors(self._policy, version.ref),
                        cancelled=self._cancelled,
                    )
                    member.tensors = member.declared
                except CorruptObject as error:
                    member.failure = str(error)

    def read_rest(self, folder: Path) -> None:
        """Objects that no version was brought by: those of forms that were not needed, or that proved wrong."""
        unread = {
            key: file
            for member in self._members
            for key, file in member.objects.items()
            if not self._store.verified(key) and not member.blames(file)
        }
        wrong: dict[str, str] = {}

        def read(file: StoredFile, scratch: Path) -> None:
            try:
                self._store.download(receipt(file), scratch)
            except (CorruptObject, KeyError) as error:
                wrong[file.key] = str(error) if isinstance(error, CorruptObject) else f"object {file.key} is missing"
            finally:
                scratch.unlink(missing_ok=True)

        self._at_once(READS_AT_ONCE, [partial(read, file, folder / str(i)) for i, file in enumerate(unread.values())])
        for member in self._members:
            files = [file for key, file in member.objects.items() if key in wrong and not member.blames(file)]
            member.faults += [Fault(file=file.path, what=wrong[file.key]) for file in files]

    # --- the outcome -------------------------------------------------------------------------------------------------------

    def result(self) -> tuple[Checked, ...]:
        damaged = {member.version.ref for member in self._members if member.faults}
        return tuple(
            Checked(
                version=member.version,
                asked=member.asked,
                objects=len(member.objects),
                bytes=sum(file.size for file in member.objects.values()),
                faults=tuple(self._faults(member, damaged)),
                tensors=member.tensors,
            )
            for member in self._members
        )

    def _faults(self, member: _Member, damaged: set[RunVersion]) -> Iterator[Fault]:
        """Its own, or else what is wrong with a version that it builds on; only then, that it could not be brought."""
        yield from member.faults
        cause = next((link for link in self._chain(member.version) if link in damaged), None)
        if cause is None and member.failure is not None:
            yield Fault(what=f"cannot be brought: {member.failure}")
        elif cause is not None and cause != member.version.ref:
            yield Fault(what=f"builds on {cause}, which is damaged")

    def _chain(self, version: Version) -> Iterator[RunVersion]:
        return (link.ref for link in self._policy.chain(version.ref))

    def _at_once(self, threads: int, tasks: Sequence[Callable[[], None]]) -> None:
        """Does all of it. At the first that fails, or where it is no longer wanted, no more is begun."""
        with ThreadPoolExecutor(threads, thread_name_prefix="stitch-verify") as pool:
            running: set[Future[Any]] = {pool.submit(task) for task in tasks}
            try:
                while running:
                    finished, running = wait(running, CHECK_EVERY_S, FIRST_COMPLETED)
                    for future in finished:
                        future.result()
                    if self._cancelled():
                        raise StagingCancelled("verify: cancelled")
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def _look_at_form(store: BlobStore, ref: ManifestRef) -> tuple[Manifest | None, list[Fault]]:
    """The manifest, if it can be read, and every object of it that is missing or of the wrong size."""
    try:
        return verify_version(store, ref), []
    except (CorruptObject, KeyError) as error:
        first = f"manifest {error.args[0]} of its base is missing" if isinstance(error, KeyError) else str(error)
    try:
        manifest = read_manifest(store, ref)
    except (CorruptObject, KeyError):
        return None, [Fault(what=first)]
    faults = []
    for file in (*manifest.weights, *manifest.files):
        entry = store.stat(file.key)
        if entry is None:
            faults.append(Fault(file=file.path, what=f"object {file.key} is missing"))
        elif entry.size != file.size:
            faults.append(Fault(file=file.path, what=f"object {file.key} has {entry.size} bytes, not {file.size}"))
    return manifest, faults or [Fault(what=first)]


def _differences(policy: PolicyLineage, version: Version, manifest: Manifest, ref: ManifestRef) -> Iterator[Fault]:
    """Where a manifest, though intact, is not what the log says of the version."""
    source = version
    while source.alias_of is not None and ref == policy.versions[source.alias_of].manifest:
        source = policy.versions[source.alias_of]
    if manifest.ref != source.ref.of(policy.policy):
        yield Fault(what=f"manifest {ref.key} describes {manifest.ref} of policy {manifest.policy}, not {source.ref}")
    if ref == version.anchor:
        if manifest.base is not None:
            yield Fault(what=f"manifest {ref.key} was added as a full form, and is a delta")
        return
    if manifest.kind is not version.kind:
        yield Fault(what=f"manifest {ref.key} is of kind {manifest.kind}, the log says {version.kind}")
    base = None if version.base is None else policy.versions[version.base]
    if base is not None and manifest.base is not None and manifest.base.manifest != base.manifest:
        yield Fault(what=f"manifest {ref.key} builds on {manifest.base.manifest.key}, the log says {base.manifest.key}")
