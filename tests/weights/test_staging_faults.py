"""Staging under faults: damage is found before it returns, every crash is survivable, a full disk is told."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, InvalidRequest, Unavailable
from stitch.core.manifest import weights_digest
from stitch.store.directory import DirectoryStore
from stitch.store.faulty import Fault, Kind
from stitch.store.manifests import write_manifest
from stitch.weights.safetensors import WEIGHTS_FILE
from stitch.weights.staging import NotEnoughSpace, Staging, StagingCancelled
from tests.weights.scene import ALL, V0, V1, V2, V3, Scene, buffer_bytes, expected_file, flip
from tests.weights.versions import CONFIG, Line, assert_same, changed, loaded

pytestmark = pytest.mark.unit


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "work")
    yield made
    made.staging.close()


class TestCorruption:
    """Whatever is wrong is found before `stage` returns, and the next call mends what can be mended."""

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
    @given(number=st.integers(0, 2), place=st.integers(0, 1 << 30))
    def test_flipped_bit_in_an_object(self, number: int, place: int, tmp_path_factory: pytest.TempPathFactory) -> None:
        scene = Scene(tmp_path_factory.mktemp("flip"))
        try:
            key = scene.line.manifests[number].weights[0].key
            place %= scene.size(number) * 8
            scene.store.add(Fault(call="download", kind=Kind.FLIP, key=key, at=place))
            with pytest.raises(CorruptObject, match=r"r1/weight_v000002: \w+.safetensors"):
                scene.stage(2)
            assert_same(loaded(scene.stage(2).path), V2)
        finally:
            scene.staging.close()

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
    @given(place=st.integers(0, 1 << 30), where=st.sampled_from(["held", "copied", "in place"]))
    def test_flipped_bit_in_a_buffer(self, place: int, where: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        scene = Scene(tmp_path_factory.mktemp("flip"))
        try:
            scene.go(0)
            target = {"held": 0, "copied": 1, "in place": 2}[where]
            name = "a"
            if where == "in place":
                scene.go(1)
            flip(scene.workdir / "buffers" / name / WEIGHTS_FILE, place)
            try:
                staged = scene.stage(target)
                assert where != "held"
            except CorruptObject:
                staged = scene.stage(target)
            # Only bits of tensors that a delta replaces may pass; the file is right to the last bit, its header too.
            assert (staged.path / WEIGHTS_FILE).read_bytes() == expected_file(target)
        finally:
            scene.staging.close()

    def test_tensor_is_named_and_the_active_version_stays(self, scene: Scene) -> None:
        active = scene.go(1)
        scene.go(2)
        scene.go(1)
        weights = scene.workdir / "buffers" / ("b" if active.buffer == "a" else "a") / WEIGHTS_FILE
        flip(weights, (weights.stat().st_size - 3) * 8)
        active = scene.staging.active
        assert active is not None
        before = buffer_bytes(scene, active.buffer)
        with pytest.raises(CorruptObject, match=r"r1/weight_v000003: tensor '\w+"):
            scene.stage(3)
        assert buffer_bytes(scene, active.buffer) == before
        assert_same(loaded(active.path), V1)
        assert_same(loaded(scene.stage(3).path), V3)

    def test_manifest_of_other_weights_than_its_delta(self, scene: Scene) -> None:
        """A publisher's mistake: the delta is intact, but it does not lead to what the manifest promises."""
        scene.go(2)
        tensors = scene.line.manifests[3].tensors
        scene.line.delta(4, 2, changed(V2, "mask", seed=9))
        lie = scene.line.manifests[4]
        ref = write_manifest(scene.store, replace(lie, tensors=tensors, weights_digest=weights_digest(tensors)))
        active = scene.staging.active
        for _ in range(3):
            with pytest.raises(CorruptObject, match=r"r1/weight_v000004: tensor '(layer\.1|mask)' has the state digest"):
                scene.staging.stage(scene.line.ref(4), ref)
        assert active is not None
        assert_same(loaded(active.path), V2)
        staged = scene.stage(3)
        assert staged.bytes_downloaded == scene.size(3)  # the active buffer was not blamed
        assert_same(loaded(staged.path), V3)

    def test_missing_object_is_named(self, scene: Scene) -> None:
        scene.store.delete(scene.line.manifests[1].weights[0].key)
        with pytest.raises(CorruptObject, match=r"delta.safetensors: object .* is missing"):
            scene.stage(2)

    def test_missing_link_is_named(self, scene: Scene) -> None:
        scene.store.delete(scene.line.refs[1].key)
        with pytest.raises(CorruptObject, match=r"base r1/weight_v000001 is missing|manifest .* is missing"):
            scene.stage(2)

    def test_carried_file(self, scene: Scene) -> None:
        scene.go(1)
        carried = next((scene.workdir / "files").iterdir())
        carried.write_bytes(b"x" * len(CONFIG))
        assert (scene.stage(2).path / "config.json").read_bytes() == CONFIG

    @pytest.mark.parametrize("path", ["model.safetensors", "pytorch_model.bin", "sub/x.pt", "model.safetensors.index.json"])
    def test_carried_file_that_poses_as_weights(self, scene: Scene, path: str) -> None:
        manifest = scene.line.manifests[0]
        forged = replace(manifest, files=(replace(manifest.files[0], path=path),))
        ref = write_manifest(scene.store, forged)
        with pytest.raises(CorruptObject, match=path):
            scene.staging.stage(scene.line.ref(0), ref)


class TestInterruptions:
    def test_store_that_is_away(self, scene: Scene) -> None:
        active = scene.go(0)
        scene.store.add(Fault(call="download", kind=Kind.FAIL_BEFORE))
        with pytest.raises(Unavailable):
            scene.stage(1)
        assert_same(loaded(active.path), V0)
        assert_same(loaded(scene.stage(1).path), V1)

    def test_cut_download_is_continued(self, scene: Scene) -> None:
        key = scene.line.manifests[0].weights[0].key
        scene.store.add(Fault(call="download", kind=Kind.CUT, key=key, at=1000))
        with pytest.raises(Unavailable):
            scene.stage(0)
        scene.restart()
        staged = scene.stage(0)
        assert staged.bytes_downloaded <= scene.size(0) - 1000 + len(CONFIG)
        assert_same(loaded(staged.path), V0)

    def test_cancelled(self, scene: Scene) -> None:
        scene.go(0)
        with pytest.raises(StagingCancelled, match="r1/weight_v000001"):
            scene.stage(1, cancelled=lambda: True)
        assert_same(loaded(scene.stage(1).path), V1)

    @pytest.mark.parametrize("restarted", [False, True])
    @pytest.mark.parametrize(("before", "target"), [((), 2), ((0,), 1), ((0, 1), 3), ((0, 1, 2), 3)])
    def test_failure_at_every_point(self, before: tuple[int, ...], target: int, restarted: bool, tmp_path: Path) -> None:
        """Staging is interrupted at its first step, its second, and so on, until one attempt gets through."""
        for point in range(1, 200):
            scene = Scene(tmp_path / str(point))
            try:
                for number in before:
                    active = scene.go(number)
                survived = _interrupted(lambda cancelled, scene=scene: scene.stage(target, cancelled=cancelled), point)
                if before:
                    assert_same(loaded(active.path), ALL[before[-1]])
                if survived:
                    return
                if restarted:
                    scene.restart()
                assert_same(loaded(scene.stage(target).path), ALL[target])
            finally:
                scene.staging.close()
        pytest.fail("never got through")

    def test_stale_result_is_not_taken_for_active(self, scene: Scene) -> None:
        scene.go(0)
        stale = scene.stage(1)
        scene.stage(2)
        with pytest.raises(InvalidRequest, match="staged over"):
            scene.staging.mark_active(stale)
        assert not stale.path.exists()

    def test_restart_keeps_clean_buffers(self, scene: Scene) -> None:
        scene.go(0)
        scene.go(1)
        scene.restart()
        assert scene.stage(2).bytes_downloaded == scene.size(2)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9}', '{"format": 1, "state": "clean", "weights_digest": 1}'])
    def test_unreadable_state_means_dirty(self, scene: Scene, text: str) -> None:
        scene.go(0)
        (scene.workdir / "buffers" / "a" / "buffer.json").write_text(text)
        scene.restart()
        staged = scene.stage(0)
        assert staged.bytes_downloaded == scene.size(0)
        assert_same(loaded(staged.path), V0)


class _Crash(BaseException):
    """What no code of ours catches."""


def _interrupted(stage: Callable[[Callable[[], bool]], object], point: int) -> bool:
    """Whether the staging got through before its `point`-th look at whether to stop."""
    count = 0

    def cancelled() -> bool:
        nonlocal count
        count += 1
        if count == point:
            raise _Crash
        return False

    try:
        stage(cancelled)
    except _Crash:
        return False
    return True


KILLED = """
import os, signal, sys
from pathlib import Path
from stitch.store.directory import DirectoryStore
from stitch.weights.staging import Staging
from stitch.core.ids import *
from stitch.core.manifest import ManifestRef

work, store, point = Path(sys.argv[1]), DirectoryStore(Path(sys.argv[2])), int(sys.argv[3])
staging = Staging(work, store)
count = 0

def ref(number):
    return VersionRef(policy=PolicyId("p"), run=RunId("r1"), number=VersionNumber(number))

def manifest(text):
    key, digest, weights = text.split(",")
    return ManifestRef(key=key, digest=Digest(digest), weights_digest=Digest(weights))

def cancelled():
    global count
    count += 1
    if count == point:
        os.kill(os.getpid(), signal.SIGKILL)
    return False

staging.mark_active(staging.stage(ref(0), manifest(sys.argv[4])))
staging.mark_active(staging.stage(ref(1), manifest(sys.argv[5])))
staging.stage(ref(3), manifest(sys.argv[6]), cancelled=cancelled)
"""


@pytest.mark.parametrize("point", [1, 3, 5, 7, 9])
def test_killed_process(point: int, tmp_path: Path) -> None:
    """SIGKILL in the middle; the next process finds what it can use and rebuilds the rest."""
    store = DirectoryStore(tmp_path / "store")
    line = Line(store)
    line.full(0, V0)
    for number in (1, 2, 3):
        line.delta(number, number - 1, ALL[number])
    refs = [f"{r.key},{r.digest},{r.weights_digest}" for r in (line.refs[n] for n in (0, 1, 3))]
    command = [sys.executable, "-c", KILLED, str(tmp_path / "work"), str(tmp_path / "store"), str(point), *refs]
    ended = subprocess.run(command, timeout=120, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    with Staging(tmp_path / "work", store) as staging:
        for number in (1, 3):
            assert_same(loaded(staging.stage(line.ref(number), line.refs[number]).path), ALL[number])


class TestDisk:
    def disk(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=free))

    def test_too_little_space_is_said_before(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        active = scene.go(0)
        self.disk(monkeypatch, 1000)
        with pytest.raises(NotEnoughSpace, match=r"r1/weight_v000001: staging needs \d+ bytes .* 1000 are free"):
            scene.stage(1)
        assert len(scene.downloads()) == 2  # the weights and the config of version 0
        assert_same(loaded(active.path), V0)
        monkeypatch.undo()
        assert_same(loaded(scene.stage(1).path), V1)

    def test_old_buffer_makes_room(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stitch.weights.staging.SPARE_BYTES", 0)
        scene.go(0)
        scene.go(1)
        other = changed(V0, "embed", seed=7)
        scene.line.full(9, other)
        self.disk(monkeypatch, 500)
        assert_same(loaded(scene.stage(9).path), other)

    def test_disk_that_fills_meanwhile(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        scene.go(0)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("stitch.weights.staging.copy_file", full)
        with pytest.raises(NotEnoughSpace, match="became full"):
            scene.stage(1)
        monkeypatch.undo()
        assert_same(loaded(scene.stage(1).path), V1)
