"""Staging: a version brought to the local disk, whole and verified, while the engine serves another.

Two buffers hold weights. The engine loads from one; the other is brought forward by the deltas that it misses, or built anew. What
the engine is given is a folder of its own per run and number, whose entries link to a buffer and to carried files:

    lock                                    held by the process that stages here
    buffers/a, buffers/b                    model.safetensors and buffer.json each
    cache/<blake3>                          downloaded objects, and parts of them
    files/<blake3>                          carried files
    staged/<run>/weight_v000007/            what an engine loads
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from stitch.core.catchup import Plan, plan
from stitch.core.errors import CorruptObject, InvalidRequest, Rejected
from stitch.core.ids import Digest, VersionRef
from stitch.core.manifest import BaseRef, Manifest, ManifestRef, StoredFile, TensorSpec
from stitch.store.manifests import read_manifest
from stitch.store.port import BlobStore
from stitch.weights.apply import apply_delta, merge, verify
from stitch.weights.buffers import Buffer
from stitch.weights.digest import specs, weights_digest
from stitch.weights.fetch import Fetcher, StagingCancelled
from stitch.weights.files import copy_file, remove
from stitch.weights.folders import StagedFolders, check_carried
from stitch.weights.header import tensor_bytes
from stitch.weights.safetensors import SUFFIX, open_checkpoint

__all__ = ["NotEnoughSpace", "Staged", "Staging", "StagingCancelled"]

log = logging.getLogger(__name__)

COPY_DISCOUNT: Final = 8
"""A byte copied on the local disk counts as an eighth of one from the store: a disk copies 1 GB/s and more, where a store's
share of a busy network is some hundred MB/s."""
SPARE_BYTES: Final = 64 * 1024 * 1024
"""Left free on the disk beyond what staging itself needs: state files, logs, others."""


class NotEnoughSpace(Rejected):
    """The disk cannot take the version; the message says what is needed and what is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version ready to be loaded. `path` is a checkpoint folder unique to run and number; it lasts until its buffer is staged
    into again, and for as long as it is the active one."""

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


class Staging:
    """The staging area of one replica. Blocking; one `stage` at a time. Must not be staged into while the engine loads from the
    last result: call `mark_active` first, or give that result up."""

    def __init__(self, workdir: Path, store: BlobStore, *, base: Path | None = None) -> None:
        """`base` is a checkpoint directory that may spare a download. Raises InvalidRequest where another process stages here."""
        self._root = workdir.absolute()
        self._store = store
        if base is not None and not base.is_dir():
            raise InvalidRequest(f"base: {base} is no directory", field="base")
        self._base = base
        self._base_digest: Digest | None = None
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock_file = _lock(self._root / "lock")
        self._staging = threading.Lock()
        self._buffers = (Buffer(self._root / "buffers" / "a"), Buffer(self._root / "buffers" / "b"))
        self._fetcher = Fetcher(store, cache=self._root / "cache", files=self._root / "files")
        self._active: Staged | None = None
        self._manifests: dict[ManifestRef, Manifest] = {}
        self._folders = StagedFolders(self._root / "staged")

    def close(self) -> None:
        """Lets another process stage here. May be called twice."""
        self._lock_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def active(self) -> Staged | None:
        """What was marked last."""
        return self._active

    def mark_active(self, staged: Staged) -> None:
        """The engine confirmed that it runs this version: its buffer is not written until another one is active."""
        with self._staging:
            held = [b for b in self._buffers if b.name == staged.buffer and _holds(b, staged.weights_digest)]
            if not held or not staged.path.is_dir():
                raise InvalidRequest(f"staged: {staged.ref} was staged over meanwhile", field="staged")
            self._active = staged

    def stage(
        self,
        target: VersionRef,
        manifest_ref: ManifestRef,
        *,
        anchors: Sequence[ManifestRef] = (),
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Staged:
        """Brings the version here by the cheapest path and verifies every tensor and file of it.

        `anchors` are full forms that the chain of manifests does not show (those that a compactor added). `progress(done, total)`
        counts downloaded bytes. `cancelled` is asked between files and between tensors. The active buffer is only read.

        Raises CorruptObject naming version and tensor or file, NotEnoughSpace, StagingCancelled, Unavailable. After any of them the
        engine's own version is as before, and `stage` may be called again.
        """
        started = time.monotonic()
        check = _checker(target, cancelled)
        with self._staging, _naming_full_disks(target, self._root):
            check()
            manifest = self._manifest(manifest_ref)
            check_carried(target, manifest)
            held = self._holding(manifest.weights_digest)
            if held is None:
                buffer, downloaded = self._bring(target, manifest, anchors, check, progress)
            else:
                buffer, downloaded = held, self._fetcher.fetch(target, (), manifest.files, check, progress)
                self._verify_held(target, manifest, held, check)
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

    def _bring(
        self,
        target: VersionRef,
        manifest: Manifest,
        anchors: Sequence[ManifestRef],
        check: Callable[[], None],
        progress: Callable[[int, int], None] | None,
    ) -> tuple[Buffer, int]:
        """Weights that no buffer holds yet: the buffer that holds them then, and the bytes downloaded."""
        work = self._plan(manifest, anchors)
        wanted = [file for version in work.versions for file in version.weights]
        self._fetcher.evict_weights(wanted)
        self._make_space(target, manifest, work, wanted)
        # Everything is here and verified before the first byte of a buffer changes.
        downloaded = self._fetcher.fetch(target, wanted, manifest.files, check, progress)
        self._build(target, manifest, work, check)
        return work.buffer, downloaded

    # --- what to do --------------------------------------------------------------------------------------------------------

    def _manifest(self, ref: ManifestRef) -> Manifest:
        found = self._manifests.get(ref)
        if found is None:
            try:
                found = self._manifests[ref] = read_manifest(self._store, ref)
            except KeyError:
                raise CorruptObject(f"manifest {ref.key} is missing") from None
        return found

    def _plan(self, manifest: Manifest, anchors: Sequence[ManifestRef]) -> _Work:
        """The cheapest way. Keeps the manifests that it walked over, since the next walk passes most of them again."""
        walked = {ref: found for ref, found in self._manifests.items() if found is manifest or ref in anchors}

        def resolve(base: BaseRef) -> Manifest:
            walked[base.manifest] = self._manifest(base.manifest)
            return walked[base.manifest]

        full = {ref.weights_digest: self._manifest(ref) for ref in anchors}
        origins = self._origins()
        local = {digest: origin.cost for digest, origin in origins.items()}
        way = plan(manifest, resolve, local=local, anchors=full, cost=lambda m: self._fetcher.missing_bytes(m.weights))
        self._manifests = walked
        origin = None if way.local is None else origins[way.local]
        if origin is not None and origin.buffer is not None and not self._is_active(origin.buffer):
            return _Work(plan=way, buffer=origin.buffer, origin=origin)
        free = [buffer for buffer in self._buffers if not self._is_active(buffer)]
        return _Work(plan=way, buffer=min(free, key=lambda buffer: buffer.contents is not None), origin=origin)

    def _origins(self) -> dict[Digest, _Origin]:
        """Weights at hand that a version can be built from, the cheapest of each digest."""
        origins: dict[Digest, _Origin] = {}
        base = self._base_weights()
        if base is not None and self._base is not None:
            origins[base] = _Origin(buffer=None, cost=_checkpoint_bytes(self._base) // COPY_DISCOUNT)
        for buffer in sorted(self._buffers, key=self._is_active, reverse=True):
            if buffer.contents is not None:
                cost = buffer.size // COPY_DISCOUNT if self._is_active(buffer) else 0
                origins[buffer.contents.weights_digest] = _Origin(buffer=buffer, cost=cost)
        return origins

    def _base_weights(self) -> Digest | None:
        """The weights digest of the local base, computed once and only while no buffer is good."""
        if self._base is None or any(buffer.contents for buffer in self._buffers):
            return self._base_digest
        if self._base_digest is None:
            try:
                with open_checkpoint(self._base) as checkpoint:
                    self._base_digest = weights_digest(specs(checkpoint.tensors()))
            except (CorruptObject, InvalidRequest) as error:
                log.warning("the local base is not used: %s", error)
                self._base = None
        return self._base_digest

    def _holding(self, digest: Digest) -> Buffer | None:
        """A clean buffer with these weights, the active one first."""
        held = [buffer for buffer in self._buffers if _holds(buffer, digest)]
        return max(held, key=self._is_active, default=None)

    def _is_active(self, buffer: Buffer) -> bool:
        return self._active is not None and self._active.buffer == buffer.name

    def _make_space(self, target: VersionRef, manifest: Manifest, work: _Work, wanted: Sequence[StoredFile]) -> None:
        """Raises NotEnoughSpace, before anything changed, where downloads and a new buffer do not fit. A buffer that is to be
        built anew goes early where the disk is too full for both."""
        downloads = self._fetcher.missing_bytes(wanted, manifest.files) + SPARE_BYTES
        free = shutil.disk_usage(self._root).free
        needed, freed = downloads, 0
        if not work.in_place:
            freed = work.buffer.size
            if work.plan.anchor is None or len(work.plan.anchor.weights) != 1:  # a single file becomes the buffer itself
                needed += model_bytes(manifest.tensors)
        if needed > free + freed:
            raise NotEnoughSpace(
                f"{target}: staging needs {needed} bytes in {self._root}, {free + freed} are free; give it more disk"
            )
        if downloads > free:
            self._discard(work.buffer)

    # --- doing it ----------------------------------------------------------------------------------------------------------

    def _discard(self, buffer: Buffer) -> None:
        buffer.mark_dirty()
        self._folders.withdraw(buffer.weights)
        remove(buffer.weights)

    def _build(self, target: VersionRef, manifest: Manifest, work: _Work, check: Callable[[], None]) -> None:
        buffer = work.buffer
        check()
        if work.origin is not None and work.origin.buffer is not None:
            work.origin.buffer.check_header()
        if work.in_place:
            buffer.mark_dirty()
            self._folders.withdraw(buffer.weights)
        else:
            self._discard(buffer)
        try:
            self._start(work, check)
            for delta in work.plan.deltas:
                apply_delta(delta, [self._fetcher.cached(file) for file in delta.weights], buffer.weights, check)
            verify(buffer.weights, manifest.tensors, str(target), check)
        except CorruptObject:
            if work.origin is not None and not work.in_place:
                self._recheck(work.plan.start, work.origin, check)
            raise
        check()
        buffer.mark_clean(str(target), manifest.weights_digest)

    def _start(self, work: _Work, check: Callable[[], None]) -> None:
        """What the deltas are applied to."""
        if work.plan.anchor is not None:
            self._load_anchor(work.plan.anchor, work.buffer, check)
        elif work.origin is not None and not work.in_place:
            self._copy(work.origin, work.buffer, check)

    def _copy(self, origin: _Origin, buffer: Buffer, check: Callable[[], None]) -> None:
        if origin.buffer is not None:
            copy_file(origin.buffer.weights, buffer.weights)
            return
        assert self._base is not None
        with open_checkpoint(self._base) as checkpoint:
            shards = [self._base / name for name in checkpoint.weights]
        merge(shards, buffer.weights, check)

    def _load_anchor(self, anchor: Manifest, buffer: Buffer, check: Callable[[], None]) -> None:
        paths = [self._fetcher.cached(file) for file in anchor.weights]
        if len(paths) == 1:
            paths[0].replace(buffer.weights)
            return
        merge(paths, buffer.weights, check)
        for path in paths:
            remove(path)

    def _recheck(self, digest: Digest, origin: _Origin, check: Callable[[], None]) -> None:
        """What a wrong result was copied from may be what is wrong: then the next attempt must not begin there again."""
        if origin.buffer is None:
            self._base_digest = None
            return
        manifest = next(found for found in self._manifests.values() if found.weights_digest == digest)
        try:
            verify(origin.buffer.weights, manifest.tensors, f"buffer {origin.buffer.name}", check)
        except CorruptObject as error:
            log.warning("a buffer is to be rebuilt: %s", error)
            origin.buffer.mark_dirty()

    def _verify_held(self, target: VersionRef, manifest: Manifest, buffer: Buffer, check: Callable[[], None]) -> None:
        """A buffer may have been clean for long, or written by an earlier process: its bytes are read again."""
        buffer.check_header()
        try:
            verify(buffer.weights, manifest.tensors, str(target), check)
        except CorruptObject:
            buffer.mark_dirty()
            raise

    def _tidy(self, path: Path, manifest: Manifest) -> None:
        """Removes folders and carried files that neither the new version nor the active one uses."""
        active = [] if self._active is None else [self._active]
        self._folders.keep_only(path, *(staged.path for staged in active))
        self._fetcher.evict_files([*manifest.files, *(file for staged in active for file in staged.files)])


def model_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Of all tensors' data."""
    return sum(tensor_bytes(spec.dtype, spec.shape) for spec in tensors)


def _holds(buffer: Buffer, digest: Digest) -> bool:
    return buffer.contents is not None and buffer.contents.weights_digest == digest


def _checkpoint_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob(f"*{SUFFIX}"))


def _checker(target: VersionRef, cancelled: Callable[[], bool] | None) -> Callable[[], None]:
    def check() -> None:
        if cancelled is not None and cancelled():
            raise StagingCancelled(f"{target}: staging was cancelled")

    return check


@contextlib.contextmanager
def _naming_full_disks(target: VersionRef, root: Path) -> Iterator[None]:
    """Others may fill the disk meanwhile."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotEnoughSpace(f"{target}: the disk of {root} became full while staging: {error}") from error


def _lock(path: Path) -> BinaryIO:
    handle = path.open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise InvalidRequest(f"workdir: another process stages in {path.parent}", field="workdir") from None
    return handle
