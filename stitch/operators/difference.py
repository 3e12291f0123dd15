"""What changed from one version to another, tensor by tensor: what `stitch diff` shows.

Where the second is a sparse delta on the first, the delta tells how many values changed and by how many steps, and nothing else is
downloaded. Otherwise, or on demand, both versions are brought to a scratch folder, and the values of the tensors that differ are
compared; which do differ, their state digests tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from stitch.core.errors import CorruptObject
from stitch.core.ids import VersionRef
from stitch.core.lineage import PolicyLineage, Version
from stitch.core.manifest import Codec, Manifest, TensorSpec
from stitch.operators.values import THREADS, Moved, compare
from stitch.operators.versions import added_anchors
from stitch.operators.watched import Watched
from stitch.store.manifests import read_manifest
from stitch.store.port import BlobStore
from stitch.store.scratch import scratch_folder
from stitch.weights import sparse
from stitch.weights.fetch import Fetcher
from stitch.weights.safetensors import Checkpoint, TensorFile, open_checkpoint
from stitch.weights.staging import Staged, Staging, StagingCancelled

Tell = Callable[[str], None]
Cancelled = Callable[[], bool]


class Change(StrEnum):
    """What became of a tensor."""

    VALUES = "values"
    """Same name, dtype and shape; other bytes."""
    RESHAPED = "reshaped"
    """Same name, other dtype or shape."""
    ADDED = "added"
    REMOVED = "removed"


class Way(StrEnum):
    """How the difference was found."""

    SAME = "same"
    """Both hold the same weights, as their digests say; nothing was read."""
    DELTA = "delta"
    """By the sparse delta that joins them."""
    VALUES = "values"
    """By comparing values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One tensor that is not the same in both. dtype and shape are those of the second version, for a removed one of the first.

    `changed` of `values` differ, bit for bit. `stored` bytes hold the tensor in the delta that joins the versions, if one does.
    """

    name: str
    change: Change
    dtype: str
    shape: tuple[int, ...]
    values: int
    old_dtype: str | None = None
    old_shape: tuple[int, ...] | None = None
    moved: Moved | None = None
    """By how much; only of changed values."""
    stored: int | None = None

    @property
    def share(self) -> float:
        """Of the values that changed: 1 for what was added, removed or reshaped."""
        return 1.0 if self.moved is None else self.moved.changed / max(1, self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`tensors` are those that changed, by name; `values` and `bytes` count all tensors of the second version. `stored` is what
    the delta that joins them weighs, if one does."""

    first: VersionRef
    second: VersionRef
    way: Way
    tensors: tuple[TensorChange, ...]
    unchanged: int
    values: int
    bytes: int
    stored: int | None

    def of(self, change: Change) -> tuple[TensorChange, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.change is change)


def difference(
    store: BlobStore,
    policy: PolicyLineage,
    first: Version,
    second: Version,
    *,
    values: bool = False,
    scratch: Path | None = None,
    tell: Tell = lambda what: None,
    cancelled: Cancelled = lambda: False,
) -> Difference:
    """What changed from `first` to `second`. With `values`, values are compared also where a delta tells of the change.

    Comparing values needs twice a version's size in the folder `scratch` (default: the system's for such), and bounded memory.
    Raises CorruptObject, Unavailable, NotEnoughSpace, StagingCancelled.
    """
    watched = store if isinstance(store, Watched) else Watched(store)
    work = _Work(watched, policy, first, second, tell, cancelled)
    if first.manifest.weights_digest == second.manifest.weights_digest:
        return work.outcome(Way.SAME, {})
    with scratch_folder("diff", scratch) as folder:
        told = None if values else work.by_delta(folder / "delta")
        if told is not None:
            return work.outcome(Way.DELTA, told)
        return work.outcome(Way.VALUES, work.by_values(folder / "staging"))


class _Work:
    def __init__(
        self, store: Watched, policy: PolicyLineage, first: Version, second: Version, tell: Tell, cancelled: Cancelled
    ) -> None:
        self._store, self._policy, self._tell, self._cancelled = store, policy, tell, cancelled
        self._versions = (first, second)
        self._manifests = (_manifest(store, first), _manifest(store, second))
        self._changes = {change.name: change for change in _changes(*self._manifests)}

    @property
    def _delta(self) -> Manifest | None:
        """The second version's own form, where it is a delta on the weights of the first."""
        first, second = self._manifests
        joins = second.base is not None and second.base.manifest.weights_digest == first.weights_digest
        return second if joins else None

    @property
    def _differing(self) -> list[TensorChange]:
        return [change for change in self._changes.values() if change.change is Change.VALUES]

    def outcome(self, way: Way, moved: Mapping[str, Moved]) -> Difference:
        first, second = (version.ref.of(self._policy.policy) for version in self._versions)
        tensors = self._manifests[1].tensors
        known = {spec.name for spec in tensors}
        return Difference(
            first=first,
            second=second,
            way=way,
            tensors=tuple(replace(change, moved=moved.get(name)) for name, change in sorted(self._changes.items())),
            unchanged=len(known - self._changes.keys()),
            values=sum(math.prod(spec.shape) for spec in tensors),
            bytes=sum(math.prod(spec.shape) * sparse.unit_bytes(spec.dtype) for spec in tensors),
            stored=None if self._delta is None else sum(file.size for file in self._delta.weights),
        )

    # --- by the delta ------------------------------------------------------------------------------------------------------

    def by_delta(self, folder: Path) -> dict[str, Moved] | None:
        """None where no sparse delta joins the versions, or one that counts other units than values."""
        delta = self._delta
        if delta is None or delta.codec is not Codec.SPARSE:
            return None
        self._tell(f"reading the delta of {delta.ref}")
        fetcher = Fetcher(self._store, cache=folder / "cache", files=folder / "files")
        fetcher.fetch(delta.ref, delta.weights, (), self._check, self._store.announce)
        moved: dict[str, Moved] = {}
        for path in (fetcher.cached(file) for file in delta.weights):
            with TensorFile(path) as pack:
                for name in pack.names:
                    self._check()
                    told = self._of_blob(delta, name, pack.data(name))
                    if told is None:
                        return None
                    moved[name] = told
        missing = next((change.name for change in self._differing if change.name not in moved), None)
        if missing is not None:
            raise CorruptObject(f"{delta.ref}: tensor {missing!r} changed, and is not in the delta")
        return moved

    def _of_blob(self, delta: Manifest, name: str, blob: memoryview) -> Moved | None:
        change = self._changes.get(name)
        if change is None or change.change is not Change.VALUES:
            raise CorruptObject(f"{delta.ref}: tensor {name!r} is in the delta, and did not change by its digest")
        try:
            told = sparse.describe(blob)
        except CorruptObject as error:
            raise CorruptObject(f"{delta.ref}: tensor {name!r}: {error}") from error
        if told.width != sparse.unit_bytes(change.dtype):
            return None  # transcoded from a form that counts bytes
        if told.units != change.values:
            raise CorruptObject(f"{delta.ref}: tensor {name!r}: a delta of {told.units} values for one of {change.values}")
        self._changes[name] = replace(change, stored=blob.nbytes)
        return Moved(changed=told.changed, steps=told.magnitudes)

    # --- by values ---------------------------------------------------------------------------------------------------------

    def by_values(self, workdir: Path) -> dict[str, Moved]:
        with Staging(workdir, self._store) as staging:
            first = self._stage(staging, self._versions[0])
            staging.mark_active(first)
            second = self._stage(staging, self._versions[1])
            self._tell("comparing values")
            with open_checkpoint(first.path) as old, open_checkpoint(second.path) as new:
                return self._compare(old, new)

    def _stage(self, staging: Staging, version: Version) -> Staged:
        self._tell(f"bringing {version.ref}")
        return staging.stage(
            version.ref.of(self._policy.policy),
            version.manifest,
            anchors=added_anchors(self._policy, version.ref),
            progress=self._store.announce,
            cancelled=self._cancelled,
        )

    def _compare(self, old: Checkpoint, new: Checkpoint) -> dict[str, Moved]:
        def one(change: TensorChange) -> Moved:
            return compare(old.tensor(change.name), new.tensor(change.name), self._check)

        differing = self._differing
        with ThreadPoolExecutor(THREADS, thread_name_prefix="stitch-diff") as pool:
            try:
                return dict(zip((change.name for change in differing), pool.map(one, differing), strict=True))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _check(self) -> None:
        if self._cancelled():
            raise StagingCancelled("diff: cancelled")


def _manifest(store: BlobStore, version: Version) -> Manifest:
    try:
        return read_manifest(store, version.manifest)
    except KeyError:
        raise CorruptObject(f"{version.ref}: manifest {version.manifest.key} is missing") from None


def _changes(first: Manifest, second: Manifest) -> Iterator[TensorChange]:
    """By name, form and state digest alone."""
    before = {spec.name: spec for spec in first.tensors}
    for spec in second.tensors:
        old = before.pop(spec.name, None)
        if old is None:
            yield _change(spec, Change.ADDED)
        elif (old.dtype, old.shape) != (spec.dtype, spec.shape):
            yield replace(_change(spec, Change.RESHAPED), old_dtype=old.dtype, old_shape=old.shape)
        elif old.state != spec.state:
            yield _change(spec, Change.VALUES)
    for spec in before.values():
        yield _change(spec, Change.REMOVED)


def _change(spec: TensorSpec, change: Change) -> TensorChange:
    return TensorChange(name=spec.name, change=change, dtype=spec.dtype, shape=spec.shape, values=math.prod(spec.shape))


SORTS: Final[Mapping[str, Callable[[TensorChange], tuple[float, ...]]]] = {
    "share": lambda tensor: (-tensor.share,),
    "magnitude": lambda tensor: tuple(-part for part in (tensor.moved.magnitude if tensor.moved else (math.inf, math.inf))),
    "bytes": lambda tensor: (-(tensor.stored or 0), -float(tensor.values)),
    "name": lambda tensor: (),
}
"""What a table of tensors may be sorted by: the greatest first, and then by name. What was added, removed or reshaped has no
magnitude, and comes first."""


def ordered(tensors: Sequence[TensorChange], by: str) -> list[TensorChange]:
    """The tensors, sorted by a key of SORTS."""
    key = SORTS[by]
    return sorted(tensors, key=lambda tensor: (key(tensor), tensor.name))
