"""What the ranks of a trainer tell each other while they make one version, and how their parts become one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import Digest, VersionNumber, VersionRef, WriterId
from stitch.core.manifest import Codec, Kind, ManifestRef, StoredFile, TensorSpec, weights_digest
from stitch.weights.encode import LocalFile, full_size, missing_tensor, tensor_sizes, weight_paths


class Form(StrEnum):
    """What a rank makes of its tensors."""

    DIGEST = "digest"
    """Nothing but their digests: the version is there, and it is asked whether these are its weights."""
    FULL = "full"
    CHANGED = "changed"
    """A delta of whole tensors, where the bytes of the version before are not at hand."""
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a publisher stands in the log, for ranks that do not read it."""

    writer: WriterId
    epoch: int
    head: VersionRef | None
    next_number: VersionNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What one rank was called with, and the weights digests of the versions whose bytes it has at hand."""

    number: VersionNumber | None
    kind: Kind | None
    directory: bool
    against: int | None
    """The version that a delta directory is against."""
    held: tuple[Digest, ...]
    doubted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every rank is to do. `base` is what deltas are against: its tensors, and where they can be had."""

    prefix: str
    form: Form
    base: tuple[TensorSpec, ...] = ()
    base_ref: VersionRef | None = None
    base_manifest: ManifestRef | None = None
    anchors: tuple[ManifestRef, ...] = ()
    tip: Digest | None
    strict: bool
    ahead: bool
    """Whether files may be uploaded before it is known what they come to."""
    keep: bool
    """Whether a delta may follow, so that a copy of a directory is worth its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank's tensors came to. `size`: bytes of its files. `again`: whether it could make them anew."""

    tensors: tuple[TensorSpec, ...]
    kind: Kind
    codec: Codec
    complete: bool
    size: int
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipts:
    """What one rank uploaded."""

    weights: tuple[StoredFile, ...]
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A version without its files: all parts together, tensors sorted by name."""

    kind: Kind
    codec: Codec
    tensors: tuple[TensorSpec, ...]
    weights_digest: Digest
    worth_full: bool
    """Whether a full version would be no larger, and can still be made."""


RANKS_AGREE: Final = ("number", "kind", "directory", "against")


def agreed(readies: Sequence[Ready]) -> Ready:
    """Rank 0's wishes, if all ranks have the same. Raises InvalidRequest naming what differs, and where."""
    first = readies[0]
    for rank, ready in enumerate(readies):
        for field in RANKS_AGREE:
            mine, theirs = getattr(first, field), getattr(ready, field)
            if mine != theirs:
                raise InvalidRequest(f"{field}: {theirs} at rank {rank}, {mine} at rank 0; give all ranks the same", field=field)
    return first


def merged(parts: Sequence[Part], *, wanted: Iterable[TensorSpec], strict: bool) -> Content:
    """All parts as one version. `wanted` are tensors that must be among them; `strict`: a delta stays one.

    Raises InvalidRequest naming a tensor that two ranks gave, or that none did.
    """
    owner: dict[str, int] = {}
    for rank, part in enumerate(parts):
        for spec in part.tensors:
            if spec.name in owner:
                raise InvalidRequest(
                    f"weights: tensor {spec.name!r} is given by rank {owner[spec.name]} and by rank {rank}; "
                    "each rank gives tensors of its own",
                    field=f"weights[{spec.name}]",
                )
            owner[spec.name] = rank
    missing = {spec.name for spec in wanted} - owner.keys()
    if missing:
        raise missing_tensor(min(missing))
    if len({(part.kind, part.codec) for part in parts}) > 1:
        raise InvalidRequest("weights: the ranks see directories of different forms; give all of them the same", field="weights")
    tensors = tuple(sorted((spec for part in parts for spec in part.tensors), key=lambda spec: spec.name))
    kind, codec = parts[0].kind, parts[0].codec
    if kind is Kind.DELTA and codec is Codec.CHANGED_TENSORS and not strict and all(part.complete for part in parts):
        kind, codec = Kind.FULL, Codec.SAFETENSORS
    size = sum(part.size for part in parts)
    return Content(
        kind=kind,
        codec=codec,
        tensors=tensors,
        weights_digest=weights_digest(tensors),
        worth_full=(
            not strict
            and codec is Codec.SPARSE
            and size >= tensor_sizes(tensors)  # mostly far from it, and then no header need be made
            and size >= full_size(tensors)
            and all(part.again for part in parts)
        ),
    )


def files_of(content: Content, receipts: Sequence[Receipts], directory: Sequence[LocalFile] | None) -> Receipts:
    """All ranks' files as those of one version. `directory`: the files that a full version of one consists of, sizes included.

    Raises CorruptObject where another file was uploaded than the directory holds, or one was not.
    """
    weights = [file for receipt in receipts for file in receipt.weights]
    files = tuple(file for receipt in receipts for file in receipt.files)
    if content.kind is Kind.FULL and directory is not None:
        _check_directory(weights, directory)
        return Receipts(weights=tuple(sorted(weights, key=lambda file: file.path)), files=files)
    paths = weight_paths(content.kind, len(weights))
    renamed = (StoredFile(path=path, key=f.key, size=f.size, blake3=f.blake3) for path, f in zip(paths, weights, strict=True))
    return Receipts(weights=tuple(renamed), files=files)


def _check_directory(weights: Sequence[StoredFile], directory: Sequence[LocalFile]) -> None:
    uploaded = {file.path: file.size for file in weights}
    for file in directory:
        size, found = file.source.stat().st_size, uploaded.pop(file.path, None)
        if found != size:
            what = "no rank uploaded it" if found is None else f"{found} bytes of it were uploaded"
            raise CorruptObject(f"{file.source}: {size} bytes, and {what}; do all ranks see the same directory?")
    if uploaded:
        raise CorruptObject(f"{min(uploaded)}: was uploaded by a rank, but is not in rank 0's directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of what all of them see. The same names and sizes are always divided in the same way."""

    rank: int
    size: int

    @property
    def whole(self) -> bool:
        return self.size == 1

    def names(self, sizes: Iterable[tuple[str, int]]) -> frozenset[str]:
        """Of things with these names and bytes: the largest first, each to the rank that has least."""
        if self.whole:
            return frozenset(name for name, _ in sizes)
        loads = [(0, rank) for rank in range(self.size)]
        mine: set[str] = set()
        for name, size in sorted(sizes, key=lambda row: (-row[1], row[0])):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + size, rank))
            if rank == self.rank:
                mine.add(name)
        return frozenset(mine)
