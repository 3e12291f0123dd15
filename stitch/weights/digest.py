"""State digests: what a tensor's bytes are, in 64 bits that can be updated where words change.

The digest is the sum modulo 2^64 of mix(w ^ mix(i)) over the little-endian 64-bit words w at index i, the last one padded with
zeros; mix is splitmix64. Every single changed word changes the sum. It detects corruption, not an attacker; objects are held
against blake3 besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from stitch.core.errors import CorruptObject
from stitch.core.ids import StateDigest
from stitch.core.manifest import TensorSpec, weights_digest
from stitch.weights.host import HostTensor
from stitch.weights.kernels import fast

__all__ = ["check_tensor", "spec_of", "specs", "state_digest", "weights_digest"]

_U64 = np.dtype("<u8")
_WORD_BYTES: Final = 8
_BLOCK_WORDS: Final = 16 * 1024
"""Per pass: words, their mix and one more array (128 KiB each) stay in a core's own cache."""
_TABLE_WORDS: Final = 4 * 1024 * 1024
"""Half of the work is mixing indices, which are the same for every tensor: those of the first 32 MiB are kept."""
_INCREMENT: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_1: Final = np.uint64(30)
_SHIFT_2: Final = np.uint64(27)
_SHIFT_3: Final = np.uint64(31)
_Words = np.ndarray[Any, np.dtype[np.uint64]]
_table: _Words = np.empty(0, _U64)


def state_digest(data: memoryview | bytes) -> StateDigest:
    """Of a tensor's little-endian, contiguous bytes. Memory beyond the bytes themselves is bounded."""
    view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
    return add_to_state(StateDigest(f"{0:016x}"), word_sum(np.frombuffer(view, np.uint8)))


def add_to_state(state: StateDigest, change: int) -> StateDigest:
    """The digest after its sum changed by so much, of either sign and any size."""
    return StateDigest(f"{(int(state, 16) + change) % 2**64:016x}")


def word_sum(data: np.ndarray[Any, np.dtype[np.uint8]], first_word: int = 0) -> int:
    """The sum of the digest over bytes that begin at the word of that index, modulo 2^64; a last part of a word is padded."""
    whole = data.nbytes // _WORD_BYTES
    words = data[: whole * _WORD_BYTES]
    compiled = fast(data.nbytes)
    total = compiled.word_sum(words, first_word) if compiled is not None else _sum_blocks(words.view(_U64), first_word)
    tail = data[whole * _WORD_BYTES :].tobytes()
    if tail:
        last: _Words = np.array([first_word + whole], _U64)
        mix_words(last)
        last ^= np.frombuffer(tail.ljust(_WORD_BYTES, b"\0"), _U64)
        mix_words(last)
        total += int(last[0])
    return total % 2**64


def _sum_blocks(words: _Words, first_word: int) -> int:
    size = max(1, min(_BLOCK_WORDS, words.size))
    mixed: _Words = np.empty(size, _U64)
    scratch: _Words = np.empty(size, _U64)
    total = 0
    table = _mixed_indices(first_word + words.size)
    for start in range(0, words.size, size):
        block = words[start : start + size]
        out, spare = mixed[: block.size], scratch[: block.size]
        index = first_word + start
        if index + block.size <= table.size:
            np.bitwise_xor(table[index : index + block.size], block, out=out)
        else:
            out[:] = np.arange(index, index + block.size, dtype=_U64)
            mix_words(out, spare)
            np.bitwise_xor(out, block, out=out)
        mix_words(out, spare)
        total += int(np.add.reduce(out, dtype=np.uint64))
    return total


def _mixed_indices(words: int) -> _Words:
    """mix(i) of the first indices: as many as the table holds by now, and at least what so many words have use for.

    Threads that grow it at once do the same work twice, and none sees half a table.
    """
    global _table
    table = _table
    if table.size < min(words, _TABLE_WORDS):
        table = np.arange(min(1 << (words - 1).bit_length(), _TABLE_WORDS), dtype=_U64)
        for start in range(0, table.size, _BLOCK_WORDS):
            block = table[start : start + _BLOCK_WORDS]
            mix_words(block)
        table.flags.writeable = False
        _table = table
    return table


def mix_words(x: _Words, spare: _Words | None = None) -> None:
    """splitmix64 in place; arithmetic on unsigned arrays wraps. `spare`: scratch of the same size."""
    spare = np.empty_like(x) if spare is None else spare
    x += _INCREMENT
    np.right_shift(x, _SHIFT_1, out=spare)
    x ^= spare
    x *= _MULTIPLY_1
    np.right_shift(x, _SHIFT_2, out=spare)
    x ^= spare
    x *= _MULTIPLY_2
    np.right_shift(x, _SHIFT_3, out=spare)
    x ^= spare


def spec_of(tensor: HostTensor) -> TensorSpec:
    """Name, dtype, shape and state digest."""
    return TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, state=state_digest(tensor.data))


def specs(tensors: Iterable[HostTensor]) -> tuple[TensorSpec, ...]:
    """Of all tensors, sorted by name."""
    return tuple(sorted(map(spec_of, tensors), key=lambda spec: spec.name))


def check_tensor(tensor: HostTensor, expected: TensorSpec, source: str) -> None:
    """Raises CorruptObject naming `source` and the tensor where dtype, shape or bytes are not the expected ones."""
    if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
        raise CorruptObject(
            f"{source}: tensor {expected.name!r} is {tensor.dtype} {list(tensor.shape)}, "
            f"not {expected.dtype} {list(expected.shape)}"
        )
    found = state_digest(tensor.data)
    if found != expected.state:
        raise CorruptObject(f"{source}: tensor {expected.name!r} has the state digest {found}, not {expected.state}")
