"""Blobs that are damaged, or made to harm: refused, or seen by the digest; never a crash, never memory past the stated bounds."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject
from stitch.weights import sparse
from stitch.weights.digest import state_digest
from stitch.weights.sparse_format import MAGIC, Chunk, Method, read_blob, read_header
from tests.weights.sparse_support import LOOPS, SMALL_CHUNK, Array, applied, pairs, running, view

pytestmark = pytest.mark.unit
both = pytest.mark.parametrize("loops", LOOPS)
HEADER = struct.Struct("<4sBBHQ")
RECORD = struct.Struct("<BBHI8I")


def header(units: int, *, width: int = 2, shift: int = 6) -> bytes:
    return HEADER.pack(b"SPD\x01", width, shift, 0, units)


def record(method: int, changed: int, *streams: tuple[int, int]) -> bytes:
    sizes = [size for stream in [*streams, *[(0, 0)] * (4 - len(streams))] for size in stream]
    return RECORD.pack(method, 0, 0, changed, *sizes)


def try_apply(blob: bytes, old: Array, width: int) -> None:
    """Refused, or a result whose digest is that of the bytes: so a wrong one is told by the manifest's digest."""
    try:
        target, state = applied(old, blob, width=width)
    except CorruptObject:
        return
    assert state == state_digest(view(target))


@both
@settings(deadline=None, max_examples=300)
@given(blob=st.binary(max_size=300), tail=st.booleans())
def test_random_bytes(loops: str, blob: bytes, tail: bool) -> None:
    old = np.zeros(37, np.uint16)
    with running(loops):
        try_apply(header(37) + blob if tail else blob, old, 2)
        with contextlib.suppress(CorruptObject):
            sparse.describe(blob)


@both
@settings(deadline=None, max_examples=400)
@given(
    pair=pairs(),
    edits=st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from(["set", "flip", "cut", "insert", "swap"]), st.integers(0, 255)),
        min_size=1,
        max_size=6,
    ),
)
def test_mutated_blobs(loops: str, pair: tuple[int, Array, Array], edits: list[tuple[float, str, int]]) -> None:
    width, old, new = pair
    with running(loops, chunk_bytes=SMALL_CHUNK):
        delta = sparse.encode(view(old), view(new), width=width, state=state_digest(view(old)))
        if delta is None:
            return
        blob = bytearray(delta.blob)
        for place, kind, value in edits:
            index = min(int(place * len(blob)), len(blob) - 1)
            match kind:
                case "set":
                    blob[index] = value
                case "flip":
                    blob[index] ^= 1 << value % 8
                case "cut":
                    del blob[index : index + value % 9]
                case "insert":
                    blob[index:index] = bytes([value] * (value % 9))
                case "swap":
                    blob[index], blob[-1 - index] = blob[-1 - index], blob[index]
            if not blob:
                return
        try_apply(bytes(blob), old, width)


@both
@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_records_that_are_made_up(loops: str, data: st.DataObject) -> None:
    """Closer to what passes than mutations come: sizes near the allowed ones, streams of anything, frames of anything."""
    width = data.draw(st.sampled_from([1, 2, 4, 8]))
    units = data.draw(st.integers(1, 64 // width))
    changed = data.draw(st.integers(0, units))
    method = data.draw(st.integers(0, 5))
    lengths = [changed, *([-(-changed // 4), data.draw(st.integers(0, changed)), 0] if method == 2 else [changed * width, 0, 0])]
    records, body = [], b""
    for length in lengths:
        length += data.draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
        content = data.draw(st.binary(min_size=max(length, 0), max_size=max(length, 0)))
        frame = zstandard.ZstdCompressor(level=1).compress(content)
        stored = data.draw(st.sampled_from([content, frame, frame[:-1]]))
        records.append((max(length, 0), len(stored)))
        body += stored
    blob = header(units, width=width) + record(method, changed, *records) + body
    with running(loops):
        try_apply(blob, np.zeros(units, f"<u{width}"), width)


def test_frames_do_not_decide_what_is_allocated() -> None:
    """A frame that states another size than its record, none, or far more than it may hold: nothing of that size is allocated."""
    old = np.zeros(32, np.uint16)
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(64))
    claims = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26)))
    for frame in (bomb, bytes(claims), silent, b"\x28\xb5\x2f\xfd" + b"\xff" * 20, bytes(20)):
        kept = frame[:60]
        blob = header(32) + record(1, 32, (0, 0), (64, len(kept))) + kept
        tracemalloc.start()
        with pytest.raises(CorruptObject, match="chunk 0"):
            sparse.apply([blob], view(old), width=2, state=state_digest(view(old)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    honest = zstandard.ZstdCompressor(level=1).compress(bytes(64))
    lying = honest.replace(bytes([64]), bytes([63]), 1)
    blob = header(63, width=1) + record(1, 63, (0, 0), (63, len(lying))) + lying
    assert zstandard.frame_content_size(lying) == 63
    with pytest.raises(CorruptObject, match="chunk 0"):
        sparse.apply([blob], view(np.zeros(63, np.uint8)), width=1, state=state_digest(bytes(63)))


@pytest.mark.parametrize(
    ("blob", "says"),
    [
        (b"", "less than a header"),
        (b"SPD\x02" + bytes(12), "of a newer format"),
        (HEADER.pack(MAGIC, 3, 20, 0, 0), "unit width 3"),
        (HEADER.pack(MAGIC, 2, 5, 0, 0), "chunk shift 5"),
        (HEADER.pack(MAGIC, 2, 23, 0, 0), "chunk shift 23"),
        (HEADER.pack(MAGIC, 2, 20, 1, 0), "reserved 1"),
        (header(2**64 - 1), "do not hold the records"),
        (header(32), "do not hold the records"),
        (header(0) + b"x", "promise 16 bytes, it has 17"),
        (header(32) + record(0, 0) + b"x", "promise 56 bytes, it has 57"),
        (header(32) + record(0, 1), "contradicts itself"),
        (header(32) + record(5, 1, (1, 1), (2, 2)) + b"abc", "contradicts itself"),
        (header(32) + record(3, 33, (33, 33), (66, 66)) + bytes(99), "contradicts itself"),
        (header(32) + record(1, 0, (0, 0), (64, 64)) + bytes(64), "contradicts itself"),
        (header(32) + record(2, 1, (1, 1), (1, 1), (0, 0), (2, 2)) + bytes(4), "contradicts itself"),
    ],
)
def test_what_is_wrong_is_named(blob: bytes, says: str) -> None:
    with pytest.raises(CorruptObject, match=says):
        read_blob(blob)


@both
@pytest.mark.parametrize(
    ("method", "changed", "parts"),
    [
        (4, 2, [b"\x00\x1f", bytes(4)]),  # beyond the last unit
        (4, 2, [b"\x00\xff", bytes(4)]),  # a gap that does not end
        (4, 1, [b"\xff", bytes(2)]),
        (4, 1, [b"\x01\x01", bytes(2)]),  # more than are told
        (2, 2, [b"\x00\x00", b"\x00", b"\x00"]),  # a magnitude that no code refers to
        (2, 2, [b"\x00\x00", b"\x02"]),  # a code that refers to none
        (2, 2, [b"\x00\x00", b"\x10"]),  # codes of units that there are not
        (2, 2, [b"\x00\x00", b"\x02", b"\xff"]),  # a wide difference that is not there
        (2, 2, [b"\x00\x00", b"\x02", b"\x01", b"\x00\x00"]),  # one that no magnitude refers to
    ],
)
def test_streams_that_contradict_each_other_change_nothing(loops: str, method: int, changed: int, parts: list[bytes]) -> None:
    lengths = [(len(part), len(part)) for part in parts]
    blob = header(32) + record(method, changed, *lengths) + b"".join(parts)
    target = np.zeros(32, np.uint16)
    with running(loops), pytest.raises(CorruptObject, match="chunk 0 of 32 units"):
        sparse.apply([blob], view(target), width=2, state=state_digest(view(target)))
    assert not target.any()


@both
def test_a_fold_names_the_chunk_that_contradicts_itself(loops: str) -> None:
    good = header(64) + 2 * record(4, 1, (1, 1), (2, 2)) + b"\x05\x01\x02" * 2
    bad = header(64) + record(4, 1, (1, 1), (2, 2)) + record(4, 1, (1, 1), (2, 2)) + b"\x05\x01\x02" + b"\x20\x01\x02"
    target = np.zeros(64, np.uint16)
    with running(loops), pytest.raises(CorruptObject, match="chunk 1 of 32 units"):
        sparse.apply([good, good, bad, good], view(target), width=2, state=None)


@both
@settings(deadline=None, max_examples=40)
@given(place=st.floats(0, 1), bit=st.integers(0, 7))
def test_one_flipped_bit_is_refused_or_told_by_the_digest(loops: str, place: float, bit: int) -> None:
    """Whatever else would catch it: bits that a reader may ignore are none in this format but for those inside a zstd frame."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 2**16, 3000).astype(np.uint16)
    new = old.copy()
    new[::37] += 1
    new[5::411] += 7
    new[9::711] += 1000
    delta = sparse.encode(view(old), view(new), width=2, state=state_digest(view(old)))
    assert delta is not None
    blob = bytearray(delta.blob)
    blob[min(int(place * len(blob)), len(blob) - 1)] ^= 1 << bit
    with running(loops):
        try:
            target, state = applied(old, bytes(blob), width=2)
        except CorruptObject:
            return
    assert state == state_digest(view(target))
    assert (state == delta.state) == (view(target) == view(new))


def test_a_header_alone_can_be_read() -> None:
    read = read_header(header(2**40, width=4, shift=21))
    assert (read.units, read.width, read.chunk_bytes) == (2**40, 4, 1 << 21)


def test_chunks_are_read_without_copying_what_is_not_compressed() -> None:
    blob = header(32) + record(4, 1, (1, 1), (2, 2)) + b"\x00\x01\x02"
    chunk = read_blob(blob).open(0)
    assert isinstance(chunk, Chunk)
    assert chunk.method is Method.RAW
    assert chunk.values.tolist() == [1, 2]
    assert not chunk.values.flags.writeable
