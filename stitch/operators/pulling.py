"""A version as a checkpoint directory that any loader takes: what `stitch pull` makes.

parent/DIR                      appears as a whole, by one rename, once every tensor and file was verified and is on disk
parent/.DIR.stitch-pull/        until then: a staging area, from which an interrupted pull goes on, and the checkpoint
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.core.ids import Digest, VersionRef
from stitch.core.lineage import PolicyLineage, Version
from stitch.core.manifest import StoredFile
from stitch.operators.versions import added_anchors
from stitch.operators.watched import Watched
from stitch.store.manifests import read_manifest
from stitch.store.port import BlobStore
from stitch.weights.digest import check_tensor
from stitch.weights.files import copy_file
from stitch.weights.safetensors import DEFAULT_SHARD_BYTES, WEIGHTS_FILE, open_checkpoint, write_checkpoint
from stitch.weights.space import SPARE_BYTES
from stitch.weights.staging import NotEnoughSpace, Staging, StagingCancelled

SCRATCH_SUFFIX: Final = ".stitch-pull"

Tell = Callable[[str], None]
Cancelled = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A checkpoint that lies in `directory`. `weights` are the names of its weight files, `files` of those carried beside them."""

    ref: VersionRef
    directory: Path
    weights_digest: Digest
    weights: tuple[str, ...]
    files: tuple[str, ...]
    bytes: int
    bytes_downloaded: int


def scratch_of(directory: Path) -> Path:
    """Where a pull to the directory keeps what it has so far."""
    place = _place(directory)
    return place.with_name(f".{place.name}{SCRATCH_SUFFIX}")


def pull(
    store: BlobStore,
    policy: PolicyLineage,
    version: Version,
    directory: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tell: Tell = lambda what: None,
    cancelled: Cancelled = lambda: False,
) -> Pulled:
    """Makes the directory, or fills it where it is empty. Called again after an interruption, it goes on where it was.

    Weights lie in one `model.safetensors` where they fit into `max_shard_bytes`, else in shards under an index, for which twice the
    version's size is needed on the disk. Raises InvalidRequest where the directory is not empty or another process pulls to it,
    CorruptObject, NotEnoughSpace, Unavailable, StagingCancelled.
    """
    place = _place(directory)
    check_free(place)
    watched = store if isinstance(store, Watched) else Watched(store)
    scratch = scratch_of(place)
    made = scratch / "checkpoint"
    scratch.mkdir(parents=True, exist_ok=True)
    with Staging(scratch / "staging", watched) as staging:
        ref = version.ref.of(policy.policy)
        tell(f"bringing {ref}")
        staged = staging.stage(
            ref,
            version.manifest,
            anchors=added_anchors(policy, version.ref),
            progress=watched.announce,
            cancelled=cancelled,
        )
        tell("writing the checkpoint")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        weights = _write_weights(staged.path, made, max_shard_bytes, cancelled)
        if len(weights) > 1:
            _verify(watched, version, made, cancelled)
        _copy_carried(staged.path, made, staged.files)
        size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
        _sync_tree(made)
        check_free(place)
        made.rename(place)
        _sync(place.parent)
    shutil.rmtree(scratch)
    return Pulled(
        ref=ref,
        directory=place,
        weights_digest=staged.weights_digest,
        weights=weights,
        files=tuple(file.path for file in staged.files),
        bytes=size,
        bytes_downloaded=staged.bytes_downloaded,
    )


def check_free(directory: Path) -> None:
    """Raises InvalidRequest unless the directory can be made, or is an empty one that a rename can replace."""
    if not directory.exists():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        what = "is not empty" if directory.is_dir() else "is no directory"
        raise InvalidRequest(f"directory: {directory} {what}; give a new or an empty one", field="directory")
    if directory.is_mount():
        raise InvalidRequest(
            f"directory: {directory} is a mount point, which cannot be replaced as a whole; give a directory below it",
            field="directory",
        )


def _place(directory: Path) -> Path:
    """Absolute, and where links lead: it is the real directory that is replaced."""
    place = directory.resolve()
    if not place.name:
        raise InvalidRequest(f"directory: {directory} cannot be replaced; give a directory below it", field="directory")
    return place


def _write_weights(staged: Path, made: Path, max_shard_bytes: int, cancelled: Cancelled) -> tuple[str, ...]:
    """The names of the weight files."""
    with open_checkpoint(staged) as checkpoint:
        total = sum(tensor.data.nbytes for tensor in checkpoint.tensors())
        if total <= max_shard_bytes:
            _link_or_copy((staged / WEIGHTS_FILE).resolve(), made / WEIGHTS_FILE)
            return (WEIGHTS_FILE,)
        needed, free = total + SPARE_BYTES, shutil.disk_usage(made).free
        if needed > free:
            raise NotEnoughSpace(f"directory: shards need {needed} bytes beside {made.parent}, {free} are free; give it more disk")
        tensors = (tensor for tensor in checkpoint.tensors() if not _stop(cancelled))
        return write_checkpoint(made, tensors, max_shard_bytes)


def _link_or_copy(source: Path, target: Path) -> None:
    """A second name costs nothing, and the staging area stays whole should this be the last that was done. Its own name goes with
    it in the end."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        copy_file(source, target)


def _verify(store: BlobStore, version: Version, made: Path, cancelled: Cancelled) -> None:
    """Shards were written anew: they are read back before anyone can take them for the version."""
    specs = {spec.name: spec for spec in read_manifest(store, version.manifest).tensors}
    with open_checkpoint(made) as checkpoint:
        for tensor in checkpoint.tensors():
            _stop(cancelled)
            check_tensor(tensor, specs[tensor.name], str(version.ref))


def _copy_carried(staged: Path, made: Path, files: Sequence[StoredFile]) -> None:
    for file in files:
        target = made / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_file((staged / file.path).resolve(), target)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _stop(cancelled: Cancelled) -> bool:
    """False, or StagingCancelled."""
    if cancelled():
        raise StagingCancelled("pull: cancelled")
    return False
