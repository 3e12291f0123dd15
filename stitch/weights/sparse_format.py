"""The bytes of a sparse blob (docs/delta-format.md): header, chunk records, streams. What is read is checked before it is used.

    header    magic, unit width, log2 of the chunk's bytes, number of units
    records   one per chunk: method, changed units, length and stored length of up to four streams
    streams   in the order of the records; each as it is, or one zstd frame where that is shorter

Everything that a reader allocates or loops over is bounded by the blob's own length and the chunk's size, before any stream is
opened. A number of units that the target does not have is refused by the caller, who knows the target.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import zstandard

from stitch.core.errors import CorruptObject

MAGIC: Final = b"SPD\x01"
"""The last byte is the version of the format."""
WIDTHS: Final = (1, 2, 4, 8)
MIN_CHUNK_SHIFT: Final = 6
MAX_CHUNK_SHIFT: Final = 22
"""What a reader holds for a chunk is some 30 bytes a unit, so no more than 128 MiB whatever a blob says."""
LONG_GAP: Final = 255
"""In the stream of gaps: so many units are skipped, and the gap goes on."""
WIDE: Final = 255
"""In the stream of magnitudes: the difference is in the stream of wide ones."""
CODES_PER_BYTE: Final = 4
ZSTD_LEVEL: Final = 1
"""Level 3 was no smaller on recorded training steps."""
MIN_FRAME: Final = 24
"""A stream shorter than this is not worth a frame's own header."""
WORTHWHILE: Final = 4
"""A frame must save this part of its stream. Gaps and codes of a usual training step save less, four percent of a blob in all, and
to open them would cost a reader a quarter of its time."""
DULL: Final = 7
"""Where a frame did not save that, so many chunks of the tensor pass before the stream is tried again, if it does not grow."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_HEADER: Final = struct.Struct("<4sBBHQ")
"""Magic, unit width, log2 of the chunk's bytes, zero, number of units."""
_RECORD: Final = struct.Struct("<BBHI8I")
"""Method, zero, zero, changed units; then length and stored length of each stream: gaps, values, magnitudes, wide."""
STREAMS: Final = 4
_EMPTY: Final[Bytes] = np.empty(0, np.uint8)
_EMPTY.flags.writeable = False


def _nothing() -> Bytes:
    return _EMPTY


class Method(IntEnum):
    """How a chunk is held."""

    UNCHANGED = 0
    FULL = 1
    """All units of the chunk."""
    DIFFERENCES = 2
    """Gaps; new minus old as a code of two bits (one up, one down, more up, more down), magnitudes of those that moved by more
    than one, and whole those that moved by more than 256. Needs exactly the old bytes."""
    XOR = 3
    """Gaps; new xor old. Needs exactly the old bytes."""
    RAW = 4
    """Gaps; new units. Needs no old bytes."""


SPARSE: Final = (Method.DIFFERENCES, Method.XOR, Method.RAW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk's streams. Those that a blob opens have the lengths of their record, but what they say is not checked yet."""

    method: Method
    changed: int
    gaps: Bytes = field(default_factory=_nothing)
    values: Bytes = field(default_factory=_nothing)
    """Of differences: the codes. Of xor and raw: the units at the positions, as planes. Of full: all units, as planes."""
    magnitudes: Bytes = field(default_factory=_nothing)
    wide: Bytes = field(default_factory=_nothing)

    @property
    def nbytes(self) -> int:
        """Of all streams."""
        return self.gaps.nbytes + self.values.nbytes + self.magnitudes.nbytes + self.wide.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A chunk that lies somewhere in a target: from which of its units on, and how many."""

    chunk: Chunk
    first_unit: int
    units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A blob whose header and records are sound. Streams are not opened yet."""

    width: int
    units: int
    chunk_bytes: int
    records: list[tuple[int, ...]]
    """The fields of a record, by chunk."""
    offsets: list[int]
    """Of each chunk's first stream within the blob."""
    data: memoryview

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.units * self.width

    def units_of(self, chunk: int) -> int:
        """Units in a chunk: the last one may be shorter."""
        per_chunk = self.chunk_bytes // self.width
        return min(per_chunk, self.units - chunk * per_chunk)

    def open(self, chunk: int) -> Chunk:
        """The streams of a chunk. Raises CorruptObject for one that is not what its record says."""
        method, _, _, changed, *sizes = self.records[chunk]
        position = self.offsets[chunk]
        streams: list[Bytes] = []
        for length, stored in zip(sizes[::2], sizes[1::2], strict=True):
            end = position + stored
            streams.append(_open_stream(self.data[position:end], length, chunk) if length else _EMPTY)
            position = end
        gaps, values, magnitudes, wide = streams
        return Chunk(method=Method(method), changed=changed, gaps=gaps, values=values, magnitudes=magnitudes, wide=wide)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A chunk ready to be written: its record's numbers, and the streams as stored."""

    method: Method
    changed: int = 0
    lengths: tuple[int, ...] = (0,) * STREAMS
    stored: tuple[bytes, ...] = (b"",) * STREAMS

    @property
    def size(self) -> int:
        return sum(map(len, self.stored))


UNCHANGED: Final = Packed(method=Method.UNCHANGED)


class Packer:
    """Packs the chunks of one tensor, whose streams are much alike from chunk to chunk."""

    def __init__(self) -> None:
        self._skip = [0] * STREAMS
        self._length = [0] * STREAMS
        """Of the stream that did not compress."""

    def pack(self, chunk: Chunk) -> Packed:
        """Streams stored, each as it is or compressed."""
        streams = (chunk.gaps, chunk.values, chunk.magnitudes, chunk.wide)
        return Packed(
            method=chunk.method,
            changed=chunk.changed,
            lengths=tuple(stream.nbytes for stream in streams),
            stored=tuple(self._store(number, stream) for number, stream in enumerate(streams)),
        )

    def _store(self, number: int, stream: Bytes) -> bytes:
        if stream.nbytes < MIN_FRAME:
            return stream.tobytes()
        if self._skip[number] and stream.nbytes <= 2 * self._length[number]:
            self._skip[number] -= 1
            return stream.tobytes()
        frame = _zstd.compressor.compress(stream.data)
        if len(frame) <= stream.nbytes - stream.nbytes // WORTHWHILE:
            return frame
        self._skip[number], self._length[number] = DULL, stream.nbytes
        return stream.tobytes()


def pack(chunk: Chunk) -> Packed:
    """One chunk by itself."""
    return Packer().pack(chunk)


def write_blob(width: int, units: int, chunk_bytes: int, chunks: Iterable[Packed]) -> bytes:
    """Header, records, streams."""
    records = bytearray()
    streams: list[bytes] = []
    for chunk in chunks:
        sizes = (size for length, kept in zip(chunk.lengths, chunk.stored, strict=True) for size in (length, len(kept)))
        records += _RECORD.pack(chunk.method, 0, 0, chunk.changed, *sizes)
        streams += chunk.stored
    return b"".join((_HEADER.pack(MAGIC, width, chunk_bytes.bit_length() - 1, 0, units), records, *streams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a blob says of itself first: the width of a unit in bytes, how many there are, and the size of a chunk."""

    width: int
    units: int
    chunk_bytes: int


def read_header(blob: memoryview | bytes) -> Header:
    """Reads no more than the header. Raises CorruptObject naming the field that is wrong."""
    if len(blob) < _HEADER.size:
        raise CorruptObject(f"sparse blob: {len(blob)} bytes are less than a header")
    magic, width, shift, zero, units = _HEADER.unpack_from(blob)
    if magic != MAGIC:
        raise CorruptObject(f"sparse blob: begins with {magic!r}, not {MAGIC!r}: no sparse blob, or of a newer format")
    if width not in WIDTHS or not MIN_CHUNK_SHIFT <= shift <= MAX_CHUNK_SHIFT or zero:
        raise CorruptObject(f"sparse blob: unit width {width}, chunk shift {shift}, reserved {zero} are not possible")
    return Header(width=width, units=units, chunk_bytes=1 << shift)


def read_blob(blob: memoryview | bytes) -> Blob:
    """Header and records. Raises CorruptObject naming the field that is wrong."""
    data = memoryview(blob).cast("B") if memoryview(blob).nbytes else memoryview(b"")
    header = read_header(data)
    width, units = header.width, header.units
    per_chunk = header.chunk_bytes // width
    count = -(-units // per_chunk)
    position = _HEADER.size + count * _RECORD.size
    if position > data.nbytes:
        raise CorruptObject(f"sparse blob: {data.nbytes} bytes do not hold the records of {count} chunks")
    records = list(_RECORD.iter_unpack(data[_HEADER.size : position]))
    offsets: list[int] = []
    for chunk, record in enumerate(records):
        here = min(per_chunk, units - chunk * per_chunk)
        if not _sound(record, width, here):
            raise CorruptObject(f"sparse blob: chunk {chunk} of {here} units: its record {record} contradicts itself")
        offsets.append(position)
        position += sum(record[5::2])
    if position != data.nbytes:
        raise CorruptObject(f"sparse blob: its records promise {position} bytes, it has {data.nbytes}")
    return Blob(width=width, units=units, chunk_bytes=header.chunk_bytes, records=records, offsets=offsets, data=data)


def _sound(record: tuple[int, ...], width: int, units: int) -> bool:
    """Whether every length is one that the method and the chunk's units allow."""
    method, zero, zero_too, changed, gaps, gaps_kept, values, values_kept, magnitudes, magnitudes_kept, wide, wide_kept = record
    if (
        zero
        or zero_too
        or changed > units
        or (changed == 0) != (method == Method.UNCHANGED)
        or not _stored(gaps, gaps_kept)
        or not _stored(values, values_kept)
        or not _stored(magnitudes, magnitudes_kept)
        or not _stored(wide, wide_kept)
    ):
        return False
    if method == Method.DIFFERENCES:
        fits = values == -(-changed // CODES_PER_BYTE) and magnitudes <= changed and wide <= magnitudes * width and not wide % width
        return fits and changed <= gaps <= changed + units // LONG_GAP
    if magnitudes or wide:
        return False
    if method == Method.UNCHANGED or method == Method.FULL:
        return not gaps and values == (units * width if method else 0)
    return method in SPARSE and values == changed * width and changed <= gaps <= changed + units // LONG_GAP


def _stored(length: int, stored: int) -> bool:
    return 0 < stored <= length if length else not stored


class _PerThread(threading.local):
    """zstd's own contexts are no more than one thread's at a time, and dear to make."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd: Final = _PerThread()


def _open_stream(stored: memoryview, length: int, chunk: int) -> Bytes:
    """As many bytes as the record says, or CorruptObject."""
    if stored.nbytes == length:
        return np.frombuffer(stored, np.uint8)
    try:
        # What the frame says of its size decides what is allocated, so it must be what the record says, which is bounded.
        if zstandard.frame_content_size(stored) != length:
            raise CorruptObject(f"sparse blob: chunk {chunk}: a frame that does not state the {length} bytes of its record")
        opened = _zstd.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"sparse blob: chunk {chunk}: {error}") from error
    if len(opened) != length:
        raise CorruptObject(f"sparse blob: chunk {chunk}: a frame of {len(opened)} bytes, not {length}")
    return np.frombuffer(opened, np.uint8)
