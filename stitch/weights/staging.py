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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from stitch.core.catchup import plan
from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import Digest, VersionRef
from stitch.core.manifest import BaseRef, Manifest, ManifestRef
from stitch.store.manifests import read_manifest
from stitch.store.port import BlobStore
from stitch.weights import kernels
from stitch.weights.buffers import NAMES, Buffer
from stitch.weights.building import Builder, LocalDamage, Origin, Work
from stitch.weights.fetch import Fetcher, Progress, StagingCancelled
from stitch.weights.folders import check_carried
from stitch.weights.header import tensor_bytes
from stitch.weights.origins import LocalBase
from stitch.weights.parallel import Check
from stitch.weights.scrub import Damage, scrub_buffer
from stitch.weights.shelf import Shelf, Staged
from stitch.weights.space import NotEnoughSpace, Room, naming_full_disks
from stitch.weights.verify import Verify, check_dtypes

__all__ = ["Damage", "NotEnoughSpace", "Staged", "Staging", "StagingCancelled", "Verify"]

log = logging.getLogger(__name__)

COPY_DISCOUNT: Final = 8
"""A byte copied on the local disk counts as an eighth of one from the store: a disk copies 1 GB/s and more, where a store's
share of a busy network is some hundred MB/s."""
WARM_ABOVE_BYTES: Final = 256 * 1024 * 1024
"""Of a model: a smaller one is read in numpy before numba has started."""
ATTEMPTS: Final = len(NAMES) + 2
"""At one version: each damage that is found takes a buffer or the local base out, and the rest is planned anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What a call of `stage` is about. `downloads`: bytes, attempt by attempt."""

    target: VersionRef
    manifest: Manifest
    anchors: tuple[ManifestRef, ...]
    check: Check
    progress: Progress | None
    downloads: list[int] = field(default_factory=list)


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
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock_file = _lock(self._root / "lock")
        self._staging = threading.Lock()
        self._shelf = Shelf(self._root, buffers)
        self._fetcher = Fetcher(store, cache=self._root / "cache", files=self._root / "files")
        self._builder = Builder(self._shelf, self._fetcher, self._base, verify=verify, memory_budget=memory_budget)
        self._room = Room(self._root, disk_budget)
        self._manifests: dict[ManifestRef, Manifest] = {}

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
        return self._shelf.active

    @property
    def damages(self) -> int:
        """How often a buffer proved damaged."""
        return self._shelf.damages

    def mark_active(self, staged: Staged) -> None:
        """The engine confirmed that it runs this version: of two buffers, its own is not written until another one is active."""
        with self._staging:
            held = [b for b in self._shelf.buffers if b.name == staged.buffer and b.holds(staged.weights_digest)]
            if not held or not staged.path.is_dir():
                raise InvalidRequest(f"staged: {staged.ref} was staged over meanwhile", field="staged")
            self._shelf.active = staged

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
            if sum(tensor_bytes(spec.dtype, spec.shape) for spec in manifest.tensors) > WARM_ABOVE_BYTES:
                kernels.warm()  # in the background, while the bytes come
            order = _Order(target=target, manifest=manifest, anchors=tuple(anchors), check=check, progress=progress)
            buffer = self._hold(order)
            carried = {file.path: self._fetcher.carried(file) for file in manifest.files}
            path = self._shelf.folders.expose(target, buffer.weights, carried)
            self._tidy(path, manifest)
            return Staged(
                path=path,
                ref=target,
                weights_digest=manifest.weights_digest,
                buffer=buffer.name,
                files=manifest.files,
                bytes_downloaded=sum(order.downloads),
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
            found.append(Damage(buffer=buffer.name, active=self._shelf.is_active(buffer), what=str(error)))
            self._shelf.give_up(buffer, error)

        for buffer in self._shelf.buffers:
            scrub_buffer(buffer, self._staging, stopped, damaged)
        return tuple(found)

    # --- what to do --------------------------------------------------------------------------------------------------------

    def _hold(self, order: _Order) -> Buffer:
        """A buffer with the version's weights, verified."""
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(LocalDamage):
                return self._hold_once(order)
        return self._hold_once(order)

    def _hold_once(self, order: _Order) -> Buffer:
        target, manifest, check = order.target, order.manifest, order.check
        held = self._shelf.holding(manifest.weights_digest)
        if held is not None:
            order.downloads.append(self._fetcher.fetch(target, (), manifest.files, check, order.progress))
            self._builder.confirm(target, manifest, held, check)
            return held
        work = self._plan(order)
        order.downloads.append(self._download(order, work))
        self._builder.build(target, manifest, work, check)
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

    def _plan(self, order: _Order) -> Work:
        """The cheapest way. Keeps the manifests that it walked over, since the next walk passes most of them again."""
        manifest, anchors = order.manifest, order.anchors
        walked = {ref: found for ref, found in self._manifests.items() if found is manifest or ref in anchors}

        def resolve(base: BaseRef) -> Manifest:
            walked[base.manifest] = self._manifest(base.manifest)
            return walked[base.manifest]

        full: dict[Digest, Manifest] = {}
        for ref in anchors:
            try:
                full[ref.weights_digest] = self._manifest(ref)
            except (KeyError, CorruptObject) as error:  # it would only have spared work
                log.warning("%s: the anchor %s is not used: %s", order.target, ref.key, error)
        origins = self._origins(order.check)
        local = {digest: origin.cost for digest, origin in origins.items()}
        way = plan(manifest, resolve, local=local, anchors=full, cost=lambda m: self._fetcher.missing_bytes(m.weights))
        self._manifests = walked
        origin = None if way.local is None else origins[way.local]
        if origin is not None and origin.buffer is not None and self._shelf.writable(origin.buffer):
            return Work(plan=way, buffer=origin.buffer, origin=origin)
        return Work(plan=way, buffer=self._shelf.free(), origin=origin)

    def _origins(self, check: Check) -> dict[Digest, Origin]:
        """Weights at hand that a version can be built from, the cheapest of each digest."""
        origins: dict[Digest, Origin] = {}
        if self._base is not None and not any(buffer.contents for buffer in self._shelf.buffers):
            digest = self._base.weights_digest(self._builder.threads, check)
            if digest is not None:
                origins[digest] = Origin(buffer=None, cost=self._base.size // COPY_DISCOUNT)
        for buffer in sorted(self._shelf.buffers, key=self._shelf.writable):
            if buffer.contents is not None:
                cost = 0 if self._shelf.writable(buffer) else buffer.size // COPY_DISCOUNT
                origins[buffer.contents.weights_digest] = Origin(buffer=buffer, cost=cost)
        return origins

    def _download(self, order: _Order, work: Work) -> int:
        """Everything is here and verified before the first byte of a buffer changes. Returns the bytes downloaded."""
        wanted = [file for version in work.versions for file in version.weights]
        self._fetcher.evict_weights(wanted)
        downloads = self._fetcher.missing_bytes(wanted, order.manifest.files)
        freed = 0 if work.in_place else work.buffer.size
        self._room.demand(order.target, downloads + self._builder.extra_bytes(work), freed)
        if freed and downloads > self._room.left():
            self._shelf.discard(work.buffer)
        return self._fetcher.fetch(order.target, wanted, order.manifest.files, order.check, order.progress)

    def _tidy(self, path: Path, manifest: Manifest) -> None:
        """Removes folders and carried files that neither the new version nor the active one uses."""
        active = [] if self._shelf.active is None else [self._shelf.active]
        self._shelf.folders.keep_only(path, *(staged.path for staged in active))
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
