"""Safetensors files and checkpoint directories: strict reading, streaming writing, agreement with the safetensors package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.weights.header import DTYPES, MAX_HEADER_BYTES, format_header, lay_out, parse_header
from stitch.weights.safetensors import INDEX_FILE, WEIGHTS_FILE, TensorFile, TensorWriter, open_checkpoint, write_checkpoint
from tests.weights.versions import assert_same, loaded, model

pytestmark = pytest.mark.unit
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(path: Path, content: bytes) -> dict[str, bytes]:
    path.write_bytes(content)
    with TensorFile(path) as file:
        return {name: bytes(file.data(name)) for name in file.names}


def test_written_file_is_read_back(tmp_path: Path) -> None:
    assert write_checkpoint(tmp_path, model()) == (WEIGHTS_FILE,)
    assert_same(loaded(tmp_path), model())
    with open_checkpoint(tmp_path) as checkpoint:
        info = checkpoint.files["embed"].spec("embed")
        assert (info.dtype, info.shape) == ("BF16", (64, 16))
        assert (checkpoint.files["embed"].path.stat().st_size - checkpoint.files["embed"].offset("embed")) > info.end - info.begin


def test_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    weights = {f"t.{name}": np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in DTYPES.items()}
    weights |= model()
    write_checkpoint(tmp_path, weights)
    found = dict(safetensors.deserialize((tmp_path / WEIGHTS_FILE).read_bytes()))
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        assert bytes(found[name]["data"]) == array.tobytes(), name
        assert tuple(found[name]["shape"]) == array.shape, name
    assert all(found[f"t.{name}"]["dtype"] == name for name in DTYPES)


def test_what_the_safetensors_package_writes_is_read(tmp_path: Path) -> None:
    weights = model()
    safetensors.numpy.save_file(weights, tmp_path / WEIGHTS_FILE, metadata={"format": "np", "note": "ü"})
    assert_same(loaded(tmp_path), weights)
    with TensorFile(tmp_path / WEIGHTS_FILE) as file:
        assert file.metadata == {"format": "np", "note": "ü"}


@in_one_folder
@given(
    arrays=st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 2**32)),
        max_size=6,
    ),
    shard=st.integers(1, 400),
)
def test_any_tensors_survive_in_any_shards(arrays: dict[str, tuple[str, list[int], int]], shard: int, tmp_path_factory) -> None:
    weights = {}
    for name, (dtype, shape, seed) in arrays.items():
        count = int(np.prod(shape)) * DTYPES[dtype].itemsize
        weights[name] = np.random.default_rng(seed).integers(0, 256, count, np.uint8).view(DTYPES[dtype]).reshape(shape)
    folder = tmp_path_factory.mktemp("any")
    names = write_checkpoint(folder, weights, max_shard_bytes=shard)
    assert_same(loaded(folder), weights)
    for name in names:
        assert len(safetensors.deserialize((folder / name).read_bytes())) >= (1 if arrays else 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header of 0 bytes in a file of 0"),
        (b"\x01\x00", "in a file of 2"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "a header of"),
        ((2**63).to_bytes(8, "little") + b"{}", "a header of"),
        (raw(b"{"), "not JSON"),
        (raw(b"\xff\xfe"), "not JSON"),
        (raw(b"[" * 100_000), "not JSON"),
        (raw([]), "not a JSON object"),
        (raw({"a": 1}, b"1234"), "'a': entry"),
        (raw({"a": entry() | {"more": 1}}, b"1234"), "'a': entry"),
        (raw({"a": entry("F4", (8,))}, b"1234"), "'a': dtype 'F4'"),
        (raw({"a": entry(dtype=3)}, b"1234"), "'a': dtype"),  # type: ignore[arg-type]
        (raw({"a": entry(shape=[-4])}, b"1234"), "'a': shape"),
        (raw({"a": entry(shape=[4.0])}, b"1234"), "'a': shape"),
        (raw({"a": entry(shape=[True] * 40)}, b"1234"), "'a': shape"),
        (raw({"a": entry(shape=[2**62, 2**62])}, b"1234"), "'a': data_offsets"),
        (raw({"a": entry(shape=[5])}, b"1234"), "'a': data_offsets span 4 bytes"),
        (raw({"a": entry(offsets=[4, 0])}, b"1234"), "'a': data_offsets"),
        (raw({"a": entry(offsets=[0, 4, 8])}, b"1234"), "'a': data_offsets"),
        (raw({"a": entry(offsets=[1, 5])}, b"12345"), "'a': data_offsets leaves a hole"),
        (raw({"a": entry(), "b": entry(offsets=[3, 7])}, b"1234567"), "'b': data_offsets overlaps"),
        (raw({"a": entry()}, b"123"), "take 4 bytes, the file holds 3"),
        (raw({"a": entry()}, b"12345"), "take 4 bytes, the file holds 5"),
        (raw({}, b"1"), "take 0 bytes, the file holds 1"),
        (raw(b'{"a": 1, "a": 2}'), "'a' stands twice"),
        (raw({"": entry()}, b"1234"), "name of 0 bytes"),
        (raw({"n" * 2000: entry()}, b"1234"), "name of 2000 bytes"),
        (raw(b'{"\\ud800": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}', b"1"), "not valid text"),
        (raw({"__metadata__": {"a": 1}}), "__metadata__"),
        (raw({"__metadata__": []}), "__metadata__"),
    ],
)
def test_malformed_file_is_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptObject) as caught:
        read(tmp_path / "file.safetensors", content)
    assert message in str(caught.value)
    assert "file.safetensors" in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "U8"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a", "b"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@in_one_folder
@given(header=json_values, data=st.binary(max_size=16))
@example(header={"a": entry(shape=[int("9" * 30)])}, data=b"")
def test_no_header_crashes_the_reader(header: object, data: bytes) -> None:
    try:
        infos, _ = parse_header(json.dumps(header).encode(), len(data), "x")
    except CorruptObject:
        return
    assert sum(info.end - info.begin for info in infos.values()) == len(data)


@in_one_folder
@given(content=st.binary(max_size=64), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=3))
def test_no_file_crashes_the_reader(content: bytes, flips: list[tuple[int, int]], tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f.safetensors"
    good = bytearray(format_header(lay_out([("a", "F32", (2, 3)), ("b", "U8", (5,))])) + bytes(29))
    for place, mask in flips:
        good[place % len(good)] ^= mask
    for each in (content, bytes(good), bytes(good[: len(content)])):
        try:
            found = read(path, each)
        except CorruptObject:
            continue
        assert sum(map(len, found.values())) <= len(each)


def test_arrays_outlive_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model())
    with open_checkpoint(tmp_path) as checkpoint:
        array = checkpoint.array("embed")
    assert array.tobytes() == model()["embed"].tobytes()
    assert not array.flags.writeable


def test_writer_demands_its_layout(tmp_path: Path) -> None:
    layout = [("a", "U8", (2,)), ("b", "U8", (1,))]
    with pytest.raises(InvalidRequest, match="'b' was never written"), TensorWriter(tmp_path / "1", layout) as writer:
        writer.write("a", b"12")
    with (
        pytest.raises(InvalidRequest, match="'b' of 1 bytes given, 'a' of 2 bytes expected"),
        TensorWriter(tmp_path / "2", layout) as w,
    ):
        w.write("b", b"1")
    with pytest.raises(InvalidRequest, match="'a' of 3 bytes given"), TensorWriter(tmp_path / "3", layout) as w:
        w.write("a", b"123")
    with TensorWriter(tmp_path / "5", layout) as w:
        w.write("a", b"12")
        w.write("b", memoryview(b"3"))
        with pytest.raises(InvalidRequest, match="no more tensors"):
            w.write("b", b"3")
    with TensorFile(tmp_path / "5") as file:
        assert [bytes(file.data(name)) for name in file.names] == [b"12", b"3"]


def test_one_tensor_at_a_time_is_asked_for(tmp_path: Path) -> None:
    """A generator that reuses its memory, as a trainer that gathers layer by layer does."""
    scratch = np.zeros(1000, np.float32)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for index in range(5):
            scratch[:] = index
            yield f"layer.{index}", scratch

    assert len(write_checkpoint(tmp_path, tensors(), max_shard_bytes=8000)) == 3
    assert {name: float(array[7]) for name, array in loaded(tmp_path).items()} == {f"layer.{i}": float(i) for i in range(5)}


def test_failed_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, object]]:
        yield "a", np.zeros(10)
        yield "b", np.zeros(10)
        yield "c", "not a tensor"

    with pytest.raises(InvalidRequest, match="'c'"):
        write_checkpoint(tmp_path, tensors(), max_shard_bytes=80)
    assert list(tmp_path.iterdir()) == []


def test_shards_have_an_index_as_others_write_it(tmp_path: Path) -> None:
    names = write_checkpoint(tmp_path, model(), max_shard_bytes=4000)
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert len(names) > 1
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in model().values())
    assert set(index["weight_map"].values()) == set(names)
    assert_same(loaded(tmp_path), model())


class TestDirectories:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        write_checkpoint(tmp_path, model(), max_shard_bytes=4000)
        return tmp_path

    def edit(self, folder: Path, **changes: str | None) -> None:
        index = json.loads((folder / INDEX_FILE).read_text())
        for name, shard in changes.items():
            if shard is None:
                del index["weight_map"][name]
            else:
                index["weight_map"][name] = shard
        (folder / INDEX_FILE).write_text(json.dumps(index))

    def test_missing_shard_is_named(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("model-*"))[1]
        shard.unlink()
        with pytest.raises(CorruptObject, match=f"{shard.name} is missing"):
            open_checkpoint(sharded)

    def test_tensor_that_the_index_misses_is_named(self, sharded: Path) -> None:
        self.edit(sharded, embed=None)
        with pytest.raises(CorruptObject, match="'embed' of model-"):
            open_checkpoint(sharded)

    def test_tensor_that_no_file_holds_is_named(self, sharded: Path) -> None:
        self.edit(sharded, ghost=sorted(p.name for p in sharded.glob("model-*"))[0])
        with pytest.raises(CorruptObject, match="'ghost'"):
            open_checkpoint(sharded)

    def test_tensor_in_another_file_than_the_index_says(self, sharded: Path) -> None:
        names = [p.name for p in sorted(sharded.glob("model-*.safetensors"))]
        with open_checkpoint(sharded) as checkpoint:
            there = checkpoint.files["embed"].path.name
        self.edit(sharded, embed=next(name for name in names if name != there))
        with pytest.raises(CorruptObject, match="'embed'"):
            open_checkpoint(sharded)

    @pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "a.bin", "a\\b.safetensors"])
    def test_index_does_not_lead_elsewhere(self, sharded: Path, name: str) -> None:
        self.edit(sharded, embed=name)
        with pytest.raises(CorruptObject, match="'embed'"):
            open_checkpoint(sharded)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
    def test_broken_index(self, sharded: Path, text: str) -> None:
        (sharded / INDEX_FILE).write_text(text)
        with pytest.raises(CorruptObject, match="index"):
            open_checkpoint(sharded)

    def test_tensor_in_two_shards(self, sharded: Path) -> None:
        first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
        second.write_bytes(first.read_bytes())
        with pytest.raises(CorruptObject, match=f"in {first.name} and in {second.name}"):
            open_checkpoint(sharded)

    def test_two_checkpoints_in_one_directory_are_refused(self, sharded: Path) -> None:
        """A dirty directory: the shards of an earlier, larger save still lie there."""
        (sharded / "model-00009-of-00009.safetensors").write_bytes(b"")
        with pytest.raises(InvalidRequest, match="model-00009-of-00009"):
            open_checkpoint(sharded)

    def test_single_file_beside_shards_is_refused(self, sharded: Path) -> None:
        (sharded / WEIGHTS_FILE).write_bytes(b"")
        with pytest.raises(InvalidRequest, match="mixed"):
            open_checkpoint(sharded)

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="neither"):
            open_checkpoint(tmp_path)
        with pytest.raises(InvalidRequest, match="no directory"):
            open_checkpoint(tmp_path / "none")

    def test_writing_over_a_checkpoint_is_refused(self, sharded: Path) -> None:
        with pytest.raises(InvalidRequest, match="already holds"):
            write_checkpoint(sharded, {"a": np.zeros(1)})

    def test_links_are_followed_and_carried_files_listed(self, tmp_path: Path) -> None:
        """As a Hugging Face cache lies on disk: every entry is a link to a blob of another name."""
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
        write_checkpoint(blobs, {"a": np.ones(3, ml_dtypes.bfloat16)})
        (blobs / "c0ffee").write_text("{}")
        snapshot.mkdir()
        (snapshot / WEIGHTS_FILE).symlink_to(blobs / WEIGHTS_FILE)
        for name in ("config.json", "tokenizer.json"):
            (snapshot / name).symlink_to(blobs / "c0ffee")
        (snapshot / "dangling.json").symlink_to(blobs / "none")
        for name in (".hidden", "optimizer.pt", "pytorch_model.bin", "consolidated.safetensors"):
            (snapshot / name).write_bytes(b"x")
        (snapshot / "folder").mkdir()
        with open_checkpoint(snapshot) as checkpoint:
            assert checkpoint.carried == ("config.json", "tokenizer.json")
            assert checkpoint.weights == (WEIGHTS_FILE,)
            assert checkpoint.array("a").tolist() == [1, 1, 1]
