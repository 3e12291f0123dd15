"""Chains of deltas, folded into one pass: the same bytes as one after the other, and nothing wrong gets to the first byte."""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject
from stitch.core.ids import StateDigest
from stitch.core.manifest import Codec, Manifest, TensorSpec, weights_digest
from stitch.store.memory import MemoryStore
from stitch.weights import mapped, parallel
from stitch.weights.apply import Chain, Delta
from stitch.weights.header import LENGTH_BYTES, format_header, lay_out
from stitch.weights.host import HostTensor, host_tensors
from stitch.weights.origins import merge
from stitch.weights.parallel import run_all
from stitch.weights.safetensors import TensorFile, TensorWriter, write_checkpoint
from stitch.weights.sparse import encode_whole
from stitch.weights.staging import NotEnoughSpace
from stitch.weights.verify import verify
from tests.weights.scene import V2, Scene, nudged
from tests.weights.versions import Line, Weights, assert_same, changed, loaded, model

pytestmark = pytest.mark.unit


def no_check() -> None:
    return


@dataclass
class Chained:
    """Versions of a small model: 0 whole, then a chain of deltas, all on the local disk."""

    folder: Path
    weights: list[Weights]
    kinds: Sequence[str]

    def __post_init__(self) -> None:
        store = MemoryStore()
        self.line = Line(store)
        self.line.full(0, self.weights[0])
        for number, kind in enumerate(self.kinds, 1):
            getattr(self.line, kind)(number, number - 1, self.weights[number])
        for manifest in self.line.manifests.values():
            for file in manifest.weights:
                path = self.folder / file.blake3
                path.write_bytes(store.get(file.key, limit=1 << 30))

    @property
    def target(self) -> Path:
        """Version 0, to be brought on in place."""
        path = self.folder / "target.safetensors"
        path.write_bytes((self.folder / self.line.manifests[0].weights[0].blake3).read_bytes())
        return path

    @property
    def manifest(self) -> Manifest:
        """Of the newest."""
        return self.line.manifests[len(self.kinds)]

    def deltas(self, **changes: Any) -> list[Delta]:
        """All of them; `changes` are those of the newest manifest."""
        found = [self.line.manifests[number] for number in range(1, len(self.kinds) + 1)]
        if changes:
            if "tensors" in changes:
                changes["weights_digest"] = weights_digest(changes["tensors"])
            found[-1] = replace(found[-1], **changes)
        return [Delta(manifest=m, files=[self.folder / file.blake3 for file in m.weights]) for m in found]

    def start(self) -> tuple[TensorSpec, ...]:
        return self.line.manifests[0].tensors


def chained(folder: Path, *kinds: str, seed: int = 0) -> Chained:
    weights = [model(seed)]
    for number, _ in enumerate(kinds, 1):
        weights.append(nudged(weights[-1], 100 * seed + number))
    return Chained(folder, weights, kinds)


@settings(deadline=None, max_examples=40)
@given(
    kinds=st.lists(st.sampled_from(["sparse", "delta"]), min_size=1, max_size=6),
    moves=st.lists(st.tuples(st.sampled_from(["nudge", "redraw", "nothing"]), st.integers(0, 5)), min_size=6, max_size=6),
    threads=st.sampled_from([1, 3]),
    unread=st.booleans(),
    shift=st.integers(0, 8),
)
def test_a_chain_of_any_mix_ends_at_its_newest_version(
    kinds: list[str],
    moves: list[tuple[str, int]],
    threads: int,
    unread: bool,
    shift: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever changed, in whichever form, and however the target's tensors lie in memory."""
    weights = [model()]
    for number, (move, which) in enumerate(moves[: len(kinds)], 1):
        name = sorted(weights[0])[which]
        step = {
            "nudge": lambda w, n=number: nudged(w, n),
            "redraw": lambda w, n=number, t=name: changed(w, t, seed=n),
            "nothing": dict,
        }
        weights.append(step[move](weights[-1]))
    made = Chained(tmp_path_factory.mktemp("chain"), weights, kinds)
    target = made.target
    shift_data(target, shift)
    with Chain(made.start(), made.deltas(), source="newest") as chain:
        chain.check(target)
        chain.apply(target, no_check, threads=threads, unread=unread)
    verify(target, made.manifest.tensors, "target", no_check, threads=threads)


def shift_data(path: Path, by: int) -> None:
    """Moves the data by some bytes: headers of other tools leave it where no word begins."""
    data = path.read_bytes()
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    header = data[LENGTH_BYTES : LENGTH_BYTES + length] + b" " * by
    path.write_bytes(len(header).to_bytes(LENGTH_BYTES, "little") + header + data[LENGTH_BYTES + length :])


def test_a_whole_tensor_makes_earlier_deltas_of_it_needless(tmp_path: Path) -> None:
    """Damage in what is not needed any more harms nobody; and no tensor is written that nothing changed."""
    weights = [model()]
    weights.append(nudged(weights[0], 1))
    weights.append(changed(weights[1], *weights[1], seed=2))
    made = Chained(tmp_path, weights, ["sparse", "delta"])
    target = made.target
    with Chain(made.start(), made.deltas(), source="v") as chain:
        assert chain.changed == {name for name, array in weights[0].items() if array.size}
        chain.apply(target, no_check, threads=1)
    verify(target, made.manifest.tensors, "target", no_check)


class TestRefusals:
    """Each names version and tensor, and no byte of the target has changed."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> Iterator[Chained]:
        made = chained(tmp_path, "sparse", "sparse")
        before = made.target.read_bytes()
        yield made
        assert (tmp_path / "target.safetensors").read_bytes() == before

    def refuse(self, made: Chained, deltas: list[Delta], match: str, start: tuple[TensorSpec, ...] | None = None) -> None:
        with pytest.raises(CorruptObject, match=match), Chain(start or made.start(), deltas, source="r1/weight_v000002") as chain:
            chain.check(made.folder / "target.safetensors")

    def specs(self, made: Chained, which: str, /, **changes: Any) -> tuple[TensorSpec, ...]:
        return tuple(replace(spec, **changes) if spec.name == which else spec for spec in made.manifest.tensors)

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"name": "renamed"}, r"v000002: tensor 'renamed' is not in its base"),
            ({"shape": (8, 66)}, r"v000002: tensor 'layer.0' is BF16 \[8, 66\], in its base BF16 \[16, 33\]"),
            ({"dtype": "F16"}, r"v000002: tensor 'layer.0' is F16 \[16, 33\], in its base BF16 \[16, 33\]"),
        ],
    )
    def test_tensor_of_another_form(self, made: Chained, changes: dict[str, Any], match: str) -> None:
        self.refuse(made, made.deltas(tensors=self.specs(made, "layer.0", **changes)), match)

    def test_missing_tensor(self, made: Chained) -> None:
        tensors = tuple(spec for spec in made.manifest.tensors if spec.name != "mask")
        self.refuse(made, made.deltas(tensors=tensors), r"v000002: tensor 'mask' (of its base is missing|is not in its base)")

    def test_extra_tensor(self, made: Chained) -> None:
        extra = TensorSpec(name="extra", dtype="F32", shape=(1,), state=StateDigest("0" * 16))
        self.refuse(made, made.deltas(tensors=(*made.manifest.tensors, extra)), r"v000002: tensor 'extra' is not in its base")

    def test_change_without_a_trace(self, made: Chained) -> None:
        tensors = self.specs(made, "empty", state=StateDigest("1" * 16))
        self.refuse(
            made, made.deltas(tensors=tensors), r"v000002: tensor 'empty' differs from its base, but the delta does not hold"
        )

    def test_another_model_s_delta(self, made: Chained, tmp_path_factory: pytest.TempPathFactory) -> None:
        other = {f"other.{name}": array for name, array in model().items()}
        foreign = Chained(tmp_path_factory.mktemp("other"), [other, nudged(other, 1)], ["sparse"])
        self.refuse(made, [*made.deltas(), *foreign.deltas()], r"tensor 'other\.\w+(\.\d)?' is not in its base")

    def test_target_of_another_form(self, made: Chained) -> None:
        start = tuple(replace(spec, dtype="F16") if spec.name == "embed" else spec for spec in made.start())
        self.refuse(made, [], r"weight_v000002: tensor 'embed' is BF16 \[64, 16\], not F16", start)
        self.refuse(made, [], r"weight_v000002: tensor 'mask' is not in the manifest", made.start()[:4])

    def files(self, made: Chained, tensors: dict[str, Any], **changes: Any) -> list[Delta]:
        """The last delta with files of these tensors instead of its own."""
        path = made.folder / "forged.safetensors"
        entries = list(host_tensors(tensors))
        with TensorWriter(path, [(t.name, t.dtype, t.shape) for t in entries]) as writer:
            for tensor in entries:
                writer.write(tensor.name, tensor.data)
        *before, last = made.deltas(**changes)
        return [*before, Delta(manifest=last.manifest, files=[path])]

    def blob(self, size: int, width: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(encode_whole(memoryview(bytes(size)), width=width).blob, np.uint8)

    @pytest.mark.parametrize(
        ("name", "value", "match"),
        [
            ("layer.0", np.zeros(8, np.float32), r"v000002: tensor 'layer.0': its delta is F32 \[8\], not one row of U8"),
            ("layer.0", np.zeros((2, 8), np.uint8), r"v000002: tensor 'layer.0': its delta is U8 \[2, 8\], not one row of U8"),
            ("layer.0", np.zeros(64, np.uint8), r"v000002: tensor 'layer.0': sparse blob: begins with"),
            ("stranger", np.zeros(64, np.uint8), r"v000002: tensor 'stranger' is not in its base"),
        ],
    )
    def test_entry_that_is_none(self, made: Chained, name: str, value: np.ndarray[Any, Any], match: str) -> None:
        self.refuse(made, self.files(made, {name: value}), match)

    @pytest.mark.parametrize(("size", "width"), [(1056, 4), (1054, 2), (2112, 2)])
    def test_blob_of_another_size_or_unit(self, made: Chained, size: int, width: int) -> None:
        match = rf"v000002: tensor 'layer.0': its delta is of {size // width} units of {width} bytes, the tensor of 1056 bytes"
        self.refuse(made, self.files(made, {"layer.0": self.blob(size, width)}), match)

    def test_tensor_in_two_files(self, made: Chained) -> None:
        *before, last = made.deltas()
        copy = made.folder / "copy.safetensors"
        copy.write_bytes(last.files[0].read_bytes())
        self.refuse(made, [*before, Delta(manifest=last.manifest, files=[*last.files, copy])], r"stands in two of its files")

    def test_whole_tensor_of_another_form(self, made: Chained) -> None:
        forged = self.files(made, {"layer.0": np.zeros((16, 33), np.float32)}, codec=Codec.CHANGED_TENSORS)
        self.refuse(made, forged, r"v000002: tensor 'layer.0' is F32 \[16, 33\], in its base BF16 \[16, 33\]")

    def test_codec_of_no_delta(self, made: Chained) -> None:
        self.refuse(made, made.deltas(codec=Codec.SAFETENSORS), r"v000002: safetensors is no delta codec")


@pytest.mark.parametrize("kind", ["sparse", "delta"])
def test_a_delta_that_does_not_lead_to_its_manifest_is_named(kind: str, tmp_path: Path) -> None:
    made = chained(tmp_path, "sparse", kind)
    lie = tuple(replace(spec, state=StateDigest("0" * 16)) if spec.name == "layer.1" else spec for spec in made.manifest.tensors)
    target = made.target
    with (
        Chain(made.start(), made.deltas(tensors=lie), source="newest") as chain,
        pytest.raises(CorruptObject, match=r"weight_v000002: tensor 'layer.1' has the state digest"),
    ):
        chain.apply(target, no_check, threads=1)


def test_memory_of_a_thread_follows_the_codec(tmp_path: Path) -> None:
    made = chained(tmp_path, "sparse", "sparse")
    with Chain(made.start(), made.deltas(), source="v") as chain:
        assert 0 < chain.thread_bytes <= 64 << 20
    with Chain(made.start(), [], source="v") as nothing:
        assert nothing.thread_bytes == 0


class TestThreads:
    def test_nothing_begins_after_a_failure(self) -> None:
        begun: list[int] = []

        def work(number: int) -> int:
            begun.append(number)
            if number == 3:
                raise CorruptObject("three")
            return number

        for threads in (1, 2):
            begun.clear()
            with pytest.raises(CorruptObject, match="three"):
                run_all((lambda n=n: work(n) for n in range(1000)), threads, no_check)  # type: ignore[misc]
            assert len(begun) <= 3 + 1 + parallel.AHEAD * threads

    def test_a_check_that_raises_stops_it_and_running_ones_are_waited_for(self) -> None:
        release = threading.Event()
        ended: list[int] = []

        def work() -> None:
            release.wait(30)
            ended.append(1)

        def check() -> None:
            release.set()
            raise KeyError("stop")

        with pytest.raises(KeyError):
            run_all((work for _ in range(100)), 2, check)
        assert 2 <= len(ended) <= 2 * parallel.AHEAD

    def test_every_result_is_there(self) -> None:
        for threads in (1, 2, 5):
            assert sorted(run_all((lambda n=n: n for n in range(50)), threads, no_check)) == list(range(50))  # type: ignore[misc]


class TestMerge:
    def test_shards_become_one_file_and_go(self, tmp_path: Path) -> None:
        weights = model()
        names = write_checkpoint(tmp_path / "sharded", weights, max_shard_bytes=1500)
        shards = [tmp_path / "sharded" / name for name in names]
        assert len(shards) > 2
        merge(shards, tmp_path / "model.safetensors", no_check)
        assert all(shard.exists() for shard in shards)
        merge(shards, tmp_path / "again.safetensors", no_check, consume=True)
        assert not any(shard.exists() for shard in shards)
        assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
        with TensorFile(tmp_path / "model.safetensors") as merged:
            for name, array in weights.items():
                assert merged.array(name).tobytes() == array.tobytes()

    def test_a_tensor_in_two_shards_is_named(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            tensor = HostTensor(name="w", dtype="U8", shape=(3,), data=memoryview(b"abc"))
            (tmp_path / name).write_bytes(format_header(lay_out([(tensor.name, tensor.dtype, tensor.shape)])) + b"abc")
        with pytest.raises(CorruptObject, match="tensor 'w' is in another shard too"):
            merge([tmp_path / "one", tmp_path / "two"], tmp_path / "out", no_check)


class TestMapped:
    @pytest.mark.parametrize("offered", [True, False])
    def test_parts_made_writable_are_written_through(self, offered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if not offered:
            monkeypatch.setattr(mapped, "_libc", None)
        path = tmp_path / "file"
        path.write_bytes(bytes(3 * 4096 + 17))
        with mapped.mapped(path) as data:
            for begin, end in ((0, 0), (1, 2), (4095, 8193), (8192, 3 * 4096 + 17)):
                mapped.make_writable(data[begin:end])
                data[begin:end] = b"x" * (end - begin)
        assert path.read_bytes() == b"\0x" + bytes(4093) + b"x" * (2 * 4096 + 18)

    def test_a_full_disk_is_an_error_and_not_the_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the kernel says that a write would fail."""

        def madvise(*_: object) -> int:
            ctypes.set_errno(errno.EFAULT)
            return -1

        scene = Scene(tmp_path)
        with scene.staging:
            scene.go(0)
            scene.go(1)
            with monkeypatch.context() as full:
                full.setattr(mapped, "_libc", SimpleNamespace(madvise=madvise))
                with pytest.raises(NotEnoughSpace, match="became full"):
                    scene.stage(2)
            assert_same(loaded(scene.stage(2).path), V2)
