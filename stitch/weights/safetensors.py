"""Safetensors files and checkpoint directories, read and written without torch.

Readers map files into memory and trust nothing; writers stream, one tensor at a time. A checkpoint directory holds either one
`model.safetensors` or shards under the index that Hugging Face's tools write. Files may be symbolic links; content is read.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np
from blake3 import blake3

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import Digest
from stitch.weights.files import copy_range
from stitch.weights.header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    TensorInfo,
    format_header,
    lay_out,
    parse_header,
)
from stitch.weights.host import HostTensor, as_array, host_tensors

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"
DEFAULT_SHARD_BYTES: Final = 5 * 1000**3
"""The bound that Hugging Face's tools use."""
FILE_METADATA: Final = {"format": "pt"}
"""Loaders of Hugging Face's transformers refuse a file without it; it says nothing about the bytes."""
MAX_INDEX_BYTES: Final = 256 * 1024 * 1024
MAX_CARRIED_FILES: Final = 1_000
MAX_CARRIED_BYTES: Final = 512 * 1024 * 1024
"""Of one carried file: the largest tokenizers take a tenth of it."""
NOT_CARRIED: Final = frozenset({SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pkl", ".tmp"})
"""Other forms of the weights, optimizer states, pickles, and what a dead writer left."""


class TensorFile:
    """One safetensors file, mapped read-only. Its header is checked on opening; the data only by digests."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptObject naming the file, the tensor and the field; OSError where the file cannot be read."""
        self.path: Final = path
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            self._data_start, header = _read_header(handle, size, path)
            self.header_digest: Final = Digest(blake3(header).hexdigest())
            self._infos, self.metadata = parse_header(header, size - self._data_start, str(path))
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of their data."""
        return tuple(self._infos)

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return len(self._map)

    def spec(self, name: str) -> TensorInfo:
        """dtype, shape and offsets. KeyError for an unknown name."""
        return self._infos[name]

    def offset(self, name: str) -> int:
        """Where the tensor's bytes begin, counted from the start of the file."""
        return self._data_start + self._infos[name].begin

    def data(self, name: str) -> memoryview:
        """The tensor's bytes, read-only, not copied."""
        info = self._infos[name]
        return self._view[self._data_start + info.begin : self._data_start + info.end]

    def array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """A read-only array over the file's bytes; it may be unaligned. Copy it to keep it beyond the file."""
        info = self._infos[name]
        return as_array(self.data(name), info.dtype, info.shape)

    def tensor(self, name: str) -> HostTensor:
        info = self._infos[name]
        return HostTensor(name=name, dtype=info.dtype, shape=info.shape, data=self.data(name))

    def tensors(self) -> Iterator[HostTensor]:
        """All tensors, in the order of their data."""
        return map(self.tensor, self._infos)

    def close(self) -> None:
        """Unmaps the file, or leaves that to the last array over it. May be called twice."""
        self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TensorWriter:
    """Writes one file whose names, dtypes and shapes are known, tensor by tensor in that order.

    Leaving the context without an error demands that every tensor was written; the file is then whole but not flushed to disk.
    """

    def __init__(
        self, path: Path, layout: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path: Final = path
        self._infos = lay_out(layout)
        self._next = 0
        self._handle = path.open("wb")
        self._handle.write(format_header(self._infos, FILE_METADATA if metadata is None else metadata))

    def write(self, name: str, data: memoryview | bytes) -> None:
        """The next tensor's bytes. Raises InvalidRequest where another one was due or the length differs."""
        due = self._infos[self._next] if self._next < len(self._infos) else None
        view = memoryview(data).cast("B")
        if due is None or due.name != name or view.nbytes != due.end - due.begin:
            expected = f"{due.name!r} of {due.end - due.begin} bytes" if due else "no more tensors"
            raise InvalidRequest(f"{self.path.name}: tensor {name!r} of {view.nbytes} bytes given, {expected} expected")
        self._handle.write(view)
        self._next += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handle.close()
        if kind is None and self._next != len(self._infos):
            raise InvalidRequest(f"{self.path.name}: tensor {self._infos[self._next].name!r} was never written")


class TensorSpool:
    """Writes one file whose tensors are not known before: data first, to a file beside it, then behind the header."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._layout: list[tuple[str, str, tuple[int, ...]]] = []
        self._data_path = path.with_name(path.name + ".data.tmp")
        self._handle: BinaryIO = self._data_path.open("w+b")
        self.data_bytes = 0
        """Of the tensors so far."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self._layout)

    def write(self, tensor: HostTensor) -> None:
        self._handle.write(tensor.data)
        self._layout.append((tensor.name, tensor.dtype, tensor.shape))
        self.data_bytes += tensor.data.nbytes

    def finish(self) -> None:
        """Writes the file itself."""
        self._handle.flush()
        with self.path.open("wb") as out:
            out.write(format_header(lay_out(self._layout), FILE_METADATA))
            out.flush()
            copy_range(self._handle.fileno(), 0, out.fileno(), out.tell(), self.data_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handle.close()
        self._data_path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An open checkpoint directory. `weights` and `carried` are file names in it, sorted."""

    directory: Path
    weights: tuple[str, ...]
    carried: tuple[str, ...]
    files: Mapping[str, TensorFile]
    """Tensor name -> the file that holds it."""

    @property
    def names(self) -> tuple[str, ...]:
        """File by file, in the order of their data."""
        return tuple(self.files)

    def tensor(self, name: str) -> HostTensor:
        return self.files[name].tensor(name)

    def tensors(self) -> Iterator[HostTensor]:
        return map(self.tensor, self.files)

    def array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """As TensorFile.array. KeyError for an unknown name."""
        return self.files[name].array(name)

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_checkpoint(directory: Path) -> Checkpoint:
    """Opens a directory that holds a whole checkpoint.

    Raises InvalidRequest where it holds none, or files of two that were mixed; CorruptObject where a shard is missing, is not
    what the index says, or is no safetensors file.
    """
    if not directory.is_dir():
        raise InvalidRequest(f"checkpoint: {directory} is no directory", field="checkpoint")
    index = _read_index(directory / INDEX_FILE)
    single = (directory / WEIGHTS_FILE).exists()
    if index is None and not single:
        raise InvalidRequest(f"checkpoint: {directory} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}", field="checkpoint")
    shards = [WEIGHTS_FILE] if index is None else sorted(set(index.values()))
    _refuse_mixture(directory, shards)
    with contextlib.ExitStack() as opened:
        files: dict[str, TensorFile] = {}
        for shard in shards:
            if not (directory / shard).is_file():
                raise CorruptObject(f"{directory}: shard {shard} is missing")
            file = opened.enter_context(TensorFile(directory / shard))
            for name in file.names:
                if name in files:
                    raise CorruptObject(f"{directory}: tensor {name!r} is in {files[name].path.name} and in {shard}")
                files[name] = file
        if index is not None:
            _check_index(directory, index, files)
        opened.pop_all()
    return Checkpoint(directory=directory, weights=tuple(shards), carried=carried_files(directory), files=files)


def write_checkpoint(
    directory: Path, tensors: Mapping[str, Any] | Iterable[Any], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[str, ...]:
    """Writes tensors (a mapping, or an iterable of pairs or of HostTensor) as a checkpoint, holding one at a time in memory.

    One `model.safetensors` where they fit into `max_shard_bytes` of data, else shards and an index; a greater tensor gets one
    of its own. Returns the names of the weight files. Raises InvalidRequest where the directory already holds a checkpoint.
    """
    directory.mkdir(parents=True, exist_ok=True)
    present = sorted(p.name for p in directory.iterdir() if p.name.endswith(SUFFIX) or p.name == INDEX_FILE)
    if present:
        raise InvalidRequest(f"checkpoint: {directory} already holds {present[0]}; write into an empty directory")
    with _Shards(directory, max_shard_bytes) as shards:
        for tensor in host_tensors(tensors):
            shards.write(tensor)
        shards.finish()
    return _name_shards(directory, shards.written)


class _Shards:
    """Cuts a stream of tensors into files of bounded size."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._spool = TensorSpool(self._path(0))
        self.written: list[TensorSpool] = []

    def write(self, tensor: HostTensor) -> None:
        if self._spool.data_bytes and self._spool.data_bytes + tensor.data.nbytes > self._max_bytes:
            self.finish()
            self._spool = TensorSpool(self._path(len(self.written)))
        self._spool.write(tensor)

    def finish(self) -> None:
        with self._spool:
            self._spool.finish()
        self.written.append(self._spool)

    def _path(self, index: int) -> Path:
        return self._directory / f"shard-{index:05d}.tmp"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._spool.__exit__(kind, error, trace)
        if kind is not None:
            for path in self._directory.glob("shard-*.tmp"):
                path.unlink(missing_ok=True)


def _name_shards(directory: Path, shards: Sequence[TensorSpool]) -> tuple[str, ...]:
    if len(shards) == 1:
        shards[0].path.rename(directory / WEIGHTS_FILE)
        return (WEIGHTS_FILE,)
    names = tuple(f"model-{i + 1:05d}-of-{len(shards):05d}{SUFFIX}" for i in range(len(shards)))
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        shard.path.rename(directory / name)
        weight_map.update(dict.fromkeys(shard.names, name))
    index = {"metadata": {"total_size": sum(shard.data_bytes for shard in shards)}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return names


def _read_header(handle: BinaryIO, size: int, path: Path) -> tuple[int, bytes]:
    """Where the data begins, and the header's JSON."""
    handle.seek(0)
    length = int.from_bytes(handle.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CorruptObject(f"{path}: a header of {length} bytes in a file of {size} (at most {MAX_HEADER_BYTES})")
    return LENGTH_BYTES + length, handle.read(length)


def _read_index(path: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None where there is no index."""
    if not path.exists():
        return None
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise CorruptObject(f"{path}: more than {MAX_INDEX_BYTES} bytes")
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptObject(f"{path}: not readable as an index: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptObject(f"{path}: weight_map is no object or is empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_shard_name(shard):
            raise CorruptObject(f"{path}: weight_map[{name[:MAX_NAME_BYTES]!r}] names no {SUFFIX} file of this directory")
    return weight_map


def _is_shard_name(name: str) -> bool:
    return name.endswith(SUFFIX) and "/" not in name and "\\" not in name and "\0" not in name and len(name) <= 255


def _refuse_mixture(directory: Path, shards: Sequence[str]) -> None:
    """Two checkpoints written into one directory: which of them is meant, nobody can tell."""
    strays = sorted(p.name for p in directory.glob(f"model*{SUFFIX}") if p.name not in shards)
    if strays:
        raise InvalidRequest(
            f"checkpoint: {directory} holds {strays[0]} besides {', '.join(shards[:3])}; two checkpoints seem mixed",
            field="checkpoint",
        )


def _check_index(directory: Path, index: Mapping[str, str], files: Mapping[str, TensorFile]) -> None:
    for name, shard in index.items():
        if name not in files or files[name].path.name != shard:
            raise CorruptObject(f"{directory}: {INDEX_FILE} says that {shard} holds {name[:MAX_NAME_BYTES]!r}; it does not")
    extra = next((name for name in files if name not in index), None)
    if extra is not None:
        raise CorruptObject(f"{directory}: tensor {extra!r} of {files[extra].path.name} is not in {INDEX_FILE}")


def carried_files(directory: Path) -> tuple[str, ...]:
    """What goes along with the weights: regular files beside them, hidden ones and other forms of the weights left out."""
    names = []
    for path in directory.iterdir():
        if path.name.startswith(".") or path.name == INDEX_FILE or path.suffix in NOT_CARRIED or not path.is_file():
            continue
        if path.stat().st_size > MAX_CARRIED_BYTES:
            raise InvalidRequest(f"checkpoint: {path} is larger than {MAX_CARRIED_BYTES} bytes; move it elsewhere")
        names.append(path.name)
    if len(names) > MAX_CARRIED_FILES:
        raise InvalidRequest(f"checkpoint: {directory} holds more than {MAX_CARRIED_FILES} files beside the weights")
    return tuple(sorted(names))
