"""What is read again and when: damage of any bit is found, also after a loss of power, also of what nobody stages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject
from stitch.store.faulty import Fault, Kind
from stitch.weights import scrub, verify
from stitch.weights.safetensors import WEIGHTS_FILE, TensorFile
from stitch.weights.staging import Verify
from tests.weights.scene import ALL, MIXED, SPARSE, V0, V1, V2, Scene, buffer_bytes, expected_file, flip
from tests.weights.versions import CONFIG, assert_same, loaded

pytestmark = pytest.mark.unit

OBJECTS = ("full shard", "second shard", "sparse pack", "changed tensors", "carried file", "manifest", "base's manifest")


@settings(deadline=None, max_examples=120)
@given(kind=st.sampled_from(OBJECTS), place=st.integers(0, 1 << 40), mode=st.sampled_from(list(Verify)), following=st.booleans())
def test_one_flipped_bit_in_any_object_is_found(
    kind: str, place: int, mode: Verify, following: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """At any place, while joining and while following: nothing is staged from it, and the next call has the version."""
    scene = Scene(tmp_path_factory.mktemp("flip"), deltas=("sparse", "delta", "sparse"), verify=mode)
    try:
        scene.line.full(0, V0, max_shard_bytes=3000)  # the same in two shards
        scene.line.sparse(1, 0, V1)
        scene.line.delta(2, 1, V2)
        scene.line.sparse(3, 2, ALL[3])
        if following and "shard" not in kind:
            scene.go(0)
        manifests, refs = scene.line.manifests, scene.line.refs
        key, size = {
            "full shard": (manifests[0].weights[0].key, manifests[0].weights[0].size),
            "second shard": (manifests[0].weights[1].key, manifests[0].weights[1].size),
            "sparse pack": (manifests[1].weights[0].key, manifests[1].weights[0].size),
            "changed tensors": (manifests[2].weights[0].key, manifests[2].weights[0].size),
            "carried file": (manifests[3].files[0].key, manifests[3].files[0].size),
            "manifest": (refs[3].key, len(scene.store.get(refs[3].key, limit=1 << 20))),
            "base's manifest": (refs[1].key, len(scene.store.get(refs[1].key, limit=1 << 20))),
        }[kind]
        call = "get" if "manifest" in kind else "download"
        scene.store.add(Fault(call=call, kind=Kind.FLIP, key=key, at=place % (8 * size)))  # type: ignore[arg-type]
        with pytest.raises(CorruptObject):
            scene.stage(3)
        assert not list((scene.workdir / "staged").glob("*/weight_v000003"))
        staged = scene.stage(3)
        assert_same(loaded(staged.path), ALL[3])
        assert (staged.path / "config.json").read_bytes() == CONFIG
    finally:
        scene.staging.close()


@settings(deadline=None, max_examples=80)
@given(place=st.integers(0, 1 << 40), ways=st.sampled_from(["held", "copied", "in place"]), again=st.booleans())
def test_one_flipped_bit_in_a_buffer_is_found(place: int, ways: str, again: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Header included, in a buffer of this process or of an earlier one: what is staged is right to the last bit."""
    scene = Scene(tmp_path_factory.mktemp("flip"), deltas=MIXED)
    try:
        scene.go(0)
        if ways == "in place":
            scene.go(1)
        flip(scene.workdir / "buffers" / "a" / WEIGHTS_FILE, place)
        if again:
            scene.restart()
        target = {"held": 0, "copied": 1, "in place": 2}[ways]
        try:
            staged = scene.stage(target)
        except CorruptObject:
            assert (ways, again) == ("in place", False)
            staged = scene.stage(target)
        assert (staged.path / WEIGHTS_FILE).read_bytes() == expected_file(target)
    finally:
        scene.staging.close()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), mode=st.sampled_from(list(Verify)))
def test_after_a_loss_of_power_the_record_is_not_believed(
    data: st.DataObject, mode: Verify, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The disk kept any record that was ever written, and for each block any bytes that it ever held, or none: nothing was
    flushed. Whatever the next process asks for, it is given the right bytes."""
    scene = Scene(tmp_path_factory.mktemp("power"), deltas=SPARSE, verify=mode)
    kept: dict[str, list[tuple[bytes, bytes]]] = {"a": [], "b": []}
    try:
        for number in (0, 1, 2, 3):
            scene.go(number)
            for name in kept:
                folder = scene.workdir / "buffers" / name
                if (folder / "buffer.json").exists():
                    kept[name].append(((folder / "buffer.json").read_bytes(), (folder / WEIGHTS_FILE).read_bytes()))
        for name, states in kept.items():
            folder = scene.workdir / "buffers" / name
            record = data.draw(st.sampled_from([record for record, _ in states] + [b"", b'{"format": 1, "state": "di']))
            contents = [content for _, content in states] + [bytes(len(states[0][1]))]
            size = len(contents[0])
            block = data.draw(st.sampled_from([64, 512, 1 << 20]))
            torn = b"".join(data.draw(st.sampled_from(contents))[start : start + block] for start in range(0, size, block))
            (folder / "buffer.json").write_bytes(record)
            (folder / WEIGHTS_FILE).write_bytes(torn[: data.draw(st.sampled_from([size, size, size // 2, 0]))])
        scene.restart()
        for number in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
            staged = scene.stage(number)
            assert (staged.path / WEIGHTS_FILE).read_bytes() == expected_file(number)
            scene.staging.mark_active(staged)
    finally:
        scene.staging.close()


class TestIncremental:
    @pytest.fixture
    def scene(self, tmp_path: Path) -> Iterator[Scene]:
        made = Scene(tmp_path / "work", deltas=MIXED, verify=Verify.INCREMENTAL)
        yield made
        made.staging.close()

    def flip_tensor(self, scene: Scene, buffer: str, name: str) -> None:
        path = scene.workdir / "buffers" / buffer / WEIGHTS_FILE
        with TensorFile(path) as file:
            place = file.offset(name) + 5
        flip(path, 8 * place)

    def test_follows_as_full_does(self, scene: Scene) -> None:
        for number in (0, 1, 2, 3, 1, 3):
            assert (scene.go(number).path / WEIGHTS_FILE).read_bytes() == expected_file(number)

    def test_in_place_only_what_changed_is_read(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        scene.go(0)
        scene.go(1)
        read: list[str] = []
        monkeypatch.setattr("stitch.weights.building.verify", lambda path, *_, **__: read.append(path.parent.name))
        scene.stage(2)
        assert read == []
        scene.restart()
        scene.stage(3)
        assert read, "a buffer of an earlier process was trusted"

    def test_damage_in_what_changes_is_found(self, scene: Scene) -> None:
        scene.go(0)
        scene.go(1)
        self.flip_tensor(scene, "a", "layer.0")  # version 1 changes it by a sparse delta, in the words at hand
        with pytest.raises(CorruptObject, match=r"weight_v00000\d: tensor 'layer.0' has the state digest"):
            scene.stage(2)
        assert_same(loaded(scene.stage(2).path), V2)

    def test_damage_elsewhere_is_found_by_the_scrub(self, scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
        scene.go(0)
        scene.go(1)
        assert scene.staging.scrub() == ()
        self.flip_tensor(scene, "a", "mask")
        (found,) = scene.staging.scrub()
        assert (found.buffer, found.active) == ("a", False)
        assert "tensor 'mask'" in found.what
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert scene.staging.damages == 1
        assert scene.staging.scrub() == ()
        assert_same(loaded(scene.stage(2).path), V2)

    def test_damage_of_the_active_buffer_is_told_and_it_is_built_anew(self, scene: Scene) -> None:
        scene.go(0)
        staged = scene.go(1)
        self.flip_tensor(scene, staged.buffer, "mask")
        (found,) = scene.staging.scrub()
        assert found.active
        assert not staged.path.exists(), "an engine could still load from it"
        assert scene.staging.active is None
        again = scene.go(1)
        assert again.path == staged.path
        assert_same(loaded(again.path), V1)

    def test_header(self, scene: Scene) -> None:
        scene.go(0)
        flip(scene.workdir / "buffers" / "a" / WEIGHTS_FILE, 8 * 40)
        (found,) = scene.staging.scrub()
        assert "header" in found.what

    def test_scrub_leaves_alone_what_is_read_before_its_use_anyway(self, scene: Scene) -> None:
        scene.go(0)
        scene.restart()
        self.flip_tensor(scene, "a", "mask")
        assert scene.staging.scrub() == ()
        assert_same(loaded(scene.stage(0).path), V0)

    def test_scrub_gives_way_to_a_staging(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stage comes between any two pieces, in the very buffer that is read; then the rest of it is read as it is now."""
        monkeypatch.setattr(scrub, "STEP_BYTES", 64)
        scene.go(0)
        scene.go(1)
        pieces = 0
        original = scrub.part_sum

        def part_sum(data: memoryview, begin: int, end: int) -> int:
            nonlocal pieces
            pieces += 1
            if pieces in (3, 20):
                stage = threading.Thread(target=lambda: scene.go({3: 2, 20: 3}[pieces]))
                stage.start()  # it waits for the lock, which is ours until this piece is done
                waiting.append(stage)
            return original(data, begin, end)

        waiting: list[threading.Thread] = []

        def stopped() -> bool:
            while waiting:
                waiting.pop().join(30)
            return False

        monkeypatch.setattr(scrub, "part_sum", part_sum)
        assert scene.staging.scrub(stopped=stopped) == ()
        assert pieces > 20
        assert_same(loaded(scene.stage(3).path), ALL[3])

    def test_scrub_stops_when_asked(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scrub, "STEP_BYTES", 64)
        scene.go(0)
        self.flip_tensor(scene, "a", "mask")
        looks = iter([False, False, False])
        assert scene.staging.scrub(stopped=lambda: next(looks, True)) == ()


def test_a_large_tensor_is_read_in_parts_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path)
    with scene.staging:
        path = scene.stage(3).path / WEIGHTS_FILE
        for size in (8, 64, 1000, 1 << 20):
            monkeypatch.setattr(verify, "PART_BYTES", size)
            for threads in (1, 3):
                verify.verify(path, scene.line.manifests[3].tensors, "v", lambda: None, threads=threads)
        data = buffer_bytes(scene, "a")
        (tmp_path / "damaged").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptObject, match=r"^v: tensor '\w+(\.\d)?' has the state digest"):
            verify.verify(tmp_path / "damaged", scene.line.manifests[3].tensors, "v", lambda: None)
