"""What `difference` says changed is what did, however it was found out."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from stitch.core.errors import CorruptObject
from stitch.core.events import RunVersion
from stitch.core.ids import RunId, VersionNumber
from stitch.operators.difference import SORTS, Change, Difference, Way, difference, ordered
from stitch.operators.values import CHUNK_VALUES, Moved, compare
from stitch.store.faulty import FaultyStore
from stitch.store.memory import MemoryStore
from stitch.weights.header import DTYPES
from stitch.weights.host import HostTensor, host_tensor
from stitch.weights.staging import StagingCancelled
from tests.operators.published import Published, line_of_four, model, stepped

pytestmark = pytest.mark.unit

NARROW = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"]


def moved(old: np.ndarray, new: np.ndarray) -> Moved:
    return compare(host_tensor("x", old), host_tensor("x", new))


@pytest.mark.parametrize("dtype", NARROW)
def test_steps_count_the_numbers_in_between(dtype: str) -> None:
    """Each value of one byte against all others, by their places in the sorted list of all numbers of the type."""
    count = 2 if dtype == "BOOL" else 256
    every = np.arange(count, dtype=np.uint8).view(DTYPES[dtype])
    with np.errstate(all="ignore"):
        real = every.astype(np.float64)
    finite = np.flatnonzero(np.isfinite(real))
    places = {value: place for place, value in enumerate(sorted(set(real[finite])))}
    for old in finite:
        distances = [abs(places[real[old]] - places[real[new]]) for new in finite]
        bins = [0] * 9
        for distance in distances:
            bins[distance.bit_length()] += 1
        found = moved(np.repeat(every[[old]], finite.size), every[finite])
        assert found.changed == finite.size - 1
        assert (*found.steps, *[0] * (8 - len(found.steps))) == tuple(bins[1:]), real[old]


FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
INTEGERS = [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@given(st.data(), st.sampled_from([*FLOATS, *INTEGERS]))
def test_what_differs_is_counted_bit_for_bit(data: st.DataObject, dtype: type) -> None:
    width = np.dtype(dtype).itemsize
    units = arrays.arrays(np.dtype(f"<u{width}"), 9)
    old, new = data.draw(units), data.draw(units)
    new[:3] = old[:3]
    found = moved(old.view(dtype), new.view(dtype))
    assert found.changed == np.count_nonzero(old != new)
    assert found.nonfinite == np.count_nonzero(~np.isfinite(new.view(dtype).astype(np.float64)) & (old != new))
    assert sum(found.steps) <= found.changed


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_neighbour_is_one_step_away_over_zero_too(dtype: type) -> None:
    tiny = np.nextafter(dtype(0), dtype(1))
    old = np.array([1, -1, 0, tiny, -tiny, 1024], dtype)
    up = np.nextafter(old, dtype(np.inf))
    found = moved(old, up)
    assert found.steps == (6,)
    assert found.by_one == 6
    assert moved(np.array([tiny]), np.array([-tiny])).steps == (0, 1)
    assert moved(np.array([0.0], dtype), np.array([-0.0], dtype)) == Moved(
        changed=1, steps=(), largest=0.0, relative=None, nonfinite=0
    )


@pytest.mark.parametrize(
    ("old", "new", "distance"),
    [(0, 2**64 - 1, 2**64 - 1), (2**63, 2**63 - 1, 1)],
)
def test_the_widest_integers_do_not_wrap(old: int, new: int, distance: int) -> None:
    found = moved(np.array([old], np.uint64), np.array([new], np.uint64))
    assert found.steps == (0,) * (distance.bit_length() - 1) + (1,)
    low, high = np.array([-(2**63)], np.int64), np.array([2**63 - 1], np.int64)
    assert moved(low, high).steps == (0,) * 63 + (1,)


def test_magnitudes_are_those_of_the_values() -> None:
    old = np.array([3.0, 4.0, 0.0, np.nan], np.float32)
    new = np.array([3.0, 4.5, np.inf, 1.0], np.float32)
    found = moved(old, new)
    assert found.changed == 3
    assert found.largest == 0.5
    assert found.relative == pytest.approx(0.1)
    assert found.nonfinite == 1


def test_chunks_add_up() -> None:
    rng = np.random.default_rng(0)
    old = rng.standard_normal(CHUNK_VALUES + 17).astype(np.float32)
    new = old.copy()
    new[[0, CHUNK_VALUES - 1, CHUNK_VALUES, CHUNK_VALUES + 16]] += 1
    found = moved(old, new)
    assert found.changed == 4
    assert found.relative == pytest.approx(float(np.linalg.norm(new - old) / np.linalg.norm(old)), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-12, 1.0, 1e25, 1e38])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_relative_change_holds_at_every_scale(dtype: type, scale: float) -> None:
    rng = np.random.default_rng(1)
    old = (rng.uniform(0.5, 1, 100_000) * scale).astype(dtype)
    new = (old.astype(np.float64) * 1.5).astype(dtype)
    wide_old, wide_new = old.astype(np.float64), new.astype(np.float64)
    expected = np.linalg.norm(wide_new - wide_old) / np.linalg.norm(wide_old)
    assert moved(old, new).relative == pytest.approx(float(expected), rel=1e-3)


def test_an_empty_tensor_and_a_scalar() -> None:
    empty = HostTensor(name="x", dtype="F32", shape=(0,), data=memoryview(b""))
    assert compare(empty, empty).changed == 0
    assert moved(np.array(1.0), np.array(2.0)).changed == 1


# --- versions ------------------------------------------------------------------------------------------------------------------


class Line:
    def __init__(self) -> None:
        self.store = FaultyStore(MemoryStore())
        self.made, self.weights = line_of_four(self.store)

    def diff(self, first: int, second: int, **options: bool) -> Difference:
        versions = self.made.version(first), self.made.version(second)
        return difference(self.store, self.made.policy, *versions, **options)

    def downloads(self) -> set[str]:
        return {key for call, key in self.store.calls if call == "download"}


@pytest.fixture
def line() -> Line:
    return Line()


def test_a_delta_tells_what_its_values_would(line: Line) -> None:
    by_delta, by_values = line.diff(0, 1), line.diff(0, 1, values=True)
    assert (by_delta.way, by_values.way) == (Way.DELTA, Way.VALUES)
    assert [t.name for t in by_delta.tensors] == ["embed.weight", "layers.0.weight"]
    for told, compared in zip(by_delta.tensors, by_values.tensors, strict=True):
        assert told.moved is not None
        assert compared.moved is not None
        assert (told.name, told.moved.changed, told.moved.steps) == (compared.name, compared.moved.changed, compared.moved.steps)
        assert told.moved.by_one == told.moved.changed
        old, new = (self[told.name].view(np.uint16) for self in line.weights[:2])
        assert told.moved.changed == np.count_nonzero(old != new)
        assert told.share == np.mean(old != new)
    assert by_delta.unchanged == 4
    assert by_delta.stored == sum(file.size for file in line.made.manifest(1).weights)
    assert by_delta.bytes == sum(array.nbytes for array in line.weights[1].values())


def test_a_delta_alone_is_downloaded(line: Line) -> None:
    line.diff(2, 3)
    assert line.downloads() == {file.key for file in line.made.manifest(3).weights}


def test_versions_further_apart_are_compared_by_value(line: Line) -> None:
    found = line.diff(0, 3)
    assert found.way is Way.VALUES
    assert found.stored is None
    tensors = {tensor.name: tensor.moved for tensor in found.tensors}
    for name, told in tensors.items():
        assert told is not None
        width = line.weights[0][name].dtype.itemsize
        old, new = (line.weights[n][name].view(f"<u{width}") for n in (0, 3))
        assert told.changed == np.count_nonzero(old != new)
    assert tensors.keys() == {"embed.weight", "layers.0.weight", "layers.1.weight"}


def test_back_is_as_far_as_forth(line: Line) -> None:
    forth, back = line.diff(0, 3), line.diff(3, 0)
    for one, other in zip(forth.tensors, back.tensors, strict=True):
        assert one.moved is not None
        assert other.moved is not None
        assert one.moved.changed == other.moved.changed
        assert one.moved.steps == other.moved.steps
        assert one.moved.largest == other.moved.largest


def test_the_same_weights_are_not_read(line: Line) -> None:
    tip = RunVersion(run=RunId("r1"), number=VersionNumber(3))
    line.made.claim("r2", alias=tip)
    versions = line.made.version(3, "r1"), line.made.version(0, "r2")
    found = difference(line.store, line.made.policy, *versions)
    assert (found.way, found.tensors) == (Way.SAME, ())
    assert (str(found.first), str(found.second)) == ("r1/weight_v000003", "r2/weight_v000000")
    assert line.downloads() == set()


def test_two_runs_are_compared(line: Line) -> None:
    line.made.claim("r2")
    line.made.full(stepped(line.weights[3], seed=8))
    found = difference(line.store, line.made.policy, line.made.version(3, "r1"), line.made.version(0, "r2"))
    assert found.way is Way.VALUES
    assert len(found.tensors) == 2


def test_other_forms_are_named() -> None:
    store = MemoryStore()
    made = Published(store)
    old = model()
    new = dict(old)
    new["added"] = new.pop("layers.0.weight")
    new["layers.1.weight"] = old["layers.1.weight"].T.copy()
    new["scale"] = old["scale"].astype(np.float64)
    made.full(old)
    made.full(new)
    found = difference(store, made.policy, made.version(0), made.version(1))
    assert {tensor.name: tensor.change for tensor in found.tensors} == {
        "added": Change.ADDED,
        "layers.0.weight": Change.REMOVED,
        "layers.1.weight": Change.RESHAPED,
        "scale": Change.RESHAPED,
    }
    scale = found.of(Change.RESHAPED)[1]
    assert (scale.old_dtype, scale.dtype, scale.share) == ("F32", "F64", 1.0)
    assert found.unchanged == 3


def test_orders(line: Line) -> None:
    tensors = line.diff(0, 3).tensors
    assert [t.name for t in ordered(tensors, "name")] == ["embed.weight", "layers.0.weight", "layers.1.weight"]
    shares = [tensor.share for tensor in ordered(tensors, "share")]
    assert shares == sorted(shares, reverse=True)
    assert ordered(tensors, "magnitude")[0].name == "layers.1.weight"
    for key in SORTS:
        assert {t.name for t in ordered(tensors, key)} == {t.name for t in tensors}


def test_a_delta_that_is_damaged_is_refused_by_name() -> None:
    """The object's digest is right: a writer made it wrong."""
    store = MemoryStore()
    made = Published(store)
    old = model()
    flipped = {**old, "mask": ~old["mask"]}
    made.full(old)
    made.sparse(flipped, stepped(old, seed=1))
    made.sparse(flipped, stepped(flipped, seed=2))
    with pytest.raises(CorruptObject, match=r"r1/weight_v000001: tensor 'mask' is in the delta, and did not change"):
        difference(store, made.policy, made.version(0), made.version(1))
    with pytest.raises(CorruptObject, match=r"r1/weight_v000002: tensor 'mask' changed, and is not in the delta"):
        difference(store, made.policy, made.version(1), made.version(2))


def test_a_delta_that_counts_bytes_does_not_tell_of_values() -> None:
    """One that was transcoded without its base may."""
    store = MemoryStore()
    made = Published(store)
    old, new = model(), stepped(model())
    made.full(old)
    made.sparse(old, new, width=1)
    found = difference(store, made.policy, made.version(0), made.version(1))
    assert found.way is Way.VALUES
    (embed, _) = found.tensors
    assert embed.moved is not None
    assert embed.moved.changed == np.count_nonzero(old["embed.weight"].view(np.uint16) != new["embed.weight"].view(np.uint16))


def test_it_ends_when_it_is_no_longer_wanted(line: Line, tmp_path: Path) -> None:
    versions = line.made.version(0), line.made.version(3)
    told: list[str] = []
    for until in ("bringing r1/weight_v000003", "comparing values"):
        with pytest.raises(StagingCancelled):
            difference(
                line.store,
                line.made.policy,
                *versions,
                scratch=tmp_path / "s",
                tell=told.append,
                cancelled=lambda until=until: until in told,  # type: ignore[misc]
            )
        assert list((tmp_path / "s").iterdir()) == []
        told.clear()
