"""What digest and sparse codec do to words and units, in numpy. `numba_sparse` does the same, faster, to the same bytes.

Chunks are arrays of bytes, whole 64-bit words long: a caller pads the last one of a tensor with zeros. Digest changes are what the
additive state digest gains, modulo 2^64, over the words that changed; `first_word` is the index of the chunk's first word within
the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from stitch.weights.digest import mix_words
from stitch.weights.sparse_format import CODES_PER_BYTE, LONG_GAP, WIDE, Bytes, Chunk, Method, Part

Positions = np.ndarray[Any, np.dtype[np.uint32]]
Units = np.ndarray[Any, np.dtype[Any]]

WORD: Final = np.dtype("<u8")
WORD_BYTES: Final = 8
UNIT: Final = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_CODE_SHIFTS: Final = np.array([0, 2, 4, 6], np.uint8)
_MORE: Final = np.array([bin(byte & 0b10101010).count("1") for byte in range(256)], np.uint8)
"""How many codes of a byte refer to the stream of magnitudes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The units of a chunk that differ: their indices, ascending, what they were and are. Good until the thread's next `find`."""

    positions: Positions
    old: Units
    new: Units
    """Unsigned, of the units' width or wider."""


def find(old: Bytes, new: Bytes, width: int, first_word: int) -> tuple[Found, int]:
    """What differs, and the digest's change from old to new."""
    old_words, new_words = old.view(WORD), new.view(WORD)
    where = np.flatnonzero(old_words != new_words)
    before, after = old_words[where], new_words[where]
    change = _sum_at(where, after, first_word) - _sum_at(where, before, first_word)
    per_word = WORD_BYTES // width
    row, unit = np.nonzero((before ^ after).view(UNIT[width]).reshape(-1, per_word))
    positions = where[row] * per_word + unit
    units = (words.view(UNIT[width])[row * per_word + unit] for words in (before, after))
    return Found(positions=positions.astype(np.uint32), old=next(units), new=next(units)), change


def gaps_of(positions: Positions) -> Bytes:
    """Ascending indices as a stream of gaps."""
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    long, short = np.divmod(gaps, LONG_GAP)
    ends = np.cumsum(long + 1)
    stream = np.full(int(ends[-1]) if ends.size else 0, LONG_GAP, np.uint8)
    stream[ends - 1] = short
    return stream


def differences(found: Found, width: int) -> tuple[Bytes, Bytes, Bytes]:
    """The streams of codes, magnitudes and wide differences (as planes)."""
    difference: Units = found.new - found.old
    negative = difference >> np.array(8 * width - 1, difference.dtype)
    magnitude: Units = np.where(negative, 0 - difference, difference)
    more = magnitude > 1
    codes = np.zeros(-(-difference.size // CODES_PER_BYTE) * CODES_PER_BYTE, np.uint8)
    codes[: difference.size] = more.astype(np.uint8) << 1 | negative.astype(np.uint8)
    packed = np.bitwise_or.reduce(codes.reshape(-1, CODES_PER_BYTE) << _CODE_SHIFTS, axis=1)
    magnitudes = np.minimum(magnitude[more] - 2, WIDE).astype(np.uint8)
    return packed, magnitudes, planes(difference[more][magnitudes == WIDE], width)


def planes(units: Units, width: int) -> Bytes:
    """Units of so many bytes as a stream: all lowest bytes, then all second ones, and so on."""
    if not units.size:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(units.astype(UNIT[width], copy=False).view(np.uint8).reshape(-1, width).T).reshape(-1)


def units_of(stream: Bytes, width: int) -> Units:
    """The units whose planes a stream holds."""
    units: Units = np.ascontiguousarray(stream.reshape(width, -1).T).reshape(-1).view(UNIT[width])
    return units


def check(chunk: Chunk, width: int, units: int) -> bool:
    """Whether the streams of a chunk of a sparse method agree with each other and with its number of units. The functions below
    take such chunks only, whose streams have the lengths that their record's check allows."""
    gaps = chunk.gaps
    told = int(np.count_nonzero(gaps != LONG_GAP))
    if told != chunk.changed or gaps[-1] == LONG_GAP or int(gaps.sum(dtype=np.uint64)) + told > units:
        return False
    if chunk.method is not Method.DIFFERENCES:
        return True
    more = int(_MORE[chunk.values].sum(dtype=np.int64))
    unused = int(chunk.values[-1]) >> 2 * ((told - 1) % CODES_PER_BYTE + 1)
    wide = int(np.count_nonzero(chunk.magnitudes == WIDE))
    return more == chunk.magnitudes.size and unused == 0 and wide * width == chunk.wide.size


def differences_of(chunk: Chunk, width: int) -> Units:
    """New minus old, modulo the unit's range, of a checked chunk of differences."""
    codes = (chunk.values[:, None] >> _CODE_SHIFTS & 3).reshape(-1)[: chunk.changed]
    more = codes > 1
    magnitude = np.ones(chunk.changed, UNIT[width])
    magnitude[more] = chunk.magnitudes.astype(UNIT[width]) + 2
    difference: Units = np.where(codes & 1, 0 - magnitude, magnitude)
    wide = np.flatnonzero(more)[chunk.magnitudes == WIDE]
    difference[wide] = units_of(chunk.wide, width)
    return difference


def apply_sparse(target: Bytes, chunk: Chunk, width: int, first_word: int) -> int:
    """A checked chunk of a sparse method, in place. Returns the digest's change."""
    words = target.view(WORD)
    positions = _positions(chunk)
    touched = positions // (WORD_BYTES // width)
    touched = touched[np.diff(touched, prepend=-1) > 0]
    before = words[touched]
    _change(target.view(UNIT[width]), positions, chunk, width)
    return _sum_at(touched, words[touched], first_word) - _sum_at(touched, before, first_word)


def fold(target: Bytes, parts: Sequence[Part], width: int) -> int:
    """Chunks of sparse methods, oldest first, in place, without the digest. The target need not be whole words.

    Returns the index of the first whose streams contradict each other, as many as there are if none does; the target is then
    undefined.
    """
    units = target.view(UNIT[width])
    for index, part in enumerate(parts):
        if not check(part.chunk, width, part.units):
            return index
        here = units[part.first_unit : part.first_unit + part.units]
        _change(here, _positions(part.chunk), part.chunk, width)
    return len(parts)


def _positions(chunk: Chunk) -> np.ndarray[Any, np.dtype[np.int64]]:
    ends = chunk.gaps != LONG_GAP
    positions: np.ndarray[Any, np.dtype[np.int64]] = np.cumsum(chunk.gaps.astype(np.int64) + ends)[ends] - 1
    return positions


def _change(units: Units, positions: np.ndarray[Any, np.dtype[np.int64]], chunk: Chunk, width: int) -> None:
    if chunk.method is Method.DIFFERENCES:
        units[positions] += differences_of(chunk, width)
    elif chunk.method is Method.XOR:
        units[positions] ^= units_of(chunk.values, width)
    else:
        units[positions] = units_of(chunk.values, width)


def _sum_at(where: np.ndarray[Any, np.dtype[np.int64]], words: Units, first_word: int) -> int:
    """What these words at these places of a chunk are in the sum of the state digest."""
    mixed = (where + first_word).astype(WORD)
    mix_words(mixed)
    mixed ^= words
    mix_words(mixed)
    return int(np.add.reduce(mixed, dtype=np.uint64))
