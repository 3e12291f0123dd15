"""docs/delta-format.md: its example is what it says, and its rules suffice for a reader that knows nothing else."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings

from stitch.weights import sparse
from stitch.weights.digest import state_digest
from stitch.weights.sparse_format import Method
from tests.weights.sparse_support import Array, applied, pairs, running, view

pytestmark = pytest.mark.unit
PAGE = Path(__file__).parents[2] / "docs" / "delta-format.md"


def example() -> tuple[Array, Array, bytes]:
    old = np.full(300, 0x3F80, np.uint16)
    new = old.copy()
    new[[0, 3, 270, 290, 299]] = [0x3F81, 0x3F7F, 0x3F83, 0xBF80, 0x4080]
    found = re.search(r"```hex\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return old, new, bytes.fromhex(found.group(1))


def test_the_example_decodes_to_what_the_page_says() -> None:
    old, new, blob = example()
    assert len(blob) == 69
    target, state = applied(old, blob, width=2)
    assert view(target) == view(new)
    text = PAGE.read_text(encoding="utf-8")
    assert f"from `{state_digest(view(old))}` to `{state}`" in " ".join(text.split())


def test_the_example_is_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, blob = example()
    monkeypatch.setattr(sparse, "SPARSE", (Method.DIFFERENCES,))
    delta = sparse.encode(view(old), view(new), width=2, state=state_digest(view(old)))
    assert delta is not None
    assert delta.blob == blob


def read(blob: bytes, old: bytes) -> bytes:
    """A reader by the page's words, unit by unit, sharing nothing with the codec."""
    magic, width, shift, zero, units = struct.unpack_from("<4sBBHQ", blob)
    assert (magic, zero) == (b"SPD\x01", 0)
    values = [int.from_bytes(old[i : i + width], "little") for i in range(0, len(old), width)]
    per_chunk = 2**shift // width
    chunks = -(-units * width // 2**shift)
    place = 16 + 40 * chunks
    modulus = 2 ** (8 * width)

    def take(length: int, stored: int) -> bytes:
        nonlocal place
        raw = blob[place : place + stored]
        place += stored
        return raw if stored == length else zstandard.ZstdDecompressor().decompress(raw)

    def listed(planes: bytes) -> list[int]:
        count = len(planes) // width
        return [sum(planes[plane * count + i] << 8 * plane for plane in range(width)) for i in range(count)]

    for chunk in range(chunks):
        method, _, _, changed, *sizes = struct.unpack_from("<BBHI8I", blob, 16 + 40 * chunk)
        gaps, stream, magnitudes, wide = (take(*sizes[i : i + 2]) for i in range(0, 8, 2))
        where, position = [], chunk * per_chunk - 1
        for gap in gaps:
            position += gap + (gap < 255)
            where += [position] if gap < 255 else []
        if method == 1:
            begin = chunk * per_chunk
            values[begin : begin + len(stream) // width] = listed(stream)
        elif method == 2:
            more, far = iter(magnitudes), iter(listed(wide))
            for i in range(changed):
                code = stream[i // 4] >> 2 * (i % 4) & 3
                magnitude = next(more) + 2 if code > 1 else 1
                difference = next(far) if magnitude == 257 else magnitude * (-1 if code & 1 else 1)
                values[where[i]] = (values[where[i]] + difference) % modulus
        else:
            for index, value in zip(where, listed(stream), strict=True):
                values[index] = values[index] ^ value if method == 3 else value
    assert place == len(blob)
    return b"".join(value.to_bytes(width, "little") for value in values)


@settings(deadline=None, max_examples=60)
@given(pair=pairs(max_units=700))
def test_a_reader_made_from_the_page_reads_what_is_written(pair: tuple[int, Array, Array]) -> None:
    width, old, new = pair
    wanted: dict[str, Any] = {"old": view(old), "new": view(new), "width": width, "state": state_digest(view(old))}
    with running("numpy", chunk_bytes=256):
        delta = sparse.encode(**wanted)
        for method in (Method.DIFFERENCES, Method.XOR, Method.RAW):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sparse, "SPARSE", (method,))
                patch.setattr(sparse, "FULL_SHARE", 1e9)
                one = sparse.encode(**wanted)
            assert one is None or read(one.blob, bytes(view(old))) == bytes(view(new))
        whole = sparse.encode_whole(view(new), width=width)
    assert delta is None or read(delta.blob, bytes(view(old))) == bytes(view(new))
    assert read(whole.blob, bytes(view(old))) == bytes(view(new))
