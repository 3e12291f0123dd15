"""Version directories as Slime and Miles write them, and what their loader makes of them: the format's facts, none of our code.

Facts (sources of August 2026): a full version is an ordinary sharded checkpoint, shards counted from 1. A delta's shards are
counted from 0, hold one zstd frame of level 1 for each changed tensor, and tell in their metadata the checksum of each tensor's new
state. The index is written last. An xor frame holds new ^ old; an overwrite frame a count, the positions of the changed bytes
and their new values, positions and count as little-endian u4.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors
import safetensors.numpy
import xxhash
import zstandard
from blake3 import blake3

from stitch.weights.header import DTYPES

ENCODINGS: Final = ("xor", "overwrite")
CHECKSUMS: Final = ("xxh3-128", "blake3", "adler32")
INDEX: Final = "model.safetensors.index.json"
Model = Mapping[str, np.ndarray[Any, np.dtype[Any]]]


def version_directory(root: Path, version: int) -> Path:
    return root / f"weight_v{version:06d}"


def write_full(root: Path, version: int, model: Model, *, shards: int = 2) -> Path:
    """A full version. The order of its tensors is the model's."""
    names = list(model)
    groups = [group for group in (names[i::shards] for i in range(shards)) if group]
    parts = {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}
    folder = version_directory(root, version)
    folder.mkdir(parents=True)
    for part, group in parts.items():
        _save(folder / part, {name: model[name] for name in group}, {"format": "pt"})
    total = sum(array.nbytes for array in model.values())
    weight_map = {name: part for part, group in parts.items() for name in group}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return folder


def write_delta(
    root: Path,
    version: int,
    old: Model,
    new: Model,
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    shards: int = 2,
) -> Path:
    """What changed from version - 1, in one shard per rank that has anything."""
    frames, sums = {}, {}
    for name, array in new.items():
        before, after = _bytes(old[name]), _bytes(array)
        if not np.array_equal(before, after):
            frames[name] = encode(before, after, encoding)
            sums[name] = checksum_of(checksum, after)
    names = sorted(frames)
    groups = [group for group in (names[i::shards] for i in range(shards)) if group]
    parts = {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}
    folder = version_directory(root, version)
    folder.mkdir(parents=True)
    for part, group in parts.items():
        data = {name: np.frombuffer(frames[name], np.uint8) for name in group}
        (folder / part).write_bytes(safetensors.numpy.save(data, metadata={name: sums[name] for name in group}))
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    weight_map = {name: part for part, group in parts.items() for name in group}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return folder


def encode(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], encoding: str) -> bytes:
    """One tensor's frame, of its bytes."""
    if encoding == "xor":
        content = (before ^ after).tobytes()
    else:
        where = np.flatnonzero(before != after).astype("<u4")
        content = struct.pack("<I", where.size) + where.tobytes() + after[where].tobytes()
    return frame(content)


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


def checksum_of(algorithm: str, data: np.ndarray[Any, Any]) -> str:
    raw = data.tobytes()
    digests = {
        "xxh3-128": lambda: xxhash.xxh3_128(raw).hexdigest(),
        "blake3": lambda: blake3(raw).hexdigest(),
        "adler32": lambda: f"{zlib.adler32(raw):08x}",
    }
    return digests[algorithm]()


def load(directory: Path, base: Mapping[str, bytes]) -> dict[str, bytes]:
    """Every tensor's bytes after the trainers' own loader applied the delta to `base`. Raises ValueError as that would."""
    index = json.loads((directory / INDEX).read_text())
    encoding, algorithm = index["metadata"]["delta_encoding"], index["metadata"]["checksum_format"]
    loaded = dict(base)
    for path in sorted(directory.glob("*.safetensors")):
        with safetensors.safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 # no mapping
                content = zstandard.ZstdDecompressor().decompress(file.get_tensor(name).tobytes())
                loaded[name] = _patched(loaded[name], content, encoding)
                if checksum_of(algorithm, np.frombuffer(loaded[name], np.uint8)) != file.metadata()[name]:
                    raise ValueError(f"checksum mismatch: {name}")
    return loaded


def _patched(old: bytes, content: bytes, encoding: str) -> bytes:
    target = np.frombuffer(old, np.uint8).copy()
    data = np.frombuffer(content, np.uint8)
    if encoding == "xor":
        if data.size != target.size:
            raise ValueError("the delta is of another tensor")
        target ^= data
    else:
        count = int.from_bytes(content[:4], "little")
        target[data[4 : 4 + 4 * count].view("<u4")] = data[4 + 4 * count :]
    return target.tobytes()


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _save(path: Path, tensors: Model, metadata: dict[str, str]) -> None:
    """By hand, since safetensors' numpy side knows no bfloat16."""
    known = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": known[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))
