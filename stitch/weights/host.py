"""Tensors as bytes in host memory: what every codec, digest and file works on.

numpy arrays (with ml_dtypes) and torch tensors are taken, on whatever device; torch itself is never imported, since whoever
hands over a torch tensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stitch.core.errors import InvalidRequest
from stitch.weights.header import DTYPES, MAX_NAME_BYTES, MAX_RANK, METADATA

_NUMPY_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_TORCH_NAMES: Final = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.uint16": "U16",
    "torch.int16": "I16",
    "torch.uint32": "U32",
    "torch.int32": "I32",
    "torch.uint64": "U64",
    "torch.int64": "I64",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTensor:
    """A tensor's name, safetensors dtype, shape, and bytes: little-endian, C order, contiguous, format `B`.

    The bytes may be those of the object that it was made from: they are good until that object changes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def array(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The same memory as an array of the tensor's dtype and shape."""
        return as_array(self.data, self.dtype, self.shape)


def as_array(data: memoryview, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """An array over the bytes, which it does not copy; writable where they are."""
    if not data.nbytes:
        return np.empty(shape, DTYPES[dtype])
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def host_tensor(name: str, value: object) -> HostTensor:
    """A numpy array, torch tensor or HostTensor under a name. Raises InvalidRequest naming the tensor."""
    check_tensor_name(name)
    if isinstance(value, np.ndarray | np.generic):
        tensor = _from_numpy(name, np.asarray(value))
    elif isinstance(value, HostTensor):
        tensor = HostTensor(name=name, dtype=value.dtype, shape=value.shape, data=value.data)
    elif _is_torch(value):
        tensor = _from_torch(name, value)
    else:
        raise _invalid(name, f"is a {type(value).__module__}.{type(value).__qualname__}; give a numpy array or a torch tensor")
    if len(tensor.shape) > MAX_RANK:
        raise _invalid(name, f"has {len(tensor.shape)} dimensions; up to {MAX_RANK} are allowed")
    return tensor


def host_tensors(weights: Mapping[str, Any] | Iterable[Any]) -> Iterator[HostTensor]:
    """The tensors of a mapping, or of an iterable of (name, tensor) or HostTensor, one at a time; a name twice is refused."""
    pairs: Iterable[Any] = weights.items() if isinstance(weights, Mapping) else weights
    seen: set[str] = set()
    for index, pair in enumerate(pairs):
        if isinstance(pair, HostTensor):
            tensor = host_tensor(pair.name, pair)
        elif isinstance(pair, tuple) and len(pair) == 2:
            tensor = host_tensor(pair[0], pair[1])
        else:
            raise InvalidRequest(f"weights[{index}]: a {type(pair).__qualname__}, not a (name, tensor) pair", field="weights")
        if tensor.name in seen:
            raise _invalid(tensor.name, "is given twice")
        seen.add(tensor.name)
        yield tensor


def check_tensor_name(name: object) -> str:
    """The name itself, or InvalidRequest."""
    if not isinstance(name, str):
        raise InvalidRequest(f"weights: a tensor's name is a {type(name).__qualname__}, not text", field="weights")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"weights: tensor name {name[:80]!a} is not valid text", field="weights") from None
    if not 0 < length <= MAX_NAME_BYTES or name == METADATA:
        raise InvalidRequest(
            f"weights: {name[:80]!r} cannot name a tensor; use 1 to {MAX_NAME_BYTES} bytes, not {METADATA}", field="weights"
        )
    return name


def _from_numpy(name: str, array: np.ndarray[Any, np.dtype[Any]]) -> HostTensor:
    dtype = array.dtype if array.dtype.isbuiltin == 2 else array.dtype.newbyteorder("<")
    known = _NUMPY_NAMES.get(dtype)
    if known is None:
        raise _invalid(name, f"has the numpy dtype {array.dtype}, which safetensors cannot hold; cast it first")
    flat = np.ascontiguousarray(array, dtype=dtype).reshape(-1)
    return HostTensor(name=name, dtype=known, shape=array.shape, data=flat.view(np.uint8).data.toreadonly())


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _from_torch(name: str, value: Any) -> HostTensor:
    torch = sys.modules["torch"]
    if hasattr(value, "full_tensor"):
        raise _invalid(name, "is spread over ranks (a DTensor); gather it with full_tensor() first")
    if value.layout is not torch.strided or value.is_quantized:
        raise _invalid(name, f"has layout {value.layout}, quantized: {value.is_quantized}; only plain dense tensors are taken")
    if value.is_meta:
        raise _invalid(name, "is on the meta device and has no data")
    known = _TORCH_NAMES.get(str(value.dtype))
    if known is None:
        raise _invalid(name, f"has the dtype {value.dtype}, which is not supported; cast it first")
    # numpy knows neither bfloat16 nor float8; as bytes every dtype passes.
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return HostTensor(name=name, dtype=known, shape=tuple(value.shape), data=flat.numpy().data.toreadonly())


def _invalid(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"weights: tensor {name!r} {what}", field=f"weights[{name}]")
