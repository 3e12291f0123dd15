"""State digests against a plain reference, and what they find."""

from __future__ import annotations

import json

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject
from stitch.weights.digest import _BLOCK_WORDS, check_tensor, spec_of, specs, state_digest, weights_digest
from stitch.weights.tensors import host_tensor, iterate
from tests.weights.versions import model

pytestmark = pytest.mark.unit
MASK = 2**64 - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference(data: bytes) -> str:
    padded = data + b"\0" * (-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    return f"{sum(splitmix64(w ^ splitmix64(i)) for i, w in enumerate(words)) & MASK:016x}"


def test_splitmix64_is_the_published_function() -> None:
    """The first outputs of the generator seeded with 0 and 1234567, as in its reference code's test vectors."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567) == 6457827717110365317


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", "0000000000000000"),
        (b"\0", f"{splitmix64(splitmix64(0)):016x}"),
        (b"\x01" + bytes(7) + b"\x02", f"{(splitmix64(1 ^ splitmix64(0)) + splitmix64(2 ^ splitmix64(1))) & MASK:016x}"),
    ],
)
def test_known_answers(data: bytes, digest: str) -> None:
    assert state_digest(data) == digest == reference(data)


@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    assert state_digest(data) == reference(data)


@pytest.mark.parametrize("words", [_BLOCK_WORDS - 1, _BLOCK_WORDS, _BLOCK_WORDS + 1, 2 * _BLOCK_WORDS + 3])
def test_across_blocks_and_unaligned(words: int) -> None:
    data = np.random.default_rng(words).bytes(words * 8 + 5)
    assert state_digest(data) == reference(data)
    assert state_digest(memoryview(b"x" + data)[1:]) == reference(data)


@settings(deadline=None)
@given(data=st.binary(min_size=1, max_size=100), place=st.integers(0, 10_000))
def test_every_flipped_bit_shows(data: bytes, place: int) -> None:
    place %= len(data) * 8
    flipped = bytearray(data)
    flipped[place // 8] ^= 1 << place % 8
    assert state_digest(bytes(flipped)) != state_digest(data)


def test_order_of_words_counts() -> None:
    assert state_digest(b"a" * 8 + b"b" * 8) != state_digest(b"b" * 8 + b"a" * 8)


def test_specs_and_weights_digest() -> None:
    found = specs(iterate(model()))
    assert [spec.name for spec in found] == sorted(model())
    rows = [[spec.name, spec.dtype, list(spec.shape), reference(model()[spec.name].tobytes())] for spec in found]
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    assert weights_digest(reversed(found)) == blake3(text.encode()).hexdigest()


def test_check_names_the_tensor() -> None:
    good = host_tensor("w", np.arange(4, dtype=np.float32))
    spec = spec_of(good)
    check_tensor(good, spec, "here")
    for bad in (np.arange(4, dtype=np.int32), np.arange(4, dtype=np.float32).reshape(2, 2), np.array([0, 1, 2, 4], np.float32)):
        with pytest.raises(CorruptObject, match="here: tensor 'w'"):
            check_tensor(host_tensor("w", bad), spec, "here")
