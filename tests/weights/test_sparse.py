"""The sparse codec: lossless to the bit, the same bytes from both kinds of loops, the digest from what changed alone."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import StateDigest
from stitch.weights import sparse, sparse_numpy
from stitch.weights.digest import state_digest
from stitch.weights.header import DTYPES
from stitch.weights.sparse_format import SPARSE, Method, read_blob
from tests.bench import _steps
from tests.weights.sparse_support import LOOPS, SMALL_CHUNK, Array, applied, pairs, running, view

pytestmark = pytest.mark.unit
both = pytest.mark.parametrize("loops", LOOPS)


def encoded(old: Array, new: Array, width: int) -> sparse.SparseTensor | None:
    return sparse.encode(view(old), view(new), width=width, state=state_digest(view(old)))


def check_delta(old: Array, new: Array, width: int) -> sparse.SparseTensor | None:
    """Encodes and applies; everything that must hold of a delta."""
    delta = encoded(old, new, width)
    if delta is None:
        assert view(old) == view(new)
        return None
    target, state = applied(old, delta.blob, width=width)
    assert view(target) == view(new)
    assert state == delta.state == state_digest(view(new))
    assert delta.changed == sparse.describe(delta.blob).changed
    chunks = len(read_blob(delta.blob).records)
    assert len(delta.blob) <= view(new).nbytes + 16 + 40 * chunks
    return delta


@both
@pytest.mark.parametrize("chunk_bytes", [SMALL_CHUNK, 1 << 20])
@settings(deadline=None, max_examples=150)
@given(pair=pairs())
def test_any_change_of_any_width(loops: str, chunk_bytes: int, pair: tuple[int, Array, Array]) -> None:
    width, old, new = pair
    with running(loops, chunk_bytes=chunk_bytes):
        delta = check_delta(old, new, width)
    if delta is not None:
        assert delta.changed == np.count_nonzero(old != new)


@settings(deadline=None, max_examples=100)
@given(pair=pairs(max_units=3000), chunk_shift=st.integers(6, 14))
def test_both_loops_write_the_same_bytes(pair: tuple[int, Array, Array], chunk_shift: int) -> None:
    width, old, new = pair
    made = []
    for loops in LOOPS:
        with running(loops, chunk_bytes=1 << chunk_shift):
            made.append(encoded(old, new, width))
    assert made[0] == made[1]


@both
@settings(deadline=None, max_examples=60)
@given(data=st.data(), pair=pairs(), count=st.integers(1, 5))
def test_many_deltas_in_one_pass_are_as_one_after_the_other(
    loops: str, data: st.DataObject, pair: tuple[int, Array, Array], count: int
) -> None:
    """Whatever the sizes of their chunks."""
    width, old, _ = pair
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    states, blobs = [old], []
    for _ in range(count):
        new = states[-1].copy()
        where = np.flatnonzero(rng.random(new.size) < 0.1)
        new[where] += rng.integers(1, 4, where.size).astype(new.dtype)
        with running(loops, chunk_bytes=1 << data.draw(st.integers(6, 10))):
            delta = encoded(states[-1], new, width)
        states.append(new)
        blobs += [delta.blob] if delta else []
    with running(loops):
        target, state = applied(old, *blobs, width=width)
    assert view(target) == view(states[-1])
    assert state == state_digest(view(states[-1]))


def made_by(method: str, old: Array, new: Array) -> bytes:
    width = old.itemsize
    if method == "xor":
        blob = sparse.from_xor(view(old ^ new), width=width)
    elif method == "raw":
        where = np.flatnonzero(old != new)
        blob = sparse.from_overwrite(where, new[where], size=old.nbytes, width=width)
    elif method == "full":
        blob = sparse.encode_whole(view(new), width=width).blob
    else:
        delta = encoded(old, new, width)
        blob = delta.blob if delta else None
    assert blob is not None
    return blob


@both
@pytest.mark.parametrize("batch_bytes", [sparse.BATCH_BYTES, 50_000])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "methods",
    ["sum sum sum sum", "xor xor xor xor", "raw raw raw raw", "sum raw xor sum raw raw", "sum sum full sum xor sum"],
)
def test_a_fold_keeps_the_order(loops: str, methods: str, width: int, batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the windows of the compiled loops, and each step changes much of what the one before it did."""
    monkeypatch.setattr(sparse, "BATCH_BYTES", batch_bytes)
    rng = np.random.default_rng(5)
    states = [rng.integers(0, 256, 1_200_000, np.uint8).view(f"<u{width}")]
    with running(loops):
        blobs = []
        for method in methods.split():
            new = states[-1].copy()
            where = np.flatnonzero(rng.random(new.size) < 0.15)
            new[where] += rng.choice([1, -1, 1, -1, 2, -40, 120, 7000], where.size).astype(np.int64).astype(new.dtype)
            blobs.append(made_by(method, states[-1], new))
            states.append(new)
        target, state = applied(states[0], *blobs, width=width)
    assert view(target) == view(states[-1])
    assert state == state_digest(view(states[-1]))


@both
def test_threads_share_nothing(loops: str) -> None:
    """Callers encode and apply many tensors at once."""
    rng = np.random.default_rng(8)
    olds = [rng.integers(0, 2**16, 30_000 + 1000 * i).astype(np.uint16) for i in range(8)]
    news = [np.where(rng.random(old.size) < 0.05, old + 3, old).astype(np.uint16) for old in olds]

    def work(number: int) -> None:
        check_delta(olds[number % 8], news[number % 8], 2)

    with running(loops, chunk_bytes=1 << 13), ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(48)))


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_every_bit_pattern(loops: str, dtype: str) -> None:
    """NaNs with payloads, negative zeros, infinities, bools that are neither: bits are bits."""
    width = sparse.unit_bytes(dtype)
    assert width == DTYPES[dtype].itemsize
    rng = np.random.default_rng(width)
    patterns = rng.integers(0, 256, 3000 * width, np.uint8)
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf], np.float64).view(np.uint8)
    old, new = patterns.copy(), patterns.copy()
    new[: special.size] = special
    new[-width:] ^= 0x80
    with running(loops, chunk_bytes=4096):
        check_delta(old, new, width)
        check_delta(new, old, width)


@both
@pytest.mark.parametrize("bits", [0x7FC0, 0x7FC1, 0xFFC0, 0x8000, 0x0000, 0x7F80])
def test_a_bf16_of_each_odd_kind(loops: str, bits: int) -> None:
    old = np.array([0x3F80], np.uint16).view(ml_dtypes.bfloat16)
    new = np.array([bits], np.uint16).view(ml_dtypes.bfloat16)
    with running(loops):
        check_delta(old, new, 2)
        check_delta(new, old, 2)


@both
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1001])
def test_every_small_size(loops: str, size: int) -> None:
    """Scalars, empty tensors, packed int4 of an odd length: the last word is padded, in the digest only."""
    old = np.zeros(size, np.uint8)
    new = np.arange(1, size + 1).astype(np.uint8)
    with running(loops, chunk_bytes=SMALL_CHUNK):
        check_delta(old, new, 1)
        whole = sparse.encode_whole(view(new), width=1)
        target, state = applied(old, whole.blob, width=1)
    assert view(target) == view(new)
    assert state == whole.state == state_digest(view(new))
    assert whole.changed == size


def test_nothing_changed_is_no_delta() -> None:
    same = np.arange(5000, dtype=np.float32)
    assert encoded(same, same.copy(), 4) is None
    assert sparse.apply([], view(same), width=4, state=StateDigest("00000000000000ff")) == "00000000000000ff"


def test_units_are_compared_by_their_bits() -> None:
    """Where a comparison of numbers would miss a zero's sign, or see a change from a NaN to the same NaN."""
    old, new = np.array([0.0, np.nan], np.float32), np.array([-0.0, np.nan], np.float32)
    delta = check_delta(old, new, 4)
    assert delta is not None
    assert delta.changed == 1


@both
@settings(deadline=None, max_examples=60)
@given(pair=pairs())
def test_without_the_base(loops: str, pair: tuple[int, Array, Array]) -> None:
    """From the xor of the bytes, and from positions and values of units or of bytes."""
    width, old, new = pair
    xor = sparse.from_xor(view(view_of(old) ^ view_of(new)), width=width)
    units = np.flatnonzero(old != new)
    overwrite = sparse.from_overwrite(units, new[units], size=new.nbytes, width=width)
    single = np.flatnonzero(view_of(old) != view_of(new))
    narrow = sparse.from_overwrite(single, view_of(new)[single], size=new.nbytes, width=1)
    with running(loops):
        for blob in (xor, overwrite, narrow):
            assert (blob is None) == (units.size == 0)
            if blob is not None:
                target, state = applied(old, blob, width=width)
                assert view(target) == view(new)
                assert state == state_digest(view(new))


def view_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def test_raw_values_are_idempotent_and_differences_are_not() -> None:
    old = np.arange(1000, dtype=np.uint16)
    new = old.copy()
    new[::50] += 1
    where = np.arange(0, 1000, 50)
    raw = sparse.from_overwrite(where, new[where], size=2000, width=2)
    delta = encoded(old, new, 2)
    assert raw is not None
    assert delta is not None
    target, state = applied(new, raw, width=2)
    assert view(target) == view(new)
    assert state == delta.state
    target, state = applied(new, delta.blob, width=2)
    assert view(target) != view(new)
    assert state == state_digest(view(target)) != delta.state


# --- how small ------------------------------------------------------------------------------------------------------------


def sizes_by_method(old: Array, new: Array, width: int) -> dict[str, int]:
    """What the tensor would take if every chunk were held by one method."""
    delta = encoded(old, new, width)
    assert delta is not None
    found = {"chosen": len(delta.blob)}
    for method in SPARSE:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse, "SPARSE", (method,))
            patch.setattr(sparse, "FULL_SHARE", 1e9)
            made = encoded(old, new, width)
            assert made is not None
            found[method.name] = len(made.blob)
    found["FULL"] = len(sparse.encode_whole(view(new), width=width).blob)
    return found


def cases() -> dict[str, tuple[int, Array, Array]]:
    rng = np.random.default_rng(5)
    numbers = rng.standard_normal(40_000).astype(np.float32)
    halves = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    trained = (numbers + rng.standard_normal(numbers.size).astype(np.float32) * 1e-6).view(np.uint32)
    few = rng.random(halves.size) < 0.02
    near = halves.copy()
    near[few] += rng.choice(np.array([1, 0xFFFF], np.uint16), int(few.sum()))
    other = np.where(few, rng.permutation(halves), halves)
    signs = np.where(few, halves ^ 0x8000, halves)
    constant = np.where(few, np.uint16(0x3F80), halves)
    return {
        "a step up or down": (2, halves, near),
        "other numbers": (2, halves, other),
        "other signs": (2, halves, signs),
        "all to one value": (2, halves, constant),
        "all of them a little": (4, numbers.view(np.uint32), trained),
        "all of them zero": (2, halves, np.zeros_like(halves)),
        "all of them others": (2, halves, rng.permutation(halves)),
    }


@pytest.mark.parametrize("name", cases())
def test_the_smallest_method_is_taken(name: str) -> None:
    """Within a twentieth, or a fifth of a percent of the tensor, of the best single method."""
    width, old, new = cases()[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "CHUNK_BYTES", 1 << 14)
        found = sizes_by_method(old, new, width)
    best = min(size for method, size in found.items() if method != "chosen")
    assert found["chosen"] <= max(1.05 * best, best + 0.002 * old.nbytes), found


def test_the_choice_is_made_anew_where_the_tensor_changes_its_character() -> None:
    rng = np.random.default_rng(6)
    old = rng.integers(0, 2**16, 200_000).astype(np.uint16)
    new = old.copy()
    new[:100_000:40] += 1
    new[100_000::40] = rng.integers(0, 2**16, 2500).astype(np.uint16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "CHUNK_BYTES", 1 << 14)
        delta = check_delta(old, new, 2)
        assert delta is not None
        found = sizes_by_method(old, new, 2)
    assert (
        set(sparse.describe(delta.blob).method_bytes) >= {"differences", "xor"} or "raw" in sparse.describe(delta.blob).method_bytes
    )
    assert found["chosen"] <= 1.02 * min(size for method, size in found.items() if method != "chosen"), found


def test_recorded_training_steps_are_small() -> None:
    """Some 1.2 % of the numbers change; the delta is below 1 % of the bytes, its records and small tensors included."""
    base, first = _steps.base(), next(_steps.steps())
    size = changed = total = 0
    for name, old in base.items():
        delta = check_delta(old, first[name], 2)
        if delta is not None:
            size += len(delta.blob)
            changed += delta.changed
        total += old.nbytes
    assert 0.01 < changed * 2 / total < 0.015
    assert size < 0.01 * total


def test_a_reset_tensor_costs_next_to_nothing() -> None:
    old = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
    delta = check_delta(old, np.zeros_like(old), 4)
    assert delta is not None
    assert len(delta.blob) < 500


# --- what it says of itself ------------------------------------------------------------------------------------------------


def test_description() -> None:
    old = np.zeros(1000, np.uint16) + 500
    new = old.copy()
    new[[0, 10, 20]] += 1
    new[[30, 40]] -= 3
    new[50] += 300
    delta = encoded(old, new, 2)
    assert delta is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "SPARSE", (Method.DIFFERENCES,))
        delta = encoded(old, new, 2)
    assert delta is not None
    told = sparse.describe(delta.blob)
    assert (told.units, told.width, told.changed) == (1000, 2, 6)
    assert told.method_units == {"differences": 6}
    assert told.magnitudes == (3, 2, 0, 0, 0, 0, 0, 0, 1)
    assert sum(told.method_bytes.values()) + 16 + 40 == len(delta.blob)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_magnitudes_up_to_the_widest(width: int) -> None:
    old = np.zeros(8 * width, f"<u{width}")
    new = np.left_shift(np.array(1, old.dtype), np.arange(8 * width).astype(old.dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "SPARSE", (Method.DIFFERENCES,))
        patch.setattr(sparse, "FULL_SHARE", 1e9)
        delta = encoded(old, new, width)
    assert delta is not None
    assert sparse.describe(delta.blob).magnitudes == (1,) * (8 * width)


# --- what it refuses --------------------------------------------------------------------------------------------------------


def test_input_that_makes_no_sense_is_refused_by_name() -> None:
    data = view(np.zeros(8, np.uint8))
    zero = StateDigest("0" * 16)
    with pytest.raises(InvalidRequest, match="new: 8 bytes, old: 4"):
        sparse.encode(data[:4], data, width=2, state=zero)
    with pytest.raises(InvalidRequest, match="old: 3 bytes are not whole units of 2"):
        sparse.encode(data[:3], data[:3], width=2, state=zero)
    with pytest.raises(InvalidRequest, match="width: 3"):
        sparse.encode_whole(data, width=3)
    with pytest.raises(InvalidRequest, match="dtype: 'F4'"):
        sparse.unit_bytes("F4")
    with pytest.raises(InvalidRequest, match="target: is read-only"):
        sparse.apply([], data.toreadonly(), width=1, state=zero)
    values = np.zeros(2, np.uint8)
    for positions in ([1, 1], [2, 1], [-1, 0], [0, 8]):
        with pytest.raises(InvalidRequest, match="positions"):
            sparse.from_overwrite(np.array(positions), values, size=8, width=1)
    with pytest.raises(InvalidRequest, match="values: 2 of them for 1"):
        sparse.from_overwrite(np.array([1]), values, size=8, width=1)


def test_a_blob_of_another_tensor_is_refused() -> None:
    delta = encoded(np.zeros(100, np.uint16), np.ones(100, np.uint16), 2)
    assert delta is not None
    for size, width in ((202, 2), (198, 2), (200, 1)):
        with pytest.raises(CorruptObject, match="100 units of 2 bytes"):
            sparse.apply([delta.blob], view(np.zeros(size, np.uint8)), width=width, state=StateDigest("0" * 16))


@pytest.mark.parametrize(
    ("width", "gaps"), list(itertools.product([1, 2], [[0], [254], [255], [256], [509], [510], [0, 255, 256]]))
)
def test_gaps_at_the_edges_of_a_byte(width: int, gaps: list[Any]) -> None:
    positions = np.cumsum(np.array(gaps) + 1) - 1
    stream = sparse_numpy.gaps_of(positions.astype(np.uint32))
    assert stream.nbytes == len(gaps) + sum(gap // 255 for gap in gaps)
    old = np.zeros(positions[-1] + 1, f"<u{width}")
    new = old.copy()
    new[positions] = 1
    for loops in LOOPS:
        with running(loops):
            check_delta(old, new, width)
