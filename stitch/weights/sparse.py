"""The codec "sparse/1": what changed in one tensor, as a blob whose size and cost follow the change (docs/delta-format.md).

Units of the tensor's own width are compared bit by bit, so any dtype passes, NaN payloads and negative zeros included. A blob of
differences or xor brings exactly the bytes that it was made against to the new ones, and is not idempotent: applied twice, or to
other bytes, it yields garbage, which the state digest tells. Apply it to a private copy, and throw that away when interrupted.

numpy does the work until numba is warm (`stitch.weights.kernels`); the bytes are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, overload

import numpy as np

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import StateDigest
from stitch.weights import sparse_numpy
from stitch.weights.digest import add_to_state, state_digest, word_sum
from stitch.weights.header import DTYPES
from stitch.weights.kernels import Kernels, fast
from stitch.weights.sparse_format import (
    MIN_FRAME,
    SPARSE,
    UNCHANGED,
    WIDTHS,
    Blob,
    Bytes,
    Chunk,
    Method,
    Packed,
    Packer,
    Part,
    pack,
    read_blob,
    write_blob,
)
from stitch.weights.sparse_numpy import UNIT, WORD_BYTES, Found, Positions

__all__ = ["Description", "SparseTensor", "apply", "describe", "encode", "encode_whole", "from_overwrite", "from_xor", "unit_bytes"]

CHUNK_BYTES = 1 << 21
"""Small enough for the caches, so that many deltas fold on one chunk before the next; below 1 MiB calls begin to cost."""
TRIAL_UNITS: Final = 1 << 11
"""So many changed units are packed by every method, and the smallest is taken for the tensor."""
DRIFT: Final = 1.5
"""Where a chunk's values take so many times the bytes per changed unit of the trial, the methods are tried anew."""
DENSE: Final = 0.25
"""With so many changed units per word, all deltas together, the digest is taken of all words before and after instead."""
BATCH_BYTES: Final = 4 << 20
"""Of opened streams, which go through a part of the target together."""
FULL_SHARE: Final = 0.25
"""A chunk is tried whole where its sparse form takes more than this share of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTensor:
    """One changed tensor: `blob` brings it to the state whose digest is `state`; `changed` counts units."""

    blob: bytes
    state: StateDigest
    changed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a blob holds. `method_bytes`: stored bytes by method; `method_units`: changed units by method.

    `magnitudes`: of the chunks held as differences, how many units moved by so many units in the last place, in bins of powers
    of two: bin k counts |difference| from 2^k up to, not including, 2^(k+1). For floating-point numbers that kept their sign
    one unit is one step between neighbouring numbers.
    """

    units: int
    width: int
    changed: int
    method_bytes: dict[str, int] = field(default_factory=dict)
    method_units: dict[str, int] = field(default_factory=dict)
    magnitudes: tuple[int, ...] = ()


def unit_bytes(dtype: str) -> int:
    """The width, in bytes, by which a tensor of this safetensors dtype is compared: 1, 2, 4 or 8. InvalidRequest if unknown."""
    known = DTYPES.get(dtype)
    if known is None or known.itemsize not in WIDTHS:
        raise InvalidRequest(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}", field="dtype")
    return known.itemsize


def encode(old: memoryview, new: memoryview, *, width: int, state: StateDigest) -> SparseTensor | None:
    """What brings `old` (whose digest is `state`) to `new`, two buffers of the same length; None where nothing changed.

    Never larger than the bytes themselves but for 16 bytes and 40 per chunk. The method is the smallest of all on some of the
    tensor's changed units, and tried anew where a chunk turns out larger than those made expect. Raises InvalidRequest.
    """
    before, after = _units(old, width, "old"), _units(new, width, "new")
    if before.nbytes != after.nbytes:
        raise InvalidRequest(f"new: {after.nbytes} bytes, old: {before.nbytes}; a delta needs the same tensor", field="new")
    choice = _Choice(_loops(before.nbytes))
    packed: list[Packed] = []
    change = changed = 0
    for start in range(0, before.nbytes, CHUNK_BYTES):
        old_chunk, new_chunk = _words(before[start : start + CHUNK_BYTES]), _words(after[start : start + CHUNK_BYTES])
        found, gained = choice.loops.find(old_chunk, new_chunk, width, start // WORD_BYTES)
        packed.append(choice.pack(found, after[start : start + CHUNK_BYTES], width))
        change += gained
        changed += found.positions.size
    if not changed:
        return None
    blob = write_blob(width, before.nbytes // width, CHUNK_BYTES, packed)
    return SparseTensor(blob=blob, state=add_to_state(state, change), changed=changed)


def encode_whole(new: memoryview, *, width: int) -> SparseTensor:
    """A tensor without a base. Every unit counts as changed."""
    after = _units(new, width, "new")
    chunks = (after[start : start + CHUNK_BYTES] for start in range(0, after.nbytes, CHUNK_BYTES))
    blob = write_blob(
        width, after.nbytes // width, CHUNK_BYTES, [_pack_full(chunk, chunk.nbytes // width, width) for chunk in chunks]
    )
    return SparseTensor(blob=blob, state=state_digest(new), changed=after.nbytes // width)


@overload
def apply(blobs: Sequence[memoryview | bytes], target: memoryview, *, width: int, state: StateDigest) -> StateDigest: ...


@overload
def apply(
    blobs: Sequence[memoryview | bytes], target: memoryview, *, width: int, state: StateDigest | None
) -> StateDigest | None: ...


def apply(blobs: Sequence[memoryview | bytes], target: memoryview, *, width: int, state: StateDigest | None) -> StateDigest | None:
    """Brings `target`, in place, from the bytes whose digest is `state` through all blobs, oldest first; returns the new digest.

    One pass over the target, chunk by chunk; the digest follows from the words that changed. Nothing of the target itself is
    verified: the result is right if `state` was the target's and the digest returned is the expected one. With `state` None no
    digest is kept, for a caller that reads the whole result anyway. Blobs may compare by units narrower than `width`. Raises
    CorruptObject for a damaged blob, or one of another tensor: the target is then undefined.
    """
    if target.readonly:
        raise InvalidRequest("target: is read-only", field="target")
    data = _units(target, width, "target")
    opened = [read_blob(blob) for blob in blobs]
    for blob in opened:
        if blob.nbytes != data.nbytes or blob.width > width:
            raise CorruptObject(
                f"sparse blob: of {blob.units} units of {blob.width} bytes, for a tensor of {data.nbytes} bytes in units of {width}"
            )
    change = 0
    loops = _loops(data.nbytes)
    step = max((blob.chunk_bytes for blob in opened), default=CHUNK_BYTES)
    for start in range(0, data.nbytes, step):
        part = data[start : start + step]
        chunks = list(_chunks_between(opened, start, start + part.nbytes))
        if state is not None and sum(blob.records[index][3] for blob, index in chunks) < DENSE * part.nbytes / WORD_BYTES:
            change += sum(_apply_chunk(blob, index, data, loops) for blob, index in chunks)
            continue
        change -= 0 if state is None else word_sum(part, start // WORD_BYTES)
        _fold(part, start, chunks, loops)
        change += 0 if state is None else word_sum(part, start // WORD_BYTES)
    return None if state is None else add_to_state(state, change)


def describe(blob: memoryview | bytes) -> Description:
    """What a blob holds, without its base. Raises CorruptObject."""
    read = read_blob(blob)
    magnitudes = np.zeros(8 * read.width, np.int64)
    sizes: dict[str, int] = {}
    units: dict[str, int] = {}
    for index, (code, _, _, changed, *lengths) in enumerate(read.records):
        method = Method(code)
        name = method.name.lower()
        sizes[name] = sizes.get(name, 0) + sum(lengths[1::2])
        units[name] = units.get(name, 0) + changed
        if method is Method.DIFFERENCES:
            difference = sparse_numpy.differences_of(_open(read, index, sparse_numpy), read.width)
            magnitude = np.minimum(difference, 0 - difference).astype(UNIT[8])
            bins = np.searchsorted(_POWERS, magnitude[magnitude > 0], side="right") - 1
            magnitudes += np.bincount(bins, minlength=magnitudes.size)
    filled = np.flatnonzero(magnitudes)
    return Description(
        units=read.units,
        width=read.width,
        changed=sum(units.values()),
        method_bytes=sizes,
        method_units=units,
        magnitudes=tuple(int(n) for n in magnitudes[: int(filled[-1]) + 1]) if filled.size else (),
    )


def from_xor(xor: memoryview, *, width: int) -> bytes | None:
    """A blob from the xor of old and new bytes, without either; None where all of it is zero. Raises InvalidRequest."""
    data = _units(xor, width, "xor")
    packed: list[Packed] = []
    for start in range(0, data.nbytes, CHUNK_BYTES):
        units = data[start : start + CHUNK_BYTES].view(UNIT[width])
        positions = np.flatnonzero(units).astype(np.uint32)
        packed.append(_pack_values(Method.XOR, positions, units[positions], width))
    return write_blob(width, data.nbytes // width, CHUNK_BYTES, packed) if any(chunk.changed for chunk in packed) else None


def from_overwrite(positions: np.ndarray[Any, Any], values: np.ndarray[Any, Any], *, size: int, width: int) -> bytes | None:
    """A blob from the indices of changed units, ascending, and their new values (unsigned, `width` bytes each); None if none.

    `size`: of the tensor in bytes. Indices count units of `width` bytes, which may be narrower than the tensor's own: for
    indices of bytes give width 1. Raises InvalidRequest.
    """
    if width not in WIDTHS or size % width:
        raise InvalidRequest(f"width: {width}; 1, 2, 4 or 8, and a divisor of the {size} bytes are allowed", field="width")
    where = np.asarray(positions).astype(np.int64).reshape(-1)
    new = np.ascontiguousarray(values).reshape(-1).view(UNIT[width])
    if where.size != new.size:
        raise InvalidRequest(f"values: {new.size} of them for {where.size} positions", field="values")
    if where.size and (where[0] < 0 or where[-1] >= size // width or not (np.diff(where) > 0).all()):
        raise InvalidRequest(f"positions: not ascending, or not below the {size // width} units", field="positions")
    if not where.size:
        return None
    step = CHUNK_BYTES // width
    starts = range(0, size // width, step)
    bounds = np.searchsorted(where, [*starts, size // width])
    packed = [
        _pack_values(Method.RAW, (where[low:high] - start).astype(np.uint32), new[low:high], width)
        for start, low, high in zip(starts, bounds, bounds[1:], strict=False)
    ]
    return write_blob(width, size // width, CHUNK_BYTES, packed)


_opening: Final = threading.Lock()
"""Threads take turns at opening streams: to hand the interpreter over at each frame costs them more than to wait."""
_POWERS: Final = np.left_shift(np.uint64(1), np.arange(64, dtype=np.uint64))


_NOTHING: Final[Bytes] = np.empty(0, np.uint8)


class _Choice:
    """The method of a tensor's chunks: the one whose values are smallest, tried on a few units (gaps are the same for all)."""

    def __init__(self, loops: Kernels) -> None:
        self.loops = loops
        self._forget()
        self._per_unit = 0.0

    def pack(self, found: Found, whole: Bytes, width: int) -> Packed:
        """One chunk with what differs in it; `whole` is the new chunk."""
        count = found.positions.size
        if not count:
            return UNCHANGED
        gaps = self.loops.gaps_of(found.positions)
        if self._tried < TRIAL_UNITS:
            self._try(found, width)
        best = self._pack(found, gaps, width)
        if best.size - len(best.stored[0]) > DRIFT * self._per_unit * count + MIN_FRAME:
            self._forget()
            self._try(found, width)
            best = self._pack(found, gaps, width)
        if best.size > FULL_SHARE * whole.nbytes:
            best = min(best, _pack_full(whole, count, width), key=lambda packed: packed.size)
        return best

    def _forget(self) -> None:
        self._tried = 0
        self._sizes = dict.fromkeys(SPARSE, 0)
        self._packer = Packer()

    def _try(self, found: Found, width: int) -> None:
        """Takes units of the middle: a chunk's ends may be those of what changed in it."""
        first = max(0, found.positions.size - TRIAL_UNITS) // 2
        some = slice(first, first + TRIAL_UNITS)
        sample = Found(positions=found.positions[some], old=found.old[some], new=found.new[some])
        self._tried += sample.positions.size
        for method in SPARSE:
            self._sizes[method] += pack(self._chunk(method, sample, _NOTHING, width)).size
        self._per_unit = min(self._sizes.values()) / self._tried

    def _pack(self, found: Found, gaps: Bytes, width: int) -> Packed:
        return self._packer.pack(self._chunk(min(SPARSE, key=self._sizes.__getitem__), found, gaps, width))

    def _chunk(self, method: Method, found: Found, gaps: Bytes, width: int) -> Chunk:
        count = found.positions.size
        if method is Method.DIFFERENCES:
            codes, magnitudes, wide = self.loops.differences(found, width)
            return Chunk(method=method, changed=count, gaps=gaps, values=codes, magnitudes=magnitudes, wide=wide)
        units = found.new ^ found.old if method is Method.XOR else found.new
        return Chunk(method=method, changed=count, gaps=gaps, values=sparse_numpy.planes(units, width))


def _pack_values(method: Method, positions: Positions, units: np.ndarray[Any, np.dtype[Any]], width: int) -> Packed:
    if not positions.size:
        return UNCHANGED
    gaps = sparse_numpy.gaps_of(positions)
    return pack(Chunk(method=method, changed=positions.size, gaps=gaps, values=sparse_numpy.planes(units, width)))


def _pack_full(chunk: Bytes, changed: int, width: int) -> Packed:
    return pack(Chunk(method=Method.FULL, changed=changed, values=sparse_numpy.planes(chunk.view(UNIT[width]), width)))


def _chunks_between(blobs: Sequence[Blob], start: int, end: int) -> Iterator[tuple[Blob, int]]:
    """What the blobs, oldest first, hold of these bytes. Chunk sizes are powers of two: those of every blob nest in the largest."""
    for blob in blobs:
        for index in range(start // blob.chunk_bytes, -(-end // blob.chunk_bytes)):
            if blob.records[index][0] != Method.UNCHANGED:
                yield blob, index


def _apply_chunk(blob: Blob, index: int, data: Bytes, loops: Kernels) -> int:
    """One chunk in place; the digest's change."""
    start = index * blob.chunk_bytes
    target = data[start : start + blob.chunk_bytes]
    first_word = start // WORD_BYTES
    chunk = _open(blob, index, loops)
    if chunk.method is Method.FULL:
        before = word_sum(target, first_word)
        _replace(target, chunk, blob.width)
        return word_sum(target, first_word) - before
    padded = _words(target)
    change = loops.apply_sparse(padded, chunk, blob.width, first_word)
    if padded is not target:
        target[:] = padded[: target.nbytes]
    return change


def _open(blob: Blob, index: int, loops: Kernels) -> Chunk:
    chunk = blob.open(index)
    if chunk.method in SPARSE and not loops.check(chunk, blob.width, blob.units_of(index)):
        raise _contradiction(blob, index)
    return chunk


def _fold(target: Bytes, start: int, chunks: Sequence[tuple[Blob, int]], loops: Kernels) -> None:
    """Chunks in place, oldest first, without the digest. `target` begins at the `start`th byte of the tensor."""
    for batch in _batches(chunks):
        width = batch[0][0].width
        with _opening:
            parts = [_part(blob, index, start) for blob, index in batch]
        if parts[0].chunk.method is Method.FULL:
            first = parts[0].first_unit * width
            _replace(target[first : first + parts[0].units * width], parts[0].chunk, width)
            continue
        sound = loops.fold(target, parts, width)
        if sound < len(parts):
            raise _contradiction(*batch[sound])


def _batches(chunks: Sequence[tuple[Blob, int]]) -> Iterator[list[tuple[Blob, int]]]:
    """What folds together: chunks of sparse methods and one width, whose streams are not too many; a full one by itself."""
    batch: list[tuple[Blob, int]] = []
    kind: tuple[bool, int] | None = None
    held = 0
    for blob, index in chunks:
        method, _, _, _, *lengths = blob.records[index]
        own, size = (method == Method.FULL, blob.width), sum(lengths[::2])
        if batch and (own != kind or own[0] or held + size > BATCH_BYTES):
            yield batch
            batch, held = [], 0
        batch.append((blob, index))
        kind, held = own, held + size
    if batch:
        yield batch


def _part(blob: Blob, index: int, start: int) -> Part:
    first_unit = (index * blob.chunk_bytes - start) // blob.width
    return Part(chunk=blob.open(index), first_unit=first_unit, units=blob.units_of(index))


def _replace(target: Bytes, chunk: Chunk, width: int) -> None:
    """By a chunk that is full."""
    target.view(UNIT[width])[:] = sparse_numpy.units_of(chunk.values, width)


def _contradiction(blob: Blob, index: int) -> CorruptObject:
    return CorruptObject(f"sparse blob: chunk {index} of {blob.units_of(index)} units: its streams contradict each other")


def _loops(nbytes: int) -> Kernels:
    return fast(nbytes) or sparse_numpy


def _units(data: memoryview, width: int, name: str) -> Bytes:
    """The bytes, which must be whole units."""
    if width not in WIDTHS:
        raise InvalidRequest(f"width: {width}; 1, 2, 4 or 8 are allowed", field="width")
    view = memoryview(data)
    if view.nbytes % width:
        raise InvalidRequest(f"{name}: {view.nbytes} bytes are not whole units of {width}", field=name)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _words(chunk: Bytes) -> Bytes:
    """The same memory, or a copy padded with zeros where the bytes are not whole words."""
    rest = -chunk.nbytes % WORD_BYTES
    return np.pad(chunk, (0, rest)) if rest else chunk
