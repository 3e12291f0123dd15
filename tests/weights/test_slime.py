"""Slime's and Miles' version directories: what is staged is what their own loader would have loaded, or it is refused."""

from __future__ import annotations

import contextlib
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import StateDigest
from stitch.weights import sparse
from stitch.weights.digest import spec_of, state_digest
from stitch.weights.host import HostTensor, host_tensor
from stitch.weights.safetensors import open_checkpoint
from stitch.weights.slime import Base, SlimeDelta, detect, number_of
from stitch.weights.slime_decode import read_overwrite, read_xor
from tests.support import slime_writer as slime

pytestmark = pytest.mark.unit

DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, np.uint8, np.int32, np.bool_]
Model = dict[str, np.ndarray[Any, np.dtype[Any]]]


def model(seed: int = 0) -> Model:
    """Of each dtype one tensor, an odd length among them, besides a scalar, an empty one and one that stays as it is."""
    rng = np.random.default_rng(seed)
    made: Model = {f"layer.{np.dtype(dtype).name}": rng.integers(0, 2, (7, 45)).astype(dtype) for dtype in DTYPES}
    made |= {"scalar": np.asarray(1.5, np.float32), "empty": np.empty((0, 4), np.float32), "frozen": np.arange(99, dtype=np.int64)}
    return made


def stepped(before: Model, seed: int) -> Model:
    """Some bytes of each tensor changed, but for the frozen one: within a unit at times one byte alone, at times all."""
    rng = np.random.default_rng(seed)
    after = {name: array.copy() for name, array in before.items()}
    for name, array in after.items():
        if name in ("empty", "frozen"):
            continue
        data = array.reshape(-1).view(np.uint8)
        if array.dtype == np.bool_:
            data[rng.integers(0, data.size, 5)] ^= 1
        else:
            data[rng.integers(0, data.size, 1 + data.size // 40)] ^= rng.integers(1, 256, 1 + data.size // 40).astype(np.uint8)
            data[: array.itemsize] ^= 0xFF
    return after


def raw(tensors: Model) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in tensors.items()}


def base_of(tensors: Model) -> Base:
    def base(name: str) -> tuple[HostTensor, StateDigest]:
        tensor = host_tensor(name, tensors[name])
        return tensor, state_digest(tensor.data)

    return base


def delta_of(directory: Path) -> SlimeDelta:
    delta = detect(directory)
    assert delta is not None
    return delta


def staged(delta: SlimeDelta, before: Model) -> dict[str, bytes]:
    """What a replica ends up with: the blobs applied to the base, held against the tensors and digests that came with them."""
    found = raw(before)
    base = base_of(before)
    for tensor, change in delta.changed(base):
        old, state = base(tensor.name)
        data = bytearray(old.data)
        assert sparse.apply([change.blob], memoryview(data), width=sparse.unit_bytes(old.dtype), state=state) == change.state
        assert change.state == state_digest(tensor.data)
        assert (tensor.dtype, tensor.shape, tensor.data) == (old.dtype, old.shape, memoryview(data))
        width = old.array().itemsize
        units = np.frombuffer(old.data, f"V{width}") != np.frombuffer(data, f"V{width}")
        assert change.changed == np.count_nonzero(units) > 0
        found[tensor.name] = bytes(data)
    return found


def without_the_base(delta: SlimeDelta, before: Model) -> dict[str, bytes]:
    """What blobs make of the base that were made from its specs alone."""
    found = raw(before)
    specs = {name: spec_of(host_tensor(name, array)) for name, array in before.items()}
    for name, blob in delta.transcoded(specs):
        data = bytearray(found[name])
        sparse.apply([blob], memoryview(data), width=sparse.unit_bytes(specs[name].dtype), state=specs[name].state)
        found[name] = bytes(data)
    return found


@pytest.mark.parametrize("checksum", slime.CHECKSUMS)
@pytest.mark.parametrize("encoding", slime.ENCODINGS)
def test_what_is_staged_is_what_their_loader_would_have_loaded(tmp_path: Path, encoding: str, checksum: str) -> None:
    before = model()
    held = raw(before)
    for version in (1, 2, 3):
        after = stepped(before, version)
        directory = slime.write_delta(tmp_path, version, before, after, encoding=encoding, checksum=checksum)
        delta = delta_of(directory)
        assert (delta.version, delta.base_version) == (version, version - 1)
        assert (delta.encoding, delta.checksum) == (encoding, checksum)
        assert delta.names == {name for name in before if name not in ("empty", "frozen")}
        held = slime.load(directory, held)
        assert staged(delta, before) == held == raw(after)
        assert without_the_base(delta, before) == held
        assert delta.matches(base_of(after))
        assert not delta.matches(base_of(before))
        before = after


@given(
    before=st.binary(min_size=1, max_size=300),
    changes=st.lists(st.tuples(st.integers(0, 299), st.integers(0, 255)), max_size=20),
    dtype=st.sampled_from(DTYPES[:-1]),
    encoding=st.sampled_from(slime.ENCODINGS),
)
@settings(deadline=None)
def test_any_bytes_of_any_dtype(
    tmp_path_factory: pytest.TempPathFactory, before: bytes, changes: list[tuple[int, int]], dtype: Any, encoding: str
) -> None:
    size = np.dtype(dtype).itemsize
    old = np.frombuffer(before * size, dtype)
    new = old.copy()
    for place, value in changes:
        new.view(np.uint8)[place % new.nbytes] = value
    directory = slime.write_delta(tmp_path_factory.mktemp("any"), 1, {"t": old}, {"t": new}, encoding=encoding, checksum="blake3")
    assert staged(delta_of(directory), {"t": old}) == {"t": new.tobytes()} == without_the_base(delta_of(directory), {"t": old})


def test_a_version_in_which_nothing_changed_is_one(tmp_path: Path) -> None:
    delta = delta_of(slime.write_delta(tmp_path, 4, model(), model()))
    assert (delta.files, delta.names, list(delta.changed(base_of({})))) == ((), frozenset(), [])


def test_only_what_is_asked_for_is_decoded(tmp_path: Path) -> None:
    before, after = model(), stepped(model(), 1)
    delta = delta_of(slime.write_delta(tmp_path, 1, before, after, shards=3))
    asked: list[str] = []

    def base(name: str) -> tuple[HostTensor, StateDigest]:
        asked.append(name)
        return base_of(before)(name)

    assert [tensor.name for tensor, _ in delta.changed(base, names={"scalar", "frozen"})] == asked == ["scalar"]
    by_file = [{tensor.name for tensor, _ in delta.changed(base, [file])} for file in delta.files]
    assert len(by_file) == 3
    assert set.union(*by_file) == delta.names
    assert sum(map(len, by_file)) == len(delta.names)
    with pytest.raises(InvalidRequest, match="no file of this delta"):
        list(delta.changed(base, ["../x.safetensors"]))


def test_a_tensor_that_two_ranks_wrote_alike_is_taken_once(tmp_path: Path) -> None:
    before, after = {"tied": np.zeros(64, np.uint8)}, {"tied": np.ones(64, np.uint8)}
    directory = slime.write_delta(tmp_path, 1, before, after, shards=1)
    first, second = directory / "model-00000-of-00001.safetensors", directory / "model-00001-of-00002.safetensors"
    second.write_bytes(first.read_bytes())
    edit_index(directory, lambda index: index["weight_map"].update(other=second.name))
    with pytest.raises(CorruptObject, match="other"):
        detect(directory)
    extra = {"tied": slime.encode(before["tied"], after["tied"], "xor"), "other": slime.frame(b"\1")}
    frames = {name: np.frombuffer(data, np.uint8) for name, data in extra.items()}
    sums = {"tied": slime.checksum_of("xxh3-128", after["tied"]), "other": "0" * 32}
    second.write_bytes(safetensors.numpy.save(frames, metadata=sums))
    assert [tensor.name for tensor, _ in delta_of(directory).changed(base_of(before), names=["tied"])] == ["tied"]
    second.write_bytes(safetensors.numpy.save(frames, metadata={**sums, "tied": "0" * 32}))
    with pytest.raises(CorruptObject, match=r"'tied' is in .* and differs"):
        detect(directory)


@pytest.mark.parametrize(
    ("name", "number"),
    [("weight_v000007", 7), ("weight_v1234567", 1234567), ("weight_v", None), ("weights", None), ("weight_v-00001", None)],
)
def test_the_number_is_in_the_name(name: str, number: int | None) -> None:
    assert number_of(Path("/shared") / name) == number


# --- half-written ---


def edit_index(directory: Path, edit: Any) -> None:
    path = directory / slime.INDEX
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


def shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


HALF_WRITTEN = {
    "the index is not written": (lambda d: (d / slime.INDEX).unlink(), "no model.safetensors.index.json"),
    "nothing is written": (lambda d: [path.unlink() for path in d.iterdir()], "no model.safetensors.index.json"),
    "the index is cut short": (lambda d: (d / slime.INDEX).write_text((d / slime.INDEX).read_text()[:-9]), "not readable"),
    "the index is not renamed": (lambda d: (d / slime.INDEX).rename(d / f"{slime.INDEX}.tmp"), "not renamed"),
    "a shard is not renamed": (lambda d: shard(d).rename(shard(d).with_suffix(".safetensors.tmp")), "not renamed"),
    "a dead writer's file is there": (lambda d: (d / "model-00007-of-00009.safetensors.tmp").touch(), "not renamed"),
    "a shard is missing": (lambda d: shard(d).unlink(), "shard model-00000-of-00002.safetensors is missing"),
    "a shard is short": (lambda d: shard(d).write_bytes(shard(d).read_bytes()[:-1]), "the file holds"),
    "a shard is empty": (lambda d: shard(d).write_bytes(b""), "header"),
    "a shard of another version": (lambda d: (d / "model-00002-of-00003.safetensors").write_bytes(shard(d).read_bytes()), "mixed"),
    "the index is another version's": (lambda d: d.rename(d.with_name("weight_v000008")), "is 7, the directory is that of 8"),
    "the index lacks a tensor": (lambda d: edit_index(d, lambda i: i["weight_map"].pop("scalar")), "'scalar' is not in"),
    "the index names one too many": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update(more=shard(d).name)),
        "holds 'more'; it does not",
    ),
}


@pytest.mark.parametrize("how", HALF_WRITTEN)
def test_a_half_written_directory_is_refused(tmp_path: Path, how: str) -> None:
    spoil, message = HALF_WRITTEN[how]
    directory = slime.write_delta(tmp_path, 7, model(), stepped(model(), 7))
    assert detect(directory) is not None
    spoil(directory)
    with pytest.raises((InvalidRequest, CorruptObject), match=message) as refused:
        detect(next(tmp_path.iterdir()))
    assert "weight_v00000" in str(refused.value)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such version directory"):
        detect(tmp_path / "weight_v000001")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", None),
        ("version", 7),
        ("version", "-7"),
        ("version", "٧"),
        ("base_version", "000007"),
        ("base_version", "1e3"),
        ("delta_encoding", "xor2"),
        ("delta_encoding", ["xor"]),
        ("compression_format", "lz4"),
        ("compression_format", None),
        ("checksum_format", "md5"),
        ("checksum_format", {}),
    ],
)
def test_an_index_is_read_strictly(tmp_path: Path, field: str, value: object) -> None:
    directory = slime.write_delta(tmp_path, 7, model(), stepped(model(), 7))
    edit_index(directory, lambda index: index["metadata"].update({field: value}))
    with pytest.raises((InvalidRequest, CorruptObject), match=f"metadata.{field}"):
        detect(directory)


@pytest.mark.parametrize(
    "weight_map", [None, [], {"t": 1}, {"t": "../model.safetensors"}, {"t": "a/b.safetensors"}, {"t": "x.bin"}]
)
def test_file_names_cannot_leave_the_directory(tmp_path: Path, weight_map: object) -> None:
    directory = slime.write_delta(tmp_path, 7, model(), stepped(model(), 7))
    edit_index(directory, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(CorruptObject, match="weight_map"):
        detect(directory)


@pytest.mark.parametrize("text", ["[]", "7", "null", "", "{" * 100_000, "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    directory = slime.write_delta(tmp_path, 7, model(), stepped(model(), 7))
    (directory / slime.INDEX).write_text(text)
    with pytest.raises(CorruptObject, match=slime.INDEX):
        detect(directory)


@pytest.mark.parametrize("metadata", [None, {}, {"total_size": 7}, []])
def test_frames_are_never_taken_for_weights(tmp_path: Path, metadata: object) -> None:
    directory = slime.write_delta(tmp_path, 7, model(), stepped(model(), 7))
    edit_index(directory, lambda index: index.update(metadata=metadata))
    with pytest.raises(CorruptObject, match="holds the frames of a delta"):
        detect(directory)


# --- full versions ---

HALF_FULL = {
    "the index is not written": (lambda d: (d / slime.INDEX).unlink(), slime.INDEX),
    "the index is cut short": (lambda d: (d / slime.INDEX).write_text((d / slime.INDEX).read_text()[:-9]), "not readable"),
    "a shard is missing": (lambda d: shard(d).unlink(), "missing"),
    "a shard is short": (lambda d: shard(d).write_bytes(shard(d).read_bytes()[:-1]), "the file holds"),
    "a shard has its first name yet": (lambda d: shard(d).rename(d / "model-00001.safetensors"), "missing|mixed"),
    "a shard too many": (lambda d: (d / "model-00003.safetensors").write_bytes(shard(d).read_bytes()), "mixed"),
    "nothing is there": (lambda d: [path.unlink() for path in d.iterdir()], slime.INDEX),
}


def test_a_full_version_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    directory = slime.write_full(tmp_path, 7, model(), shards=3)
    assert detect(directory) is None
    with open_checkpoint(directory) as checkpoint:
        assert {tensor.name: bytes(tensor.data) for tensor in checkpoint.tensors()} == raw(model())


@pytest.mark.parametrize("how", HALF_FULL)
def test_a_half_written_full_version_is_refused(tmp_path: Path, how: str) -> None:
    spoil, message = HALF_FULL[how]
    directory = slime.write_full(tmp_path, 7, model())
    spoil(directory)

    def read() -> None:
        assert detect(directory) is None
        open_checkpoint(directory)

    with pytest.raises((InvalidRequest, CorruptObject), match=message):
        read()


# --- damaged or misapplied ---


@pytest.mark.parametrize("encoding", slime.ENCODINGS)
@pytest.mark.parametrize("checksum", slime.CHECKSUMS)
def test_the_wrong_base_is_told_by_their_checksum(tmp_path: Path, encoding: str, checksum: str) -> None:
    before, after = model(), stepped(model(), 1)
    delta = delta_of(slime.write_delta(tmp_path, 1, before, after, encoding=encoding, checksum=checksum))
    other = {**before, "scalar": np.asarray(2.5, np.float32)}
    other["layer.int32"] = before["layer.int32"] + 7
    found: list[str] = []
    with pytest.raises(CorruptObject, match=rf"model-0000\d-of-00002.safetensors: tensor '(scalar|layer.int32)': its {checksum}"):
        found.extend(tensor.name for tensor, _ in delta.changed(base_of(other), names=["scalar", "layer.int32"]))
    with pytest.raises(InvalidRequest, match="'scalar' is not in version 0"):
        list(delta.changed(base_of({}), names=["scalar"]))


@pytest.mark.parametrize("encoding", slime.ENCODINGS)
def test_another_tensors_frame_is_refused_by_its_size(tmp_path: Path, encoding: str) -> None:
    before, after = {"t": np.zeros(64, np.uint8)}, {"t": np.ones(64, np.uint8)}
    delta = delta_of(slime.write_delta(tmp_path, 1, before, after, encoding=encoding))
    with pytest.raises(CorruptObject, match="tensor 't'"):
        list(delta.changed(base_of({"t": np.zeros(63, np.uint8)})))
    with pytest.raises(CorruptObject, match="tensor 't'"):
        list(delta.changed(base_of({"t": np.zeros(65, np.uint8)})))


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = delta_of(slime.write_delta(tmp_path, 1, model(), stepped(model(), 1)))
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(InvalidRequest, match=r"stitch-rl\[slime\]"):
        list(delta.changed(base_of(model())))


def overwrite(count: int, positions: list[int], values: bytes) -> memoryview:
    return memoryview(slime.frame(count.to_bytes(4, "little") + np.array(positions, "<u4").tobytes() + values))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (overwrite(2, [1, 0], b"ab"), "do not increase"),
        (overwrite(2, [1, 1], b"ab"), "do not increase"),
        (overwrite(2, [1, 9], b"ab"), "outside"),
        (overwrite(3, [0, 1], b"ab"), "do not hold"),
        (overwrite(1, [0, 1], b"ab"), "do not hold"),
        (overwrite(2**32 - 1, [], b""), "do not hold"),
        (overwrite(10, list(range(10)), bytes(10)), "at most 49"),
        (memoryview(slime.frame(b"")), "do not hold"),
        (memoryview(slime.frame(b"\1")), "do not hold"),
        (memoryview(b""), "no zstd frame"),
        (memoryview(slime.frame(bytes(4)) + b"x"), "no zstd frame"),
    ],
)
def test_overwrites_are_read_strictly(frame: memoryview, message: str) -> None:
    with pytest.raises(CorruptObject, match=f"here: .*{message}"):
        read_overwrite(frame, 9, "here")


TERABYTE = bytes([0x28, 0xB5, 0x2F, 0xFD, 0xE0]) + (1 << 40).to_bytes(8, "little") + b"\1\0\0"
"""The header of a frame that claims so much, and an empty block."""


def bomb() -> bytes:
    """A frame of 64 MiB that does not tell its size."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(64)), compressor.flush()])


@pytest.mark.parametrize("frame", [TERABYTE, bomb()], ids=["claims a terabyte", "does not tell its size"])
@pytest.mark.parametrize("read", [read_xor, read_overwrite])
def test_a_frame_makes_nobody_allocate_more_than_the_tensor(frame: bytes, read: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObject):
            read(memoryview(frame), 1000, "here")
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@given(data=st.binary(max_size=200), size=st.integers(0, 64), framed=st.booleans())
def test_any_frame_is_read_or_refused(data: bytes, size: int, framed: bool) -> None:
    frame = memoryview(slime.frame(data) if framed else data)
    with contextlib.suppress(CorruptObject):
        assert read_xor(frame, size, "here") == data
        assert len(data) == size
    with contextlib.suppress(CorruptObject):
        positions, values = read_overwrite(frame, size, "here")
        assert positions.size == values.size <= size
        assert positions.tolist() == sorted(set(positions.tolist()) & set(range(size)))


@given(data=st.data(), encoding=st.sampled_from(slime.ENCODINGS))
@settings(deadline=None, max_examples=200)
def test_damage_is_refused_or_does_no_harm(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, encoding: str) -> None:
    before = {"a": np.arange(40, dtype=np.int32), "b": np.zeros(33, np.uint8)}
    after = {"a": before["a"] + 1, "b": before["b"] + 2}
    directory = slime.write_delta(tmp_path_factory.mktemp("damage"), 1, before, after, encoding=encoding)
    path = data.draw(st.sampled_from(sorted(directory.iterdir())), "file")
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1), "at")
    match data.draw(st.sampled_from(["flip", "cut", "insert"]), "how"):
        case "flip":
            content[at] ^= data.draw(st.integers(1, 255), "mask")
        case "cut":
            del content[at : at + data.draw(st.integers(1, 9), "length")]
        case _:
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9), "bytes")
    path.write_bytes(content)
    try:
        delta = detect(directory)
        found = None if delta is None else staged(delta, before)
    except (CorruptObject, InvalidRequest):
        return
    assert found == raw(after)
