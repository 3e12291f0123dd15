"""Weights turned into the files that a publisher uploads.

Nothing is uploaded here, but each file is told of as soon as it is complete (`Hooks.emit`), while the next one is made. Several
tensors are worked on at once (`stitch.weights.ordered`). In memory are, beside what the caller
holds: the blobs of the tensors in work (one more than threads, 512 MiB of tensors at most or one larger), and one pack of blobs,
64 MiB at most; for an iterable the tensors in work are copied, and as many bytes of buffers may lie idle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

from stitch.core.errors import InvalidRequest
from stitch.core.ids import Digest
from stitch.core.manifest import Codec, Kind, TensorSpec, weights_digest
from stitch.weights.digest import spec_of, state_digest
from stitch.weights.header import format_header, lay_out, tensor_bytes
from stitch.weights.ordered import in_order
from stitch.weights.safetensors import (
    FILE_METADATA,
    SUFFIX,
    WEIGHTS_FILE,
    TensorSpool,
    TensorWriter,
    carried_files,
    open_checkpoint,
)
from stitch.weights.sparse import SparseTensor, encode_whole, unit_bytes
from stitch.weights.sparse import encode as encode_sparse_tensor
from stitch.weights.tensors import HostTensor, Weights, iterate

DELTA_FILE: Final = "delta.safetensors"
"""The checkpoint path of a delta that is one file."""
SHARD_BYTES: Final = 1024 * 1024 * 1024
"""Of a full version that is not a directory's own: one shard is on its way while the next is written."""
PACK_BYTES: Final = 64 * 1024 * 1024
"""At most of blobs in one file of a sparse delta: it is held in memory until it is complete, and is then on its way."""
MIN_PACK_BYTES: Final = 2 * 1024 * 1024
"""Smaller files cost a store more than they save."""
PACK_SHARE: Final = 1 / 8
"""Of what was packed before, for the next file: what is left to upload once all is encoded stays small beside the whole."""

R = TypeVar("R")
Old = Callable[[TensorSpec], HostTensor | None]
"""The bytes of a tensor of the base, where they are at hand; asked for from many threads."""


class FileState(NamedTuple):
    """By what a file that was written again differs from what it was."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A file to upload: `path` is its place in the checkpoint, `source` where it lies now."""

    path: str
    source: Path
    seen: FileState | None = None
    """How a file that others may write to was before its tensors were read: it is read once more when it is uploaded."""

    def changed(self) -> bool:
        """Whether it is another file by now, as far as that shows from outside."""
        return self.seen is not None and self.seen != FileState.of(self.source)


def _ignore(_: object) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a publisher wants to be told, and which tensors it asks for.

    `emit`: a file is complete and stays as it is until the end. `told`: one more tensor is done. `keep`: a tensor passes by, in a
    worker thread. `only`: tensors of a directory that count, where other ranks see to the others. `share`: so that a base's
    tensors that are not given are no error.
    """

    emit: Callable[[Path], None] = _ignore
    told: Callable[[HostTensor], None] = _ignore
    keep: Callable[[HostTensor], None] = _ignore
    only: Collection[str] | None = None
    share: bool = False


SILENT: Final = Hooks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """What a version consists of, on the local disk. `tensors` are those of the whole version, or share, sorted by name."""

    kind: Kind
    codec: Codec
    weights: tuple[LocalFile, ...]
    files: tuple[LocalFile, ...]
    tensors: tuple[TensorSpec, ...]
    complete: bool
    """Whether the files hold every tensor whole, so that the version needs no base."""

    @property
    def weights_digest(self) -> Digest:
        """Of all tensors; computed at each look."""
        return weights_digest(self.tensors)

    @property
    def size(self) -> int:
        """Of the weight files, in bytes."""
        return sum(file.source.stat().st_size for file in self.weights)


def encode_full(weights: Weights, scratch: Path, *, max_shard_bytes: int | None = None, hooks: Hooks = SILENT) -> Encoded:
    """A full checkpoint. A directory's own files are taken as they are; anything else is written into the folder `scratch`.

    The files must stay unchanged until they are uploaded. Raises InvalidRequest naming what is no tensor, CorruptObject for a
    damaged directory.
    """
    found: list[TensorSpec] = []
    if isinstance(weights, Path):
        files = weight_files(weights)
        for _, spec in _worked(weights, spec_of, hooks):
            found.append(spec)
        return _encoded(Kind.FULL, Codec.SAFETENSORS, files, carried(weights), found, complete=True)
    with _Shards(scratch, SHARD_BYTES if max_shard_bytes is None else max_shard_bytes, hooks.emit) as shards:
        for tensor, spec in _worked(weights, spec_of, hooks):
            shards.write(tensor)
            found.append(spec)
        paths = shards.finish()
    return _encoded(Kind.FULL, Codec.SAFETENSORS, _named(Kind.FULL, paths), (), found, complete=True)


def encode_delta(weights: Weights, base: Iterable[TensorSpec], scratch: Path, *, hooks: Hooks = SILENT) -> Encoded:
    """The tensors that changed against a base of these specs, each whole, as one file in the folder `scratch`.

    All tensors must be given, changed or not, with the base's names, dtypes and shapes, else InvalidRequest names the tensor.
    Where nothing changed the delta is empty; where everything did it is `complete`, and its file a full checkpoint.
    """
    before = {spec.name: spec for spec in base}
    found: list[TensorSpec] = []
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / DELTA_FILE

    def changed(tensor: HostTensor) -> tuple[TensorSpec, bool]:
        old = same_form(tensor, before.get(tensor.name))
        spec = spec_of(tensor)
        return spec, spec.state != old.state

    with TensorSpool(path) as spool:
        for tensor, (spec, is_new) in _worked(weights, changed, hooks):
            if is_new:
                spool.write(tensor)
            found.append(spec)
        _check_all_given(before, found, hooks)
        spool.finish()
        complete = len(spool.names) == len(found)
    hooks.emit(path)
    return _encoded(Kind.DELTA, Codec.CHANGED_TENSORS, _named(Kind.DELTA, [path]), carried(weights), found, complete=complete)


def encode_sparse(weights: Weights, base: Iterable[TensorSpec], old: Old, scratch: Path, *, hooks: Hooks = SILENT) -> Encoded:
    """What changed in each tensor against a base of these specs, as files of blobs in the folder `scratch`; none where nothing did.

    As `encode_delta`, but a tensor whose old bytes `old` gives costs what changed in it. Its new digest follows from the words that
    changed, so those bytes must be the base's.
    """
    before = {spec.name: spec for spec in base}

    def change(tensor: HostTensor) -> SparseTensor | None:
        return _change(tensor, same_form(tensor, before.get(tensor.name)), old)

    return encode_changes(_worked(weights, change, hooks), before.values(), scratch, files=carried(weights), hooks=hooks)


def encode_changes(
    changes: Iterable[tuple[HostTensor, SparseTensor | None]],
    base: Iterable[TensorSpec],
    scratch: Path,
    *,
    files: tuple[LocalFile, ...] = (),
    rest_unchanged: bool = False,
    hooks: Hooks = SILENT,
) -> Encoded:
    """A sparse delta of changes that are known already. `rest_unchanged`: tensors that are not among them are the base's."""
    before = {spec.name: spec for spec in base}
    found: dict[str, TensorSpec] = dict(before) if rest_unchanged else {}
    packs = _Packs(scratch, hooks.emit)
    for tensor, change in changes:
        spec = before[tensor.name]
        if change is not None:
            spec = replace(spec, state=change.state)
            packs.add(tensor.name, change.blob)
        found[tensor.name] = spec
    _check_all_given(before, found.values(), hooks)
    paths = packs.finish()
    return _encoded(Kind.DELTA, Codec.SPARSE, _named(Kind.DELTA, paths), files, found.values(), complete=False)


def digest_all(weights: Weights, *, hooks: Hooks = SILENT) -> tuple[TensorSpec, ...]:
    """Specs of all tensors and nothing else, sorted by name."""
    return tuple(sorted((spec for _, spec in _worked(weights, spec_of, hooks)), key=lambda spec: spec.name))


def tensor_sizes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of all tensors: what a full version of them takes."""
    return sum(tensor_bytes(spec.dtype, spec.shape) for spec in specs)


def full_size(specs: Sequence[TensorSpec]) -> int:
    """Bytes of a full version of these tensors as one file."""
    header = format_header(lay_out((spec.name, spec.dtype, spec.shape) for spec in specs), FILE_METADATA)
    return len(header) + tensor_sizes(specs)


def carried(weights: Weights) -> tuple[LocalFile, ...]:
    """What goes along with weights given as a directory; nothing for the other forms."""
    if not isinstance(weights, Path):
        return ()
    return tuple(LocalFile(path=name, source=weights / name) for name in carried_files(weights))


def weight_files(directory: Path) -> tuple[LocalFile, ...]:
    """The files of weights of a checkpoint directory, as they are now. Raises CorruptObject, InvalidRequest."""
    with open_checkpoint(directory) as checkpoint:
        sources = {name: directory / name for name in checkpoint.weights}
        return tuple(LocalFile(path=name, source=path, seen=FileState.of(path)) for name, path in sources.items())


def weight_paths(kind: Kind, count: int) -> tuple[str, ...]:
    """The checkpoint paths of so many files of weights: for a full version those that Hugging Face's tools use."""
    single, many = (WEIGHTS_FILE, "model") if kind is Kind.FULL else (DELTA_FILE, "delta")
    if count == 1:
        return (single,)
    return tuple(f"{many}-{index + 1:05d}-of-{count:05d}{SUFFIX}" for index in range(count))


def check_form(directory: Path, base: Iterable[TensorSpec]) -> None:
    """Raises InvalidRequest naming a tensor where a checkpoint directory has not the names, dtypes and shapes of a base."""
    before = {spec.name: spec for spec in base}
    with open_checkpoint(directory) as checkpoint:
        for tensor in checkpoint.tensors():
            same_form(tensor, before.pop(tensor.name, None))
    if before:
        raise missing_tensor(min(before))


def same_form(tensor: HostTensor, base: TensorSpec | None) -> TensorSpec:
    """The base's spec of a tensor, if the form is the same, else InvalidRequest."""
    where = f"weights[{tensor.name}]"
    if base is None:
        raise InvalidRequest(f"weights: tensor {tensor.name!r} is not in the base; publish with kind='full'", field=where)
    if (tensor.dtype, tensor.shape) != (base.dtype, base.shape):
        raise InvalidRequest(
            f"weights: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, in the base {base.dtype} {list(base.shape)}; "
            "publish with kind='full'",
            field=where,
        )
    return base


class _Packs:
    """Blobs gathered into files of bounded size; a blob that is larger gets a file of its own."""

    def __init__(self, scratch: Path, emit: Callable[[Path], None]) -> None:
        self._scratch, self._emit = scratch, emit
        self._blobs: list[tuple[str, bytes]] = []
        self._size = self._total = 0
        self._written: list[Path] = []

    @property
    def _limit(self) -> int:
        return min(PACK_BYTES, max(MIN_PACK_BYTES, int(self._total * PACK_SHARE)))

    def add(self, name: str, blob: bytes) -> None:
        if self._blobs and self._size + len(blob) > self._limit:
            self._write()
        self._blobs.append((name, blob))
        self._size += len(blob)

    def finish(self) -> tuple[Path, ...]:
        if self._blobs:
            self._write()
        return tuple(self._written)

    def _write(self) -> None:
        self._scratch.mkdir(parents=True, exist_ok=True)
        path = self._scratch / f"pack-{len(self._written):05d}{SUFFIX}"
        with TensorWriter(path, [(name, "U8", (len(blob),)) for name, blob in self._blobs]) as writer:
            for name, blob in self._blobs:
                writer.write(name, blob)
        self._total += self._size
        self._blobs, self._size = [], 0
        self._written.append(path)
        self._emit(path)


class _Shards:
    """A stream of tensors cut into safetensors files of bounded size; a tensor that is larger gets a file of its own."""

    def __init__(self, scratch: Path, max_bytes: int, emit: Callable[[Path], None]) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self._scratch, self._max_bytes, self._emit = scratch, max_bytes, emit
        self._written: list[Path] = []
        self._spool = self._next()

    def write(self, tensor: HostTensor) -> None:
        if self._spool.data_bytes and self._spool.data_bytes + tensor.data.nbytes > self._max_bytes:
            self._end()
            self._spool = self._next()
        self._spool.write(tensor)

    def finish(self) -> tuple[Path, ...]:
        self._end()
        return tuple(self._written)

    def _next(self) -> TensorSpool:
        return TensorSpool(self._scratch / f"shard-{len(self._written):05d}{SUFFIX}")

    def _end(self) -> None:
        with self._spool:
            self._spool.finish()
        self._written.append(self._spool.path)
        self._emit(self._spool.path)

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._spool.__exit__(None, None, None)


def _worked(weights: Weights, act: Callable[[HostTensor], R], hooks: Hooks) -> Iterator[tuple[HostTensor, R]]:
    """Each tensor with what `act` makes of it, as `in_order`."""

    def kept(tensor: HostTensor) -> R:
        result = act(tensor)
        hooks.keep(tensor)
        return result

    for tensor, result in in_order(_given(weights, hooks.only), kept, copy=not isinstance(weights, Mapping | Path)):
        yield tensor, result
        hooks.told(tensor)


def _given(weights: Weights, only: Collection[str] | None) -> Iterator[HostTensor]:
    if isinstance(weights, Path) and only is not None:
        with open_checkpoint(weights) as checkpoint:
            yield from (checkpoint.tensor(name) for name in checkpoint.names if name in only)
    else:
        yield from iterate(weights)


def _change(tensor: HostTensor, spec: TensorSpec, old: Old) -> SparseTensor | None:
    """Against the old bytes; without them a tensor that changed goes as a whole."""
    width = unit_bytes(tensor.dtype)
    base = old(spec)
    if base is not None:
        return encode_sparse_tensor(base.data, tensor.data, width=width, state=spec.state)
    return None if state_digest(tensor.data) == spec.state else encode_whole(tensor.data, width=width)


def _check_all_given(before: Mapping[str, TensorSpec], found: Iterable[TensorSpec], hooks: Hooks) -> None:
    missing = before.keys() - {spec.name for spec in found}
    if missing and not hooks.share:
        raise missing_tensor(min(missing))


def missing_tensor(name: str) -> InvalidRequest:
    """That a tensor of the base was not given."""
    return InvalidRequest(
        f"weights: tensor {name!r} of the base is not given; give all tensors, or publish with kind='full'",
        field=f"weights[{name}]",
    )


def _named(kind: Kind, paths: Sequence[Path]) -> tuple[LocalFile, ...]:
    names = weight_paths(kind, len(paths))
    return tuple(LocalFile(path=name, source=path) for name, path in zip(names, paths, strict=True))


def _encoded(
    kind: Kind,
    codec: Codec,
    weights: tuple[LocalFile, ...],
    files: tuple[LocalFile, ...],
    tensors: Iterable[TensorSpec],
    *,
    complete: bool,
) -> Encoded:
    ordered = tuple(sorted(tensors, key=lambda spec: spec.name))
    return Encoded(
        kind=kind,
        codec=codec,
        weights=weights,
        files=files,
        tensors=ordered,
        complete=complete,
    )
