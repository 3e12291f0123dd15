"""Weights turned into the files that a publisher uploads.

Nothing is uploaded here and no base is read: a delta is made against the base's specs alone, since a tensor's state digest
tells whether it changed. One tensor at a time is held in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.core.ids import Digest
from stitch.core.manifest import Codec, Kind, TensorSpec, weights_digest
from stitch.weights.digest import spec_of, specs
from stitch.weights.safetensors import (
    DEFAULT_SHARD_BYTES,
    WEIGHTS_FILE,
    Checkpoint,
    TensorSpool,
    carried_files,
    open_checkpoint,
    write_checkpoint,
)
from stitch.weights.tensors import HostTensor, Weights, iterate

DELTA_FILE: Final = "delta.safetensors"
"""The checkpoint path of a changed-tensors delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A file to upload: `path` is its place in the checkpoint, `source` where it lies now."""

    path: str
    source: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """What a version consists of, on the local disk. `tensors` are those of the whole version, sorted by name."""

    kind: Kind
    codec: Codec
    weights: tuple[LocalFile, ...]
    files: tuple[LocalFile, ...]
    tensors: tuple[TensorSpec, ...]
    weights_digest: Digest
    complete: bool
    """Whether the files hold every tensor, so that the version needs no base."""

    def as_full(self) -> Encoded:
        """A complete delta as the full checkpoint that its file is. Raises InvalidRequest where it is not complete."""
        if self.kind is Kind.FULL:
            return self
        if not self.complete:
            raise InvalidRequest("weights: a delta that leaves tensors out is no full checkpoint", field="kind")
        weights = tuple(LocalFile(path=WEIGHTS_FILE, source=file.source) for file in self.weights)
        return replace(self, kind=Kind.FULL, codec=Codec.SAFETENSORS, weights=weights)


def encode_full(weights: Weights, scratch: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> Encoded:
    """A full checkpoint. A directory's own files are taken as they are; anything else is written into the empty `scratch`.

    The files must stay unchanged until they are uploaded. Raises InvalidRequest naming what is no tensor, CorruptObject for a
    damaged directory.
    """
    if isinstance(weights, Path):
        return _encode_directory(weights)
    found: list[TensorSpec] = []

    def tee() -> Iterator[HostTensor]:
        for tensor in iterate(weights):
            found.append(spec_of(tensor))
            yield tensor

    names = write_checkpoint(scratch, tee(), max_shard_bytes)
    files = tuple(LocalFile(path=name, source=scratch / name) for name in names)
    return _full(files, (), tuple(sorted(found, key=lambda spec: spec.name)))


def encode_delta(weights: Weights, base: Iterable[TensorSpec], scratch: Path) -> Encoded:
    """What changed against a base of these specs, as one file in the folder `scratch`.

    All tensors must be given, changed or not, with the base's names, dtypes and shapes, else InvalidRequest names the tensor.
    Where nothing changed the delta is empty; where everything did it is `complete`, and `as_full` spares readers the base.
    """
    before = {spec.name: spec for spec in base}
    found: list[TensorSpec] = []
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / DELTA_FILE
    with TensorSpool(path) as spool:
        for tensor in iterate(weights):
            spec = spec_of(tensor)
            if spec.state != _same_form(spec, before.get(spec.name)).state:
                spool.write(tensor)
            found.append(spec)
        if len(found) != len(before):
            missing = min(before.keys() - {spec.name for spec in found})
            raise InvalidRequest(
                f"weights: tensor {missing!r} of the base is not given; give all tensors, or publish with kind='full'",
                field=f"weights[{missing}]",
            )
        spool.finish()
        complete = len(spool.names) == len(found)
    found.sort(key=lambda spec: spec.name)
    return Encoded(
        kind=Kind.DELTA,
        codec=Codec.CHANGED_TENSORS,
        weights=(LocalFile(path=DELTA_FILE, source=path),),
        files=carried(weights),
        tensors=tuple(found),
        weights_digest=weights_digest(found),
        complete=complete,
    )


def carried(weights: Weights) -> tuple[LocalFile, ...]:
    """What goes along with weights given as a directory; nothing for the other forms."""
    if not isinstance(weights, Path):
        return ()
    return tuple(LocalFile(path=name, source=weights / name) for name in carried_files(weights))


def directory_files(directory: Path) -> tuple[LocalFile, ...]:
    """The files of a full version of this checkpoint directory, known before its tensors are read. Raises CorruptObject."""
    with open_checkpoint(directory) as checkpoint:
        return (*_weights_of(directory, checkpoint), *carried(directory))


def _encode_directory(directory: Path) -> Encoded:
    with open_checkpoint(directory) as checkpoint:
        tensors = specs(checkpoint.tensors())
        return _full(_weights_of(directory, checkpoint), carried(directory), tensors)


def _weights_of(directory: Path, checkpoint: Checkpoint) -> tuple[LocalFile, ...]:
    return tuple(LocalFile(path=name, source=directory / name) for name in checkpoint.weights)


def _full(weights: tuple[LocalFile, ...], files: tuple[LocalFile, ...], tensors: tuple[TensorSpec, ...]) -> Encoded:
    return Encoded(
        kind=Kind.FULL,
        codec=Codec.SAFETENSORS,
        weights=weights,
        files=files,
        tensors=tensors,
        weights_digest=weights_digest(tensors),
        complete=True,
    )


def _same_form(spec: TensorSpec, base: TensorSpec | None) -> TensorSpec:
    """The base's spec of a tensor, if the form is the same."""
    where = f"weights[{spec.name}]"
    if base is None:
        raise InvalidRequest(f"weights: tensor {spec.name!r} is not in the base; publish with kind='full'", field=where)
    if (spec.dtype, spec.shape) != (base.dtype, base.shape):
        raise InvalidRequest(
            f"weights: tensor {spec.name!r} is {spec.dtype} {list(spec.shape)}, in the base {base.dtype} {list(base.shape)}; "
            "publish with kind='full'",
            field=where,
        )
    return base
