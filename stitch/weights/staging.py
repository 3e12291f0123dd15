"""Staging: a version brought to the local disk, whole and verified, while the engine serves another.

Two buffers hold weights. The engine loads from one; the other is brought forward by the deltas that it misses, or built anew. What
the engine is given is a folder of its own per run and number, whose entries link to a buffer and to carried files:

    lock                                    held by the process that stages here
    buffers/a, buffers/b                    model.safetensors and buffer.json each
    cache/<blake3>                          downloaded objects, and parts of them
    files/<blake3>                          carried files
    staged/<run>/weight_v000007/            what an engine loads

With a single buffer the disk holds the model once. The buffer is then changed while the engine serves from its own memory, which
gives up three things. The version that serves is no longer on the disk once the next one is begun: going back to it costs a
download. A staging that fails after the buffer was begun to be changed costs a whole checkpoint, where two buffers cost a copy. And
whoever starts an engine while the buffer is on its way has nothing to give it until the new version is whole. It must not be used
beside an engine that reads its files after a load, as one does that maps them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from stitch.core.catchup import Plan, plan
from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import Digest, VersionRef
from stitch.core.manifest import BaseRef, Manifest, ManifestRef, StoredFile
from stitch.store.manifests import read_manifest
from stitch.store.port import BlobStore
from stitch.weights.apply import Chain, Delta
from stitch.weights.buffers import NAMES, Buffer, header_digest, open_buffers
from stitch.weights.fetch import Fetcher, Progress, StagingCancelled
from stitch.weights.files import copy_file, remove
from stitch.weights.folders import StagedFolders, check_carried
from stitch.weights.origins import LocalBase, merge
from stitch.weights.parallel import Check, default_threads
from stitch.weights.scrub import Damage, scrub_buffer
from stitch.weights.space import NotEnoughSpace, Room, naming_full_disks
from stitch.weights.verify import Verify, check_dtypes, verify

__all__ = ["Damage", "NotEnoughSpace", "Staged", "Staging", "StagingCancelled", "Verify"]

log = logging.getLogger(__name__)

COPY_DISCOUNT: Final = 8
"""A byte copied on the local disk counts as an eighth of one from the store: a disk copies 1 GB/s and more, where a store's
share of a busy network is some hundred MB/s."""
ATTEMPTS: Final = len(NAMES) + 2
"""At one version: each damage that is found takes a buffer or the local base out, and the rest is planned anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version ready to be loaded. `path` is a checkpoint folder unique to run and number; it lasts until its buffer is staged
    into again, and for as long as it is the active one of two buffers."""

    path: Path
    ref: VersionRef
    weights_digest: Digest
    buffer: str
    files: tuple[StoredFile, ...]
    bytes_downloaded: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Weights at hand: in a buffer, or in the local base directory (None)."""

    buffer: Buffer | None
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A plan, the buffer that it is carried out in, and where its local start lies (None: it starts from an anchor)."""

    plan: Plan
    buffer: Buffer
    origin: _Origin | None

    @property
    def in_place(self) -> bool:
        return self.origin is not None and self.origin.buffer is self.buffer

    @property
    def versions(self) -> tuple[Manifest, ...]:
        """Those whose weight files are read."""
        return (self.plan.anchor, *self.plan.deltas) if self.plan.anchor is not None else self.plan.deltas


class _LocalDamage(CorruptObject):
    """What lies here is not what it was taken for; it is out of the way now, and a version can be had from elsewhere."""


class Staging:
    """The staging area of one replica. Blocking; one `stage` at a time. Must not be staged into while the engine loads from the
    last result: call `mark_active` first, or give that result up."""

    def __init__(
        self,
        workdir: Path,
        store: BlobStore,
        *,
        base: Path | None = None,
        buffers: int = 2,
        verify: Verify = Verify.FULL,
        disk_budget: int | None = None,
        memory_budget: int | None = None,
    ) -> None:
        """`base` is a checkpoint directory that may spare a download. `buffers` is 2, or 1 for tight disks (see above).

        `verify` says what is read before a version is given to an engine: all of it, or what changed; then `scrub` is to be
        called now and then. A buffer that an earlier process wrote is read whole in any case. `disk_budget` bounds the bytes in
        `workdir`, `memory_budget` those that decoding takes beside mapped files (one thread at least is always used). Raises
        InvalidRequest where another process stages here, or naming the field.
        """
        self._root = workdir.absolute()
        self._store = store
        _check_options(buffers, disk_budget=disk_budget, memory_budget=memory_budget)
        self._base = None if base is None else LocalBase(base)
        self._verify = verify
        self._memory_budget = memory_budget
        self._threads = default_threads()
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock_file = _lock(self._root / "lock")
        self._staging = threading.Lock()
        self._buffers = open_buffers(self._root / "buffers", buffers)
        self._fetcher = Fetcher(store, cache=self._root / "cache", files=self._root / "files")
        self._room = Room(self._root, disk_budget)
        self._active: Staged | None = None
        self._manifests: dict[ManifestRef, Manifest] = {}
        self._folders = StagedFolders(self._root / "staged")
        self.damages = 0
        """How often a buffer proved damaged."""

    def close(self) -> None:
        """Lets another process stage here. May be called twice."""
        self._lock_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def active(self) -> Staged | None:
        """What was marked last; None where its single buffer has moved on since, or proved damaged."""
        return self._active

    def mark_active(self, staged: Staged) -> None:
        """The engine confirmed that it runs this version: of two buffers, its own is not written until another one is active."""
        with self._staging:
            held = [b for b in self._buffers if b.name == staged.buffer and b.holds(staged.weights_digest)]
            if not held or not staged.path.is_dir():
                raise InvalidRequest(f"staged: {staged.ref} was staged over meanwhile", field="staged")
            self._active = staged

    def stage(
        self,
        target: VersionRef,
        manifest_ref: ManifestRef,
        *,
        anchors: Sequence[ManifestRef] = (),
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Staged:
        """Brings the version here by the cheapest path and verifies every file of it, and its tensors as `verify` says.

        `anchors` are full forms that the chain of manifests does not show (those that a compactor added). `progress(done, total)`
        counts downloaded bytes. `cancelled` is asked between files and between pieces of work. The active one of two buffers is
        only read. Damage of what lies here is logged as an error and mended by building anew.

        Raises CorruptObject naming version and tensor or file, NotEnoughSpace, StagingCancelled, Unavailable. After any of them the
        engine's own version is as before, and `stage` may be called again.
        """
        started = time.monotonic()
        check = _checker(target, cancelled)
        with self._staging, naming_full_disks(target, self._root):
            check()
            manifest = self._manifest_of(target, manifest_ref)
            check_carried(target, manifest)
            buffer, downloaded = self._hold(target, manifest, anchors, check, progress)
            carried = {file.path: self._fetcher.carried(file) for file in manifest.files}
            path = self._folders.expose(target, buffer.weights, carried)
            self._tidy(path, manifest)
            return Staged(
                path=path,
                ref=target,
                weights_digest=manifest.weights_digest,
                buffer=buffer.name,
                files=manifest.files,
                bytes_downloaded=downloaded,
                seconds=time.monotonic() - started,
            )

    def scrub(self, *, stopped: Callable[[], bool] = lambda: False) -> tuple[Damage, ...]:
        """Reads all that this process trusts once more, in small steps that a `stage` may come between, and at half speed.

        A buffer that is not what it should be is logged as an error, made dirty, and never loaded from again. Where it was the
        active one, what the engine holds is in doubt, too: stage its version again, which builds it anew, and load it. `stopped`
        is asked between steps.
        """
        found: list[Damage] = []

        def damaged(buffer: Buffer, error: CorruptObject) -> None:
            found.append(Damage(buffer=buffer.name, active=self._is_active(buffer), what=str(error)))
            self._give_up(buffer, error)

        for buffer in self._buffers:
            scrub_buffer(buffer, self._staging, stopped, damaged)
        return tuple(found)

    # --- what to do --------------------------------------------------------------------------------------------------------

    def _hold(
        self, target: VersionRef, manifest: Manifest, anchors: Sequence[ManifestRef], check: Check, progress: Progress | None
    ) -> tuple[Buffer, int]:
        """A buffer with the version's weights, verified, and the bytes downloaded for it."""
        downloads: list[int] = []
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(_LocalDamage):
                return self._hold_once(target, manifest, anchors, check, progress, downloads), sum(downloads)
        return self._hold_once(target, manifest, anchors, check, progress, downloads), sum(downloads)

    def _hold_once(
        self,
        target: VersionRef,
        manifest: Manifest,
        anchors: Sequence[ManifestRef],
        check: Check,
        progress: Progress | None,
        downloads: list[int],
    ) -> Buffer:
        held = self._holding(manifest.weights_digest)
        if held is not None:
            downloads.append(self._fetcher.fetch(target, (), manifest.files, check, progress))
            self._confirm(target, manifest, held, check)
            return held
        work = self._plan(target, manifest, anchors, check)
        downloads.append(self._download(target, manifest, work, check, progress))
        self._build(target, manifest, work, check)
        return work.buffer

    def _manifest(self, ref: ManifestRef) -> Manifest:
        """KeyError where it is missing."""
        found = self._manifests.get(ref)
        if found is None:
            found = read_manifest(self._store, ref)
            check_dtypes(found.tensors, str(found.ref))
            self._manifests[ref] = found
        return found

    def _manifest_of(self, target: VersionRef, ref: ManifestRef) -> Manifest:
        try:
            return self._manifest(ref)
        except KeyError:
            raise CorruptObject(f"{target}: its manifest {ref.key} is missing") from None

    def _plan(self, target: VersionRef, manifest: Manifest, anchors: Sequence[ManifestRef], check: Check) -> _Work:
        """The cheapest way. Keeps the manifests that it walked over, since the next walk passes most of them again."""
        walked = {ref: found for ref, found in self._manifests.items() if found is manifest or ref in anchors}

        def resolve(base: BaseRef) -> Manifest:
            walked[base.manifest] = self._manifest(base.manifest)
            return walked[base.manifest]

        full: dict[Digest, Manifest] = {}
        for ref in anchors:
            try:
                full[ref.weights_digest] = self._manifest(ref)
            except (KeyError, CorruptObject) as error:  # it would only have spared work
                log.warning("%s: the anchor %s is not used: %s", target, ref.key, error)
        origins = self._origins(check)
        local = {digest: origin.cost for digest, origin in origins.items()}
        way = plan(manifest, resolve, local=local, anchors=full, cost=lambda m: self._fetcher.missing_bytes(m.weights))
        self._manifests = walked
        origin = None if way.local is None else origins[way.local]
        if origin is not None and origin.buffer is not None and self._writable(origin.buffer):
            return _Work(plan=way, buffer=origin.buffer, origin=origin)
        free = [buffer for buffer in self._buffers if self._writable(buffer)]
        return _Work(plan=way, buffer=min(free, key=lambda buffer: buffer.contents is not None), origin=origin)

    def _origins(self, check: Check) -> dict[Digest, _Origin]:
        """Weights at hand that a version can be built from, the cheapest of each digest."""
        origins: dict[Digest, _Origin] = {}
        if self._base is not None and not any(buffer.contents for buffer in self._buffers):
            digest = self._base.weights_digest(self._threads, check)
            if digest is not None:
                origins[digest] = _Origin(buffer=None, cost=self._base.size // COPY_DISCOUNT)
        for buffer in sorted(self._buffers, key=self._writable):
            if buffer.contents is not None:
                cost = 0 if self._writable(buffer) else buffer.size // COPY_DISCOUNT
                origins[buffer.contents.weights_digest] = _Origin(buffer=buffer, cost=cost)
        return origins

    def _holding(self, digest: Digest) -> Buffer | None:
        """A clean buffer with these weights, the active one first."""
        return max((buffer for buffer in self._buffers if buffer.holds(digest)), key=self._is_active, default=None)

    def _is_active(self, buffer: Buffer) -> bool:
        return self._active is not None and self._active.buffer == buffer.name

    def _writable(self, buffer: Buffer) -> bool:
        """Whether it may be changed: the active one only where there is no other."""
        return len(self._buffers) == 1 or not self._is_active(buffer)

    # --- doing it ----------------------------------------------------------------------------------------------------------

    def _download(self, target: VersionRef, manifest: Manifest, work: _Work, check: Check, progress: Progress | None) -> int:
        """Everything is here and verified before the first byte of a buffer changes. Returns the bytes downloaded."""
        wanted = [file for version in work.versions for file in version.weights]
        self._fetcher.evict_weights(wanted)
        downloads = self._fetcher.missing_bytes(wanted, manifest.files)
        freed = 0 if work.in_place else work.buffer.size
        self._room.demand(target, downloads + self._building_bytes(work), freed)
        if freed and downloads > self._room.left():
            self._discard(work.buffer)
        return self._fetcher.fetch(target, wanted, manifest.files, check, progress)

    def _building_bytes(self, work: _Work) -> int:
        """What the disk must hold for a while beside downloads and the buffers as they are."""
        if work.plan.anchor is not None:
            # A single file becomes the buffer itself; of several, one at a time is there twice.
            sizes = [file.size for file in work.plan.anchor.weights]
            return max(sizes) if len(sizes) > 1 else 0
        if work.in_place or work.origin is None:
            return 0
        if work.origin.buffer is not None:
            return work.origin.buffer.size
        return 0 if self._base is None else self._base.size

    def _build(self, target: VersionRef, manifest: Manifest, work: _Work, check: Check) -> None:
        buffer = work.buffer
        trusted = work.in_place and buffer.trusted
        whole = self._verify is Verify.FULL or not trusted
        check()
        deltas = [Delta(manifest=m, files=[self._fetcher.cached(file) for file in m.weights]) for m in work.plan.deltas]
        with Chain(work.plan.at.tensors, deltas, source=str(target)) as chain:
            header = self._begin(target, work, chain, check)
            try:
                chain.apply(buffer.weights, check, threads=self._decoders(chain), trusting=whole)
                if whole:
                    verify(buffer.weights, manifest.tensors, str(target), check, threads=self._threads)
            except CorruptObject as error:
                self._blame(work, trusted, error, check)
                raise
        check()
        buffer.mark_clean(str(target), manifest.weights_digest, manifest.tensors, header)
        if len(self._buffers) == 1:
            self._fetcher.evict_weights(())  # no second buffer has use for them

    def _decoders(self, chain: Chain) -> int:
        if self._memory_budget is None or not chain.thread_bytes:
            return self._threads
        return max(1, min(self._threads, self._memory_budget // chain.thread_bytes))

    def _begin(self, target: VersionRef, work: _Work, chain: Chain, check: Check) -> Digest:
        """Brings into the buffer what the deltas are applied to, and marks it dirty. Returns the digest of the file's header."""
        buffer, origin = work.buffer, work.origin
        if origin is not None and origin.buffer is not None:
            try:
                header = origin.buffer.check_header()
                chain.check(origin.buffer.weights)
            except CorruptObject as error:
                self._give_up(origin.buffer, error)
                raise _LocalDamage(str(error)) from error
            if work.in_place:
                self._change(buffer)
                return header
        self._discard(buffer)
        if work.plan.anchor is not None:
            self._load_anchor(work.plan.anchor, buffer, check)
        elif origin is not None and origin.buffer is not None:
            copy_file(origin.buffer.weights, buffer.weights, check)
            return header
        elif self._base is not None:
            self._base.copy_to(buffer.weights, check)
        return header_digest(buffer.weights)

    def _load_anchor(self, anchor: Manifest, buffer: Buffer, check: Check) -> None:
        paths = [self._fetcher.cached(file) for file in anchor.weights]
        if len(paths) == 1:
            paths[0].replace(buffer.weights)
        else:
            merge(paths, buffer.weights, check, consume=True)

    def _confirm(self, target: VersionRef, manifest: Manifest, buffer: Buffer, check: Check) -> None:
        """A buffer may have been clean for long, or written by an earlier process: its bytes are read again."""
        try:
            buffer.check_header()
            if self._verify is Verify.FULL or not buffer.trusted:
                verify(buffer.weights, manifest.tensors, str(target), check, threads=self._threads)
                buffer.trust(manifest.tensors)
        except CorruptObject as error:
            self._give_up(buffer, error)
            raise _LocalDamage(str(error)) from error

    def _blame(self, work: _Work, trusted: bool, error: CorruptObject, check: Check) -> None:
        """A wrong result may be due to what it was built from. Raises _LocalDamage where that is so: then there is another way.

        Of a trusted buffer that was changed in place nobody can tell any more: the caller is told, and asks again.
        """
        origin = work.origin
        if origin is None or (work.in_place and trusted):
            return
        if origin.buffer is None:
            assert self._base is not None
            self._base.forget()
        elif not work.in_place:
            try:
                verify(origin.buffer.weights, work.plan.at.tensors, str(work.plan.at.ref), check, threads=self._threads)
            except CorruptObject as wrong:
                self._give_up(origin.buffer, wrong)
                raise _LocalDamage(str(wrong)) from wrong
            return
        else:
            self._give_up(origin.buffer, error)
        raise _LocalDamage(str(error)) from error

    def _give_up(self, buffer: Buffer, error: CorruptObject) -> None:
        self.damages += 1
        log.error("buffer %s of %s is damaged, and is built anew: %s", buffer.name, self._root, error)
        self._change(buffer)

    def _change(self, buffer: Buffer) -> None:
        """Before a buffer is changed: from here on nobody may take it for what it was."""
        buffer.mark_dirty()
        self._folders.withdraw(buffer.weights)
        if self._is_active(buffer):
            self._active = None

    def _discard(self, buffer: Buffer) -> None:
        self._change(buffer)
        remove(buffer.weights)

    def _tidy(self, path: Path, manifest: Manifest) -> None:
        """Removes folders and carried files that neither the new version nor the active one uses."""
        active = [] if self._active is None else [self._active]
        self._folders.keep_only(path, *(staged.path for staged in active))
        self._fetcher.evict_files([*manifest.files, *(file for staged in active for file in staged.files)])


def _check_options(buffers: int, **budgets: int | None) -> None:
    if not 1 <= buffers <= len(NAMES):
        raise InvalidRequest(f"buffers: {buffers}; 1 or {len(NAMES)} are possible", field="buffers")
    for name, budget in budgets.items():
        if budget is not None and budget <= 0:
            raise InvalidRequest(f"{name}: {budget} is not above 0", field=name)


def _checker(target: VersionRef, cancelled: Callable[[], bool] | None) -> Check:
    def check() -> None:
        if cancelled is not None and cancelled():
            raise StagingCancelled(f"{target}: staging was cancelled")

    return check


def _lock(path: Path) -> BinaryIO:
    handle = path.open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise InvalidRequest(f"workdir: another process stages in {path.parent}", field="workdir") from None
    return handle
