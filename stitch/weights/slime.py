"""Version directories that Slime and Miles write: told from half-written ones, and their deltas transcoded.

A version is a directory `weight_v000007`. A full one is an ordinary checkpoint. A delta's index says what it is against and how it
is encoded; each changed tensor is a zstd frame in a safetensors file, whose metadata holds a checksum of the tensor's new state.
Nothing of it is trusted before that checksum agrees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import StateDigest
from stitch.core.manifest import MAX_FILES, TensorSpec
from stitch.weights.header import MAX_NAME_BYTES, tensor_bytes
from stitch.weights.host import HostTensor
from stitch.weights.ordered import in_order
from stitch.weights.safetensors import INDEX_FILE, MAX_INDEX_BYTES, SUFFIX, WEIGHTS_FILE, TensorFile
from stitch.weights.slime_decode import CHECKSUM_DIGITS, checksum, read_overwrite, read_xor
from stitch.weights.sparse import SparseTensor, encode, from_overwrite, from_xor, unit_bytes

Encoding = Literal["xor", "overwrite"]
Base = Callable[[str], tuple[HostTensor, StateDigest]]
"""A tensor of the version that a delta is against, with its state digest. KeyError where it has none of that name."""

_DIRECTORY = re.compile(r"weight_v([0-9]{1,15})\Z")
_WHOLE = re.compile(r"[0-9]{1,15}\Z")
_SHARD = re.compile(r"[^/\\\0]{1,200}\.safetensors\Z")
_UNFINISHED: Final = ".tmp"
"""Both write each file under such a name first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One tensor's frame in a file, and the checksum that is `expected` of its new state. `state`: the old one's digest."""

    name: str
    where: str
    frame: memoryview
    expected: str
    state: StateDigest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeDelta:
    """A delta directory whose index and headers are whole. No file is held open. `files` are names in it, sorted."""

    directory: Path
    version: int
    base_version: int
    encoding: Encoding
    checksum: str
    files: tuple[str, ...]
    places: Mapping[str, str]
    """Tensor -> the file that it is taken from."""

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors that it changes."""
        return frozenset(self.places)

    def changed(
        self, base: Base, files: Sequence[str] | None = None, names: Collection[str] | None = None
    ) -> Iterator[tuple[HostTensor, SparseTensor]]:
        """The new tensors, each held against the trainer's checksum of it, and what changed in them; never one that did not.

        Of all files and tensors, or of those given: no others are decoded. Several are worked on at once (`ordered.in_order`), of
        each its new bytes and its frame's content; `base` is asked in the caller's thread, and what it gives must stay as it is
        until the end. Raises CorruptObject naming file and tensor where the frame is damaged or the checksum does not agree,
        InvalidRequest where the base has no such tensor.
        """
        entries: dict[str, _Entry] = {}

        def old() -> Iterator[HostTensor]:
            for entry in self._entries(files, names):
                tensor, state = _found(base, entry, f"version {self.base_version}, which the delta is against")
                entries[entry.name] = replace(entry, state=state)
                yield tensor

        def change(tensor: HostTensor) -> tuple[HostTensor, SparseTensor] | None:
            return self._change(entries.pop(tensor.name), tensor)  # a frame that is held keeps its file open

        for _, found in in_order(old(), change, copy=False):
            if found is not None:
                yield found

    def transcoded(self, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, bytes]]:
        """What changed in each tensor, as a blob made without any bytes of the base, whose specs alone are needed.

        Such blobs cannot be held against the trainer's checksums, and are larger than those of `changed`, which knows the old
        bytes. Raises as that does.
        """
        for entry in self._entries(None, None):
            spec = specs.get(entry.name)
            if spec is None:
                raise InvalidRequest(
                    f"{entry.where} is not in version {self.base_version}, which the delta is against", field=entry.name
                )
            size, width = tensor_bytes(spec.dtype, spec.shape), unit_bytes(spec.dtype)
            if self.encoding == "xor":
                blob = from_xor(read_xor(entry.frame, size, entry.where), width=width)
            else:
                # Positions are those of bytes, and of a unit perhaps one byte alone: the blob is in bytes too.
                positions, values = read_overwrite(entry.frame, size, entry.where)
                blob = from_overwrite(positions, values, size=size, width=1)
            if blob is not None:
                yield entry.name, blob

    def matches(self, held: Base, names: Collection[str] | None = None) -> bool:
        """Whether tensors that are held are already what this delta leads to, by the trainer's checksums. Decodes nothing.

        `held` gives those of the version itself; of all tensors that the delta names, or of those given. What it does not name
        must equal the base's, which is for the caller to know.
        """
        return all(
            checksum(self.checksum, _found(held, entry, f"version {self.version}")[0].data, entry.where) == entry.expected
            for entry in self._entries(None, names)
        )

    def _entries(self, files: Sequence[str] | None, names: Collection[str] | None) -> Iterator[_Entry]:
        """File by file; a frame stays readable as long as it is held."""
        for part in self.files if files is None else files:
            if part not in self.files:
                raise InvalidRequest(f"{self.directory}: {part[:MAX_NAME_BYTES]!r} is no file of this delta", field="files")
            with TensorFile(self.directory / part) as file:
                for name in file.names:
                    if self.places.get(name) == part and (names is None or name in names):
                        where = f"{file.path}: tensor {name!r}"
                        yield _Entry(name=name, where=where, frame=file.data(name), expected=file.metadata.get(name, ""))

    def _change(self, entry: _Entry, old: HostTensor) -> tuple[HostTensor, SparseTensor] | None:
        """None where the new bytes are the old ones."""
        new = memoryview(bytearray(old.data))
        data = np.frombuffer(new, np.uint8) if new.nbytes else np.empty(0, np.uint8)
        if self.encoding == "xor":
            data ^= np.frombuffer(read_xor(entry.frame, new.nbytes, entry.where), np.uint8)
        else:
            positions, values = read_overwrite(entry.frame, new.nbytes, entry.where)
            data[positions] = values
        found = checksum(self.checksum, new, entry.where)
        if found != entry.expected:
            raise CorruptObject(
                f"{entry.where}: its {self.checksum} after the change is {found}, not {entry.expected}; "
                f"either the file is damaged or what it was applied to is not version {self.base_version} of this trainer"
            )
        assert entry.state is not None
        change = encode(old.data, new, width=unit_bytes(old.dtype), state=entry.state)
        return None if change is None else (replace(old, data=new.toreadonly()), change)


def _found(base: Base, entry: _Entry, version: str) -> tuple[HostTensor, StateDigest]:
    try:
        return base(entry.name)
    except KeyError:
        raise InvalidRequest(f"{entry.where} is not in {version}", field=entry.name) from None


def number_of(directory: Path) -> int | None:
    """The version that a directory's name says; None for any other name."""
    match = _DIRECTORY.match(directory.name)
    return int(match[1]) if match else None


def detect(directory: Path) -> SlimeDelta | None:
    """The delta in a directory, or None where it is no delta: a full checkpoint, or nothing of theirs.

    Raises InvalidRequest or CorruptObject for a directory that is half-written: files not yet renamed, no index, shards missing
    or short, an index of another version. Reads the index and the shards' headers.
    """
    if number_of(directory) is not None:
        _refuse_unfinished(directory)
    index = _read_index(directory / INDEX_FILE)
    metadata = {} if index is None else index.get("metadata")
    if index is None:
        return None
    if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
        _refuse_frames(directory)
        return None
    _refuse_unfinished(directory)
    return _read_delta(directory, metadata, _weight_map(directory, index.get("weight_map")))


def _refuse_unfinished(directory: Path) -> None:
    try:
        names = sorted(path.name for path in directory.iterdir())
    except NotADirectoryError:
        names = []
    except FileNotFoundError:
        raise InvalidRequest(f"{directory}: no such version directory", field="directory") from None
    unfinished = next((name for name in names if name.endswith(_UNFINISHED)), None)
    if unfinished is not None:
        raise InvalidRequest(
            f"{directory}: {unfinished} is not renamed yet; the version is still being written, or its writer died",
            field="directory",
        )
    if INDEX_FILE not in names and WEIGHTS_FILE not in names:
        what = "holds shards but no" if any(name.endswith(SUFFIX) for name in names) else "has no"
        raise InvalidRequest(
            f"{directory}: {what} {INDEX_FILE}; the version is still being written, or its writer died", field="directory"
        )


def _refuse_frames(directory: Path) -> None:
    """An index that lost the word which makes it a delta's must not turn frames into weights."""
    shard = min(directory.glob(f"*{SUFFIX}"), default=None)
    if shard is None:
        return
    with TensorFile(shard) as file:
        if file.names and file.metadata.keys() >= set(file.names):
            raise CorruptObject(f"{shard}: holds the frames of a delta, of which {INDEX_FILE} says nothing")


def _read_index(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise CorruptObject(f"{path}: more than {MAX_INDEX_BYTES} bytes")
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"{path}: not readable as an index: {error!r}") from error
    if not isinstance(raw, dict):
        raise CorruptObject(f"{path}: no JSON object")
    return raw


def _weight_map(directory: Path, raw: object) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise CorruptObject(f"{directory / INDEX_FILE}: weight_map is no object")
    for name, shard in raw.items():
        if not isinstance(shard, str) or not _SHARD.match(shard):
            raise CorruptObject(
                f"{directory / INDEX_FILE}: weight_map[{name[:MAX_NAME_BYTES]!r}] names no {SUFFIX} file of this directory"
            )
    if len(set(raw.values())) > MAX_FILES:
        raise CorruptObject(f"{directory / INDEX_FILE}: weight_map names more than {MAX_FILES} files")
    return raw


def _read_delta(directory: Path, metadata: dict[str, Any], places: dict[str, str]) -> SlimeDelta:
    where = directory / INDEX_FILE
    version, base_version = _whole(metadata, "version", where), _whole(metadata, "base_version", where)
    named = number_of(directory)
    if named is not None and named != version:
        raise InvalidRequest(f"{where}: metadata.version is {version}, the directory is that of {named}", field="metadata.version")
    if base_version >= version:
        raise CorruptObject(f"{where}: metadata.base_version {base_version} is not before version {version}")
    _one_of(metadata, "compression_format", ("zstd",), where)
    delta = SlimeDelta(
        directory=directory,
        version=version,
        base_version=base_version,
        encoding="xor" if _one_of(metadata, "delta_encoding", ("xor", "overwrite"), where) == "xor" else "overwrite",
        checksum=_one_of(metadata, "checksum_format", tuple(CHECKSUM_DIGITS), where),
        files=tuple(sorted(set(places.values()))),
        places=places,
    )
    _check_shards(delta)
    return delta


def _whole(metadata: dict[str, Any], key: str, where: Path) -> int:
    value = metadata.get(key)
    if not isinstance(value, str) or not _WHOLE.match(value):
        raise CorruptObject(f"{where}: metadata.{key} is no whole number: {str(value)[:80]!r}")
    return int(value)


def _one_of(metadata: dict[str, Any], key: str, known: tuple[str, ...], where: Path) -> str:
    value = metadata.get(key)
    if value not in known:
        raise InvalidRequest(f"{where}: metadata.{key} is {str(value)[:80]!r}, not {' or '.join(known)}", field=f"metadata.{key}")
    return str(value)


def _check_shards(delta: SlimeDelta) -> None:
    """That the files hold exactly the tensors that the index names, each with a checksum."""
    present = {path.name for path in delta.directory.glob(f"*{SUFFIX}")}
    missing, stray = sorted(set(delta.files) - present), sorted(present - set(delta.files))
    if missing:
        raise CorruptObject(f"{delta.directory}: shard {missing[0]} is missing; the version is half-written")
    if stray:
        raise InvalidRequest(
            f"{delta.directory}: {INDEX_FILE} does not name {stray[0]}; two versions seem mixed", field="directory"
        )
    found: set[str] = set()
    for name in delta.files:
        with TensorFile(delta.directory / name) as file:
            for tensor in file.names:
                _check_entry(delta, file, tensor)
                found.add(tensor)
    absent = min(delta.names - found, default=None)
    if absent is not None:
        raise CorruptObject(f"{delta.directory}: {INDEX_FILE} says that {delta.places[absent]} holds {absent!r}; it does not")


def _check_entry(delta: SlimeDelta, file: TensorFile, name: str) -> None:
    info = file.spec(name)
    if info.dtype != "U8" or len(info.shape) != 1:
        raise CorruptObject(f"{file.path}: tensor {name!r} is {info.dtype} {list(info.shape)}, not a frame of bytes")
    digest = file.metadata.get(name, "")
    if not re.fullmatch(f"[0-9a-f]{{{CHECKSUM_DIGITS[delta.checksum]}}}", digest):
        raise CorruptObject(f"{file.path}: tensor {name!r}: no {delta.checksum} checksum but {digest[:80]!r}")
    place = delta.places.get(name)
    if place is None:
        raise CorruptObject(f"{file.path}: tensor {name!r} is not in {INDEX_FILE}")
    if place != file.path.name:
        _check_twin(delta, file, name, digest)


def _check_twin(delta: SlimeDelta, file: TensorFile, name: str, digest: str) -> None:
    """Ranks that share a parameter may each write it (Slime with pipeline stages): one is taken, if both say the same."""
    with TensorFile(delta.directory / delta.places[name]) as other:
        if name not in other.names or other.metadata.get(name) != digest or other.data(name) != file.data(name):
            raise CorruptObject(f"{delta.directory}: tensor {name!r} is in {file.path.name} and differs in {delta.places[name]}")
