"""What digest and sparse codec do to words and units, through compiled loops: as `sparse_numpy`, to the same bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from stitch.weights import numba_kernels as compiled
from stitch.weights.sparse_format import CODES_PER_BYTE, LONG_GAP, Bytes, Chunk, Method, Part
from stitch.weights.sparse_numpy import UNIT, WORD, Found, Positions, Units, planes, units_of

_NOTHING: Final = np.empty(0, np.uint8)
_HOW: Final = {Method.DIFFERENCES: compiled.ADD, Method.XOR: compiled.XOR, Method.RAW: compiled.SET}


class _Scratch(threading.local):
    """Room for the lists of one chunk, kept from chunk to chunk: fresh pages would cost as much as the work."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
        self.lists = np.empty(4 * (compiled.BLOCK + 1), np.uint32)
        self.before = np.empty(compiled.BLOCK, np.uint64)

    def take(self, name: str, dtype: type[np.unsignedinteger[Any]], size: int) -> np.ndarray[Any, np.dtype[Any]]:
        """For at least so many numbers, and one more; holds anything, and is good until the same is taken again."""
        array = self._arrays.get(name)
        if array is None or array.size <= size:
            array = self._arrays[name] = np.empty(size + size // 8 + 4096, dtype)
        return array


_scratch: Final = _Scratch()


def word_sum(data: Bytes, first_word: int) -> int:
    """Of whole words."""
    return int(compiled.sum_words(data.view(WORD), first_word))


def find(old: Bytes, new: Bytes, width: int, first_word: int) -> tuple[Found, int]:
    count = old.nbytes // width
    positions = _scratch.take("positions", np.uint32, count)
    before, after = _scratch.take("before", np.uint64, count), _scratch.take("after", np.uint64, count)
    count, change = compiled.find(old.view(WORD), new.view(WORD), 8 * width, first_word, _scratch.lists, positions, before, after)
    return Found(positions=positions[:count], old=before[:count], new=after[:count]), int(change)


def gaps_of(positions: Positions) -> Bytes:
    last = int(positions[-1]) if positions.size else 0
    gaps = _scratch.take("gaps", np.uint8, positions.size + last // LONG_GAP)
    return gaps[: compiled.write_gaps(positions, gaps)]


def differences(found: Found, width: int) -> tuple[Bytes, Bytes, Bytes]:
    count = found.positions.size
    codes = _scratch.take("codes", np.uint8, count)
    magnitudes = _scratch.take("magnitudes", np.uint8, count)
    wide = _scratch.take("wide", np.uint64, count)
    small, far = compiled.write_differences(found.old, found.new, 8 * width, codes, magnitudes, wide)
    return codes[: -(-count // CODES_PER_BYTE)], magnitudes[:small], planes(wide[:far], width)


def check(chunk: Chunk, width: int, units: int) -> bool:
    adds = chunk.method is Method.DIFFERENCES
    return bool(compiled.agree(chunk.gaps, chunk.values, chunk.magnitudes, chunk.wide, width, chunk.changed, units, adds))


def apply_sparse(target: Bytes, chunk: Chunk, width: int, first_word: int) -> int:
    values, codes, magnitudes = _streams(chunk, width)
    change = compiled.apply(
        target.view(WORD),
        8 * width,
        first_word,
        chunk.gaps,
        _HOW[chunk.method],
        values.astype(np.uint64),
        codes,
        magnitudes,
        _scratch.lists,
        _scratch.before,
    )
    return int(change)


def fold(target: Bytes, parts: Sequence[Part], width: int) -> int:
    data = _scratch.take("streams", np.uint8, sum(part.chunk.nbytes for part in parts))
    room = data.data  # through which copies keep the interpreter's lock: they are short, and giving it up is not
    rows: list[int] = []
    end = 0
    for part in parts:
        chunk = part.chunk
        rows += _HOW[chunk.method], part.first_unit, part.units, chunk.changed
        for stream in (chunk.gaps, chunk.values, chunk.magnitudes, chunk.wide):
            rows.append(end)
            if stream.size:
                room[end : end + stream.size] = stream.data
                end += stream.size
        rows.append(end)
    table = np.array(rows, np.int64).reshape(len(parts), compiled.ROW)
    return int(compiled.fold(target.view(UNIT[width]), table, data))


def _streams(chunk: Chunk, width: int) -> tuple[Units, Bytes, Bytes]:
    """Units, codes and magnitudes as the loops take them: they look at one magnitude past the last."""
    if chunk.method is not Method.DIFFERENCES:
        return units_of(chunk.values, width), _NOTHING, _NOTHING
    size = chunk.magnitudes.size
    magnitudes = _scratch.take("magnitudes", np.uint8, size)
    magnitudes[:size] = chunk.magnitudes
    return units_of(chunk.wide, width), chunk.values, magnitudes
