"""The header of a safetensors file: names, dtypes, shapes and offsets, read strictly and written canonically.

A file is eight bytes of length (little-endian), that many bytes of JSON, then the data. The reader takes nothing on trust:
what it returns describes every byte of the data exactly once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np

from stitch.core.errors import CorruptObject

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own bound."""
MAX_NAME_BYTES: Final = 1024
MAX_RANK: Final = 32
METADATA: Final = "__metadata__"
"""The one key of a header that names no tensor."""
ALIGNMENT: Final = 8
"""Data begins at a multiple of it; the header is padded with spaces."""

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""safetensors' name of a dtype -> numpy's, little-endian. Types of less than a byte are not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a file. `begin` and `end` are byte offsets into the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes that a tensor takes. KeyError for a dtype outside the table."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def parse_header(header: bytes, data_bytes: int, source: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors in the order of their data, and the metadata. Raises CorruptObject naming `source`, the tensor and the field."""
    raw = _load_json(header, source)
    metadata = _parse_metadata(raw.pop(METADATA, {}), source)
    infos = sorted((_parse_tensor(name, row, source) for name, row in raw.items()), key=lambda t: (t.begin, t.end))
    position = 0
    for info in infos:
        if info.begin != position:
            what = "overlaps another tensor" if info.begin < position else f"leaves a hole after byte {position}"
            raise _corrupt(source, info.name, "data_offsets", what)
        position = info.end
    if position != data_bytes:
        raise CorruptObject(f"{source}: tensors take {position} bytes, the file holds {data_bytes}")
    return {info.name: info for info in infos}, metadata


def lay_out(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[TensorInfo, ...]:
    """Offsets for (name, dtype, shape), in the order given, without holes."""
    infos: list[TensorInfo] = []
    position = 0
    for name, dtype, shape in tensors:
        end = position + tensor_bytes(dtype, shape)
        infos.append(TensorInfo(name=name, dtype=dtype, shape=tuple(shape), begin=position, end=end))
        position = end
    return tuple(infos)


def format_header(infos: Iterable[TensorInfo], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and header, padded so that the data after it is aligned."""
    raw: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for info in infos:
        raw[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [info.begin, info.end]}
    text = json.dumps(raw, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _load_json(header: bytes, source: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CorruptObject(f"{source}: {key[:MAX_NAME_BYTES]!r} stands twice in the header")
            found[key] = value
        return found

    try:
        raw = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"{source}: header is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CorruptObject(f"{source}: header is not a JSON object")
    return raw


def _parse_metadata(raw: object, source: str) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise CorruptObject(f"{source}: {METADATA} is not an object of texts")
    return raw


def _parse_tensor(name: str, raw: object, source: str) -> TensorInfo:
    try:
        length = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise CorruptObject(f"{source}: the tensor name {name[:MAX_NAME_BYTES]!a} is not valid text") from None
    if not 0 < length <= MAX_NAME_BYTES:
        raise CorruptObject(f"{source}: a tensor name of {length} bytes; from 1 to {MAX_NAME_BYTES} are allowed")
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(source, name, "entry", "needs exactly dtype, shape and data_offsets")
    dtype = raw["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _corrupt(source, name, "dtype", f"{str(dtype)[:40]!r} is not one of {', '.join(DTYPES)}")
    shape = _counts(raw["shape"], MAX_RANK)
    if shape is None:
        raise _corrupt(source, name, "shape", f"is not a list of up to {MAX_RANK} whole numbers")
    offsets = _counts(raw["data_offsets"], 2)
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _corrupt(source, name, "data_offsets", "is not a pair [begin, end]")
    begin, end = offsets
    expected = tensor_bytes(dtype, shape)
    if end - begin != expected:
        raise _corrupt(source, name, "data_offsets", f"span {end - begin} bytes, not the {expected} of {dtype} {list(shape)}")
    return TensorInfo(name=name, dtype=dtype, shape=shape, begin=begin, end=end)


def _counts(raw: object, limit: int) -> tuple[int, ...] | None:
    if not isinstance(raw, list) or len(raw) > limit:
        return None
    for n in raw:
        if type(n) is not int or not 0 <= n < 2**63:
            return None
    return tuple(raw)


def _corrupt(source: str, name: str, field: str, what: str) -> CorruptObject:
    return CorruptObject(f"{source}: tensor {name!r}: {field} {what}")
