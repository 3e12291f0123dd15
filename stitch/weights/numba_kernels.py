"""The loops of digest and sparse codec, compiled. Importing this module compiles them, or loads them from numba's cache.

`stitch.weights.kernels` imports it, in the background. All run without the GIL. numba checks no bounds: what these loops index by
was checked before by whoever calls them (positions by `count`, lengths by the blob's reader), and each says what it relies
on. Each is written so that the processor can run ahead: no branch depends on what changed where, and words that lie far apart are
loaded in a loop of their own, many at once.

Unsigned numbers wrap; one that meets a signed one would become floating-point, so none does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from stitch.weights.kernels import ending

ADD: Final = 0
XOR: Final = 1
SET: Final = 2
"""What `apply` does with units and operands."""
BLOCK: Final = 1024
"""Words, or gaps, from one list to the next: lists this short stay in the fastest cache."""

_U0: Final = np.uint64(0)
_ALL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
_WORD_BITS: Final = np.uint64(64)
_INCREMENT: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_1: Final = np.uint64(30)
_SHIFT_2: Final = np.uint64(27)
_SHIFT_3: Final = np.uint64(31)
_ONE: Final = np.uint64(1)
_TWO: Final = np.uint64(2)
_LONG: Final = np.uint64(255)
_LARGEST: Final = np.uint64(256)
"""Of the magnitudes that take one byte."""


def _read(bits: int) -> Any:
    """An array that a loop reads: of any alignment, since tensors lie in files as they come."""
    return types.Array(getattr(types, f"uint{bits}"), 1, "C", readonly=True, aligned=False)


def _write(bits: int) -> Any:
    return types.Array(getattr(types, f"uint{bits}"), 1, "C", readonly=False, aligned=False)


_types: Any = types  # numba has no type information, only a marker that says so


def _compiled(*signatures: object) -> Callable[[Any], Any]:
    """Compiles at once; keeps the machine code for the next start where a folder for it can be written."""

    def decorate(function: Any) -> Any:
        if ending.is_set():
            raise RuntimeError("the process ends")
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
        try:
            return numba.njit(list(signatures), cache=True, **options)(function)
        except (RuntimeError, OSError):  # no place for a cache: compile at every start
            return numba.njit(list(signatures), **options)(function)

    return decorate


def _generate_trailing_zeros(_context: Any, _x: Any) -> Any:
    def generate(_codegen: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return _types.uint64(_types.uint64), generate


def _generate_differing_8(_context: Any, a: Any, b: Any, _begin: Any) -> Any:
    """numba finds no vector instruction for this by itself; the compiler behind it has one on every machine, or makes do."""
    eight = ir.VectorType(ir.IntType(64), 8)

    def generate(codegen: Any, builder: Any, signature: Any, args: Any) -> Any:
        sides = []
        for kind, value in zip(signature.args[:2], args[:2], strict=True):
            place = builder.gep(codegen.make_array(kind)(codegen, builder, value).data, [args[2]])
            sides.append(builder.load(builder.bitcast(place, eight.as_pointer()), align=1))
        differ = builder.icmp_unsigned("!=", *sides)
        return builder.zext(builder.bitcast(differ, ir.IntType(8)), ir.IntType(64))

    return _types.uint64(a, b, types.int64), generate


_trailing_zeros: Any = intrinsic(_generate_trailing_zeros)
"""Of a number that is not zero."""
_differing_8: Any = intrinsic(_generate_differing_8)
"""Which of the eight words from an index on differ between two arrays: a bit each, the first lowest."""


_inlined = numba.njit(nogil=True, error_model="numpy", boundscheck=False)
"""Part of the loops that call it, which the compiler puts into them."""


@_inlined
def _mix(x: Any) -> Any:
    """splitmix64."""
    x = x + _INCREMENT
    x = (x ^ (x >> _SHIFT_1)) * _MULTIPLY_1
    x = (x ^ (x >> _SHIFT_2)) * _MULTIPLY_2
    return x ^ (x >> _SHIFT_3)


@_compiled(types.uint64(_read(64), types.uint64))
def sum_words(words: Any, first_word: Any) -> Any:
    """The sum of the state digest over words of which the first has that index."""
    total = _U0
    for i in range(words.size):
        total += _mix(words[i] ^ _mix(first_word + np.uint64(i)))
    return total


@_inlined
def _changed_words(old: Any, new: Any, start: Any, end: Any, where: Any) -> Any:
    """Indices of the words from `start` to `end` that differ; returns how many."""
    touched = np.int64(0)
    whole = end - (end - start) % 64
    for begin in range(start, whole, 64):
        differ = _U0
        for eight in range(8):
            differ |= _differing_8(old, new, begin + 8 * eight) << np.uint64(8 * eight)
        while differ != _U0:
            where[touched] = np.uint64(begin) + _trailing_zeros(differ)
            touched += 1
            differ &= differ - _ONE
    for i in range(whole, end):
        where[touched] = i
        touched += np.int64(old[i] != new[i])
    return touched


@_compiled(
    _types.Tuple((types.int64, types.uint64))(
        _read(64), _read(64), types.uint64, types.uint64, _write(32), _write(32), _write(64), _write(64)
    )
)
def find(old: Any, new: Any, bits: Any, first_word: Any, where: Any, positions: Any, old_units: Any, new_units: Any) -> Any:
    """The units of so many bits that differ: their indices, what they were and are, how many; and the digest's change.

    `new` is as long as `old`; `where` has room for BLOCK words and one more, the others for every unit.
    """
    per_word = _WORD_BITS // bits
    mask = _ALL >> (_WORD_BITS - bits)
    count = np.int64(0)
    change = _U0
    for start in range(0, old.size, BLOCK):
        touched = _changed_words(old, new, start, min(start + BLOCK, old.size), where)
        for i in range(touched):
            before, after = old[where[i]], new[where[i]]
            first = np.uint64(where[i]) * per_word
            x = before ^ after
            while x != _U0:
                unit = _trailing_zeros(x) // bits
                positions[count] = first + unit
                old_units[count] = before >> (unit * bits) & mask
                new_units[count] = after >> (unit * bits) & mask
                count += 1
                x &= ~(mask << (unit * bits))
        for i in range(touched):
            index = _mix(first_word + np.uint64(where[i]))
            change += _mix(new[where[i]] ^ index) - _mix(old[where[i]] ^ index)
    return count, change


@_compiled(types.int64(_read(32), _write(8)))
def write_gaps(positions: Any, gaps: Any) -> Any:
    """Ascending positions as a stream of gaps; returns its length. `gaps` has room for a byte each and one per 255 units."""
    length = np.int64(0)
    previous = np.int64(-1)
    for i in range(positions.size):
        position = np.int64(positions[i])
        gap = position - previous - 1
        previous = position
        while gap >= 255:
            gaps[length] = 255
            length += 1
            gap -= 255
        gaps[length] = gap
        length += 1
    return length


@_compiled(_types.UniTuple(types.int64, 2)(_read(64), _read(64), types.uint64, _write(8), _write(8), _write(64)))
def write_differences(old_units: Any, new_units: Any, bits: Any, codes: Any, magnitudes: Any, wide: Any) -> Any:
    """New minus old, as codes, magnitudes and wide ones; returns how many of the latter two.

    `codes` has room for a byte per four units begun, the others for one more than there are units.
    """
    top = bits - _ONE
    mask = _ALL >> (_WORD_BITS - bits)
    small = far = np.int64(0)
    byte = _U0
    for i in range(old_units.size):
        difference = (new_units[i] - old_units[i]) & mask
        negative = difference >> top
        magnitude = ((difference ^ (_U0 - negative)) + negative) & mask
        more = np.uint64(magnitude > _ONE)
        byte |= (more << _ONE | negative) << np.uint64((i & 3) << 1)
        codes[i >> 2] = byte
        byte *= np.uint64((i & 3) != 3)
        magnitudes[small] = min(magnitude - _TWO, _LONG)
        small += np.int64(more)
        wide[far] = difference
        far += np.int64(magnitude > _LARGEST)
    return small, far


@_inlined
def _count(gaps: Any, codes: Any, magnitudes: Any) -> Any:
    """Positions told by gaps, units that they span, codes that refer to magnitudes, magnitudes that refer to wide differences."""
    told = span = more = far = np.int64(0)
    for i in range(gaps.size):
        told += np.int64(gaps[i] != 255)
        span += np.int64(gaps[i])
    for i in range(codes.size):
        four = np.int64(codes[i])
        more += (four >> 1 & 1) + (four >> 3 & 1) + (four >> 5 & 1) + (four >> 7 & 1)
    for i in range(magnitudes.size):
        far += np.int64(magnitudes[i] == 255)
    return told, told + span, more, far


@_inlined
def _agree(gaps: Any, codes: Any, magnitudes: Any, wide: Any, width: Any, changed: Any, units: Any, adds: Any) -> Any:
    """As `sparse_numpy.check` says of a chunk; `codes` are read where it `adds`."""
    told, span, more, far = _count(gaps, codes if adds else codes[:0], magnitudes)
    if told != changed or gaps[gaps.size - 1] == 255 or span > units:
        return False
    unused = np.int64(codes[codes.size - 1]) >> 2 * ((told - 1) % 4 + 1) if adds else 0
    return more == magnitudes.size and unused == 0 and far * width == wide.size


@_compiled(types.boolean(_read(8), _read(8), _read(8), _read(8), types.int64, types.int64, types.int64, types.boolean))
def agree(gaps: Any, codes: Any, magnitudes: Any, wide: Any, width: Any, changed: Any, units: Any, adds: Any) -> Any:
    return _agree(gaps, codes, magnitudes, wide, width, changed, units, adds)


@_inlined
def _locate(gaps: Any, position: Any, positions: Any) -> Any:
    """The positions that these gaps tell after `position`; how many, and the last one reached."""
    count = np.int64(0)
    for i in range(gaps.size):
        ends = np.int64(gaps[i] != 255)
        position += np.int64(gaps[i]) + ends
        positions[count] = position
        count += ends
    return count, position


@_inlined
def _keep(words: Any, positions: Any, shift: Any, where: Any, before: Any) -> Any:
    """The words that these positions lie in, and what they hold; returns how many. There is room after the last position."""
    count = positions.size - 1
    positions[count] = 0xFFFFFFFF  # in another word than any
    touched = np.int64(0)
    for i in range(count):
        where[touched] = positions[i] >> shift
        touched += np.int64(positions[i] >> shift != positions[i + 1] >> shift)
    # All that is far apart in memory is fetched here, many words at once.
    for i in range(touched):
        before[i] = words[where[i]]
    return touched


@_inlined
def _add(
    words: Any, positions: Any, shift: Any, bits: Any, codes: Any, begin: Any, magnitudes: Any, small: Any, wide: Any, far: Any
) -> Any:
    """Adds the differences from the `begin`th on; how many magnitudes and wide ones were used by then."""
    within = (_ONE << np.uint64(shift)) - _ONE
    mask = _ALL >> (_WORD_BITS - bits)
    for i in range(positions.size):
        code = np.int64(codes[(begin + i) >> 2] >> (((begin + i) & 3) << 1))
        more = (code >> 1) & 1
        magnitude = np.int64(magnitudes[small])
        small += more
        sign = -(code & 1)
        difference = np.uint64(((1 + more * (magnitude + 1)) ^ sign) - sign)
        if more & np.int64(magnitude == 255):
            difference = wide[far]
            far += 1
        word = np.int64(positions[i] >> shift)
        up = (np.uint64(positions[i]) & within) * bits
        value = words[word]
        # The sum carries into higher units: only the unit's own bits of it count.
        unit_mask = mask << up
        words[word] = (value & ~unit_mask) | ((value + (difference << up)) & unit_mask)
    return small, far


@_inlined
def _put(words: Any, positions: Any, shift: Any, bits: Any, how: Any, units: Any) -> Any:
    within = (_ONE << np.uint64(shift)) - _ONE
    mask = _ALL >> (_WORD_BITS - bits)
    for i in range(positions.size):
        word = np.int64(positions[i] >> shift)
        up = (np.uint64(positions[i]) & within) * bits
        value = words[word]
        unit = units[i] << up
        words[word] = value ^ unit if how == XOR else (value & ~(mask << up)) | unit


@_compiled(
    types.uint64(
        _write(64), types.uint64, types.uint64, _read(8), types.int64, _read(64), _read(8), _read(8), _write(32), _write(64)
    )
)
def apply(
    words: Any,
    bits: Any,
    first_word: Any,
    gaps: Any,
    how: Any,
    units: Any,
    codes: Any,
    magnitudes: Any,
    lists: Any,
    before: Any,
) -> Any:
    """Changes, in place, the units of so many bits that a checked stream of gaps tells; returns the digest's change.

    By `how`: ADD the differences that codes, magnitudes (one more than the codes refer to) and `units` (the wide ones) hold; XOR
    or SET the `units`. `lists` is scratch for 2 * (BLOCK + 1) numbers, `before` for BLOCK.
    """
    shift = np.int64(0)
    while bits << np.uint64(shift) < _WORD_BITS:
        shift += 1
    positions, where = lists[: BLOCK + 1], lists[BLOCK + 1 :]
    position = np.int64(-1)
    done = small = far = np.int64(0)
    change = _U0
    for start in range(0, gaps.size, BLOCK):
        count, position = _locate(gaps[start : start + BLOCK], position, positions)
        touched = _keep(words, positions[: count + 1], shift, where, before)
        if how == ADD:
            small, far = _add(words, positions[:count], shift, bits, codes, done, magnitudes, small, units, far)
        else:
            _put(words, positions[:count], shift, bits, how, units[done : done + count])
        # A word that the next gaps touch too counts in both blocks, there from what it is now.
        for i in range(touched):
            index = _mix(first_word + np.uint64(where[i]))
            change += _mix(words[where[i]] ^ index) - _mix(before[i] ^ index)
        done += count
    return change


_BITS: Final = (8, 16, 32, 64)
_U3: Final = np.uint64(3)
_LINE_BYTES: Final = 64
"""What memory gives at a time."""
_FETCH_BYTES: Final = 1024
"""With a change in so many bytes or fewer, memory is read in order before it is changed: it comes faster than line by line."""
WINDOW_BYTES: Final = 128 * 1024
"""Of the target, through which all chunks go before the next: it stays in a core's own cache, with what is read of the streams."""
METHOD, START, UNITS, CHANGED, GAPS, VALUES, MAGNITUDES, WIDE, END = range(9)
"""The columns of a row of `fold`: what `apply` calls `how`; the first unit, and how many a chunk has; how many changed; where in
the data its four streams begin, one after the other, and where the last of them ends."""
ROW: Final = END + 1


@_inlined
def _sound(rows: Any, data: Any, width: Any) -> Any:
    """The first of the rows whose streams contradict each other; as many as there are if none does."""
    for i in range(rows.shape[0]):
        row = rows[i]
        gaps, values = data[row[GAPS] : row[VALUES]], data[row[VALUES] : row[MAGNITUDES]]
        magnitudes, wide = data[row[MAGNITUDES] : row[WIDE]], data[row[WIDE] : row[END]]
        if not _agree(gaps, values, magnitudes, wide, width, row[CHANGED], row[UNITS], row[METHOD] == ADD):
            return i
    return rows.shape[0]


@_inlined
def _next(data: Any, gap: Any, position: Any) -> Any:
    """The position after this one, and the place of the gap after its own."""
    units = np.uint64(data[gap])
    gap += _ONE
    while units == _LONG:
        position += _LONG
        units = np.uint64(data[gap])
        gap += _ONE
    return position + units + _ONE, gap


@_inlined
def _fetch(numbers: Any, start: Any, end: Any) -> Any:
    """Has the cache read them, in order. The result must be kept: else the compiler leaves the reading out."""
    seen = _U0
    for i in range(start, end, np.uint64(_LINE_BYTES // numbers.itemsize)):
        seen = seen * _MULTIPLY_1 + np.uint64(numbers[i])  # in no way that could be done for many at once
    return seen


@_inlined
def _unit(data: Any, begin: Any, count: Any, index: Any, width: Any) -> Any:
    """One of `count` units that a stream of planes holds."""
    unit = _U0
    for byte in range(width):
        unit |= np.uint64(data[begin + index + count * np.uint64(byte)]) << np.uint64(8 * byte)
    return unit


@_inlined
def _add_until(units: Any, end: Any, row: Any, cursor: Any, data: Any) -> Any:
    """Four codes at a time, without a branch for each: which of them are larger than one is nothing that a processor can guess."""
    position, gap, done, small, far = cursor[0], cursor[1], cursor[2], cursor[3], cursor[4]
    codes, changed = np.uint64(row[VALUES]), np.uint64(row[CHANGED])
    wide, distant = np.uint64(row[WIDE]), np.uint64(row[END] - row[WIDE]) // np.uint64(units.itemsize)
    while position + _ONE < end and done < changed:
        four = np.uint64(data[codes + (done >> _TWO)])
        until = min(done + np.uint64(4), changed)
        while done < until:
            position, gap = _next(data, gap, position)
            sign = _U0 - (four & _ONE)
            more = _U0 - (four >> _ONE & _ONE)
            magnitude = np.uint64(data[small])
            small -= more
            difference = ((_ONE + ((magnitude + _ONE) & more)) ^ sign) - sign
            if more & np.uint64(magnitude == _LONG):
                difference = _unit(data, wide, distant, far, units.itemsize)
                far += _ONE
            units[position] += difference
            four >>= _TWO
            done += _ONE
    cursor[0], cursor[1], cursor[2], cursor[3], cursor[4] = position, gap, done, small, far


@_inlined
def _put_until(units: Any, end: Any, row: Any, cursor: Any, data: Any) -> Any:
    position, gap, done = cursor[0], cursor[1], cursor[2]
    values, changed, flips = np.uint64(row[VALUES]), np.uint64(row[CHANGED]), row[METHOD] == XOR
    while position + _ONE < end and done < changed:
        position, gap = _next(data, gap, position)
        unit = _unit(data, values, changed, done, units.itemsize)
        units[position] = units[position] ^ unit if flips else unit
        done += _ONE
    cursor[0], cursor[1], cursor[2] = position, gap, done


@_compiled(*(types.int64(_write(b), types.int64[:, ::1], _write(8)) for b in _BITS))
def fold(units: Any, rows: Any, data: Any) -> Any:
    """All rows, oldest first, in place, without a digest; the data end with one byte more than the rows use, which is overwritten.

    Returns the first row whose streams contradict each other, before anything is changed; as many as there are if none does.
    """
    sound = _sound(rows, data, units.itemsize)
    if sound < rows.shape[0]:
        return sound
    cursors = np.empty((rows.shape[0], 5), np.uint64)
    commute, changed = rows[0, METHOD] != SET, np.int64(0)
    for i in range(rows.shape[0]):
        row, cursor = rows[i], cursors[i]
        cursor[0], cursor[1] = np.uint64(row[START]) - _ONE, np.uint64(row[GAPS])
        cursor[2], cursor[3], cursor[4] = _U0, np.uint64(row[MAGNITUDES]), _U0
        commute &= row[METHOD] == rows[0, METHOD]
        changed += row[CHANGED]
    dense = changed * _FETCH_BYTES > units.size * units.itemsize
    # Rows go a little beyond a window's end, which nobody sees where sums or flips alone meet there.
    end, step = _U0, np.uint64(WINDOW_BYTES // units.itemsize if commute else units.size)
    while end < np.uint64(units.size):
        if dense:
            data[rows[rows.shape[0] - 1, END]] = np.uint8(_fetch(units, end, min(end + step, np.uint64(units.size))))
        end += step
        for i in range(rows.shape[0]):
            if rows[i, METHOD] == ADD:
                _add_until(units, end, rows[i], cursors[i], data)
            else:
                _put_until(units, end, rows[i], cursors[i], data)
    return sound
