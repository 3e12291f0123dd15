"""What Slime and Miles wrote for one tensor: a zstd frame, read strictly, and their checksum of the tensor's new state.

Lengths are bounded by the tensor in the base, which the reader knows: whatever a frame claims, no more is allocated than that.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
import zstandard
from blake3 import blake3

from stitch.core.errors import CorruptObject, InvalidRequest

CHECKSUM_DIGITS: Final = {"xxh3-128": 32, "blake3": 64, "adler32": 8}
"""The algorithms, by their names in an index, and the hex digits of each."""
_COUNT_BYTES: Final = 4
_POSITION: Final = np.dtype("<u4")
_BYTES_PER_CHANGE: Final = _POSITION.itemsize + 1

Positions = np.ndarray[Any, np.dtype[np.uint32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def read_xor(frame: memoryview, size: int, where: str) -> memoryview:
    """New bytes ^ old bytes of a tensor of `size` bytes. Raises CorruptObject naming `where`."""
    xor = _inflate(frame, size, where)
    if len(xor) != size:
        raise CorruptObject(f"{where}: the xor is of {len(xor)} bytes, the tensor of {size}")
    return memoryview(xor)


def read_overwrite(frame: memoryview, size: int, where: str) -> tuple[Positions, Bytes]:
    """Positions of changed bytes, increasing, and their new values, of a tensor of `size` bytes. Raises CorruptObject."""
    raw = _inflate(frame, _COUNT_BYTES + _BYTES_PER_CHANGE * size, where)
    count = int.from_bytes(raw[:_COUNT_BYTES], "little")
    if len(raw) != _COUNT_BYTES + _BYTES_PER_CHANGE * count:
        raise CorruptObject(f"{where}: {len(raw)} bytes do not hold the {count} positions and values that they announce")
    positions: Positions = np.frombuffer(raw, _POSITION, count, _COUNT_BYTES)
    values: Bytes = np.frombuffer(raw, np.uint8, count, _COUNT_BYTES + _POSITION.itemsize * count)
    if count and int(positions[-1]) >= size:
        raise CorruptObject(f"{where}: position {positions[-1]} lies outside the tensor's {size} bytes")
    if not bool(np.all(positions[1:] > positions[:-1])):
        raise CorruptObject(f"{where}: the positions do not increase")
    return positions, values


def checksum(algorithm: str, data: memoryview, where: str) -> str:
    """Lower-case hex, as the trainers write it. Raises InvalidRequest where the algorithm needs a package that is missing."""
    if algorithm == "xxh3-128":
        return _xxh3(data, where)
    if algorithm == "blake3":
        return blake3(data).hexdigest()
    assert algorithm == "adler32"
    return f"{zlib.adler32(data):08x}"


def _xxh3(data: memoryview, where: str) -> str:
    try:
        import xxhash
    except ImportError as error:
        raise InvalidRequest(
            f"{where}: its xxh3-128 checksum needs the extra: pip install 'stitch-rl[slime]'", field="checksum_format"
        ) from error
    return xxhash.xxh3_128_hexdigest(data)


def _inflate(frame: memoryview, most: int, where: str) -> bytes:
    """The content of the one frame that there is, which may be `most` bytes long."""
    try:
        declared = zstandard.frame_content_size(frame)
        if declared > most:
            raise CorruptObject(f"{where}: a frame of {declared} bytes, where at most {most} can be")
        if declared == 0:
            return b""  # the decompressor takes that for a size that is not told
        # Where the frame tells its size that is what is allocated, else `most`.
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=max(most, 1), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"{where}: no zstd frame of at most {most} bytes: {error}") from error
