"""Staging: cheap paths, nothing unverified, the active buffer untouched, and every crash survivable."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, InvalidRequest, Unavailable
from stitch.core.ids import RunId
from stitch.core.manifest import Manifest
from stitch.store.directory import DirectoryStore
from stitch.store.faulty import Fault, FaultyStore, Kind
from stitch.store.memory import MemoryStore
from stitch.weights.safetensors import WEIGHTS_FILE, write_checkpoint
from stitch.weights.staging import NotEnoughSpace, Staged, Staging, StagingCancelled
from tests.weights.versions import CONFIG, Line, Weights, assert_same, changed, loaded, model

pytestmark = pytest.mark.unit

V0 = model()
V1 = changed(V0, "layer.0", seed=1)
V2 = changed(V1, "embed", "scale", seed=2)
V3 = changed(V2, "layer.1", seed=3)
ALL = [V0, V1, V2, V3]


class Scene:
    """A line of four versions (0 full, the rest deltas) and the staging area of a replica."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.store = FaultyStore(MemoryStore())
        self.line = Line(self.store)
        self.line.full(0, V0)
        for number in (1, 2, 3):
            self.line.delta(number, number - 1, ALL[number])
        self.staging = Staging(workdir, self.store)

    def stage(self, number: int, **options: object) -> Staged:
        return self.staging.stage(self.line.ref(number), self.line.refs[number], **options)  # type: ignore[arg-type]

    def go(self, number: int) -> Staged:
        """Stages and activates."""
        staged = self.stage(number)
        self.staging.mark_active(staged)
        return staged

    def restart(self) -> None:
        self.staging.close()
        self.staging = Staging(self.workdir, self.store)

    def downloads(self) -> list[str]:
        return [key for call, key in self.store.calls if call == "download"]

    def size(self, number: int) -> int:
        manifest = self.line.manifests[number]
        return sum(file.size for file in manifest.weights)

    def stored(self, number: int) -> bytes:
        return self.store.get(self.line.manifests[number].weights[0].key, limit=1 << 30)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "work")
    yield made
    made.staging.close()


def buffer_bytes(scene: Scene, name: str) -> bytes:
    return (scene.workdir / "buffers" / name / WEIGHTS_FILE).read_bytes()


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    place %= len(data) * 8
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


class TestPaths:
    def test_first_version_from_its_anchor(self, scene: Scene) -> None:
        staged = scene.stage(2)
        assert_same(loaded(staged.path), V2)
        assert (staged.path / "config.json").read_bytes() == CONFIG
        assert staged.path == scene.workdir / "staged" / "r1" / "weight_v000002"
        assert staged.ref == scene.line.ref(2)
        assert staged.weights_digest == scene.line.manifests[2].weights_digest
        assert staged.bytes_downloaded == sum(scene.size(n) for n in (0, 1, 2)) + len(CONFIG)
        assert staged.seconds > 0

    def test_following_costs_the_deltas(self, scene: Scene) -> None:
        scene.go(0)
        for number in (1, 2, 3):
            staged = scene.stage(number)
            assert_same(loaded(staged.path), ALL[number])
            assert staged.bytes_downloaded == scene.size(number)
            scene.staging.mark_active(staged)
        assert scene.staging.active == staged

    def test_buffers_alternate_and_the_active_one_is_not_touched(self, scene: Scene) -> None:
        used = []
        for number in range(4):
            active = scene.staging.active
            before = None if active is None else buffer_bytes(scene, active.buffer)
            staged = scene.stage(number)
            if active is not None:
                assert buffer_bytes(scene, active.buffer) == before
                assert_same(loaded(active.path), ALL[number - 1])
            scene.staging.mark_active(staged)
            used.append(staged.buffer)
        assert used == ["a", "b", "a", "b"]

    def test_skipping_versions(self, scene: Scene) -> None:
        scene.go(0)
        staged = scene.stage(3)
        assert_same(loaded(staged.path), V3)
        assert staged.bytes_downloaded == sum(scene.size(n) for n in (1, 2, 3))

    def test_going_back(self, scene: Scene) -> None:
        """A roll-back: the older version is not on the way from the newer one."""
        scene.go(1)
        scene.go(3)
        assert_same(loaded(scene.stage(0).path), V0)
        scene.go(1)
        assert_same(loaded(scene.stage(2).path), V2)

    def test_alias_moves_no_bytes(self, scene: Scene) -> None:
        scene.go(2)
        alias = Line(scene.store, RunId("r2"))
        before = buffer_bytes(scene, "a")
        staged = scene.staging.stage(alias.ref(0), scene.line.refs[2])
        assert staged.bytes_downloaded == 0
        assert staged.path == scene.workdir / "staged" / "r2" / "weight_v000000"
        assert_same(loaded(staged.path), V2)
        assert buffer_bytes(scene, "a") == before
        assert not (scene.workdir / "buffers" / "b" / WEIGHTS_FILE).exists()
        active = scene.staging.active
        assert active is not None
        assert_same(loaded(active.path), V2)
        scene.staging.mark_active(staged)
        assert_same(loaded(scene.stage(3).path), V3)
        assert_same(loaded(staged.path), V2)

    def test_same_weights_with_another_config(self, scene: Scene) -> None:
        scene.go(0)
        scene.line.delta(4, 0, V0, config=b'{"other": 1}')
        staged = scene.stage(4)
        assert (staged.path / "config.json").read_bytes() == b'{"other": 1}'
        active = scene.staging.active
        assert active is not None
        assert (active.path / "config.json").read_bytes() == CONFIG

    def test_sharded_anchor(self, scene: Scene) -> None:
        scene.line.full(5, V3, max_shard_bytes=3000)
        assert len(scene.line.manifests[5].weights) > 1
        staged = scene.stage(5)
        assert_same(loaded(staged.path), V3)
        assert [path.name for path in staged.path.glob("*.safetensors")] == [WEIGHTS_FILE]

    def test_anchor_that_a_compactor_added(self, scene: Scene) -> None:
        added = Line(scene.store, RunId("compacted"))
        added.full(2, V2)
        staged = scene.stage(3, anchors=[added.refs[2]])
        assert_same(loaded(staged.path), V3)
        assert staged.bytes_downloaded == sum(f.size for f in added.manifests[2].weights) + scene.size(3) + len(CONFIG)

    def test_staging_again_is_idempotent(self, scene: Scene) -> None:
        first = scene.go(1)
        second = scene.stage(1)
        assert (second.path, second.bytes_downloaded) == (first.path, 0)
        scene.stage(2)
        assert_same(loaded(scene.stage(2).path), V2)

    def test_links_are_relative(self, scene: Scene, tmp_path: Path) -> None:
        path = scene.go(1).path.relative_to(scene.workdir)
        shutil.copytree(scene.workdir, tmp_path / "mounted", symlinks=True)
        shutil.rmtree(scene.workdir / "buffers")
        assert_same(loaded(tmp_path / "mounted" / path), V1)

    def test_disk_holds_no_more_than_it_must(self, scene: Scene) -> None:
        for number in (0, 1, 2, 3, 2, 3):
            scene.go(number)
        assert len(list((scene.workdir / "files").iterdir())) == 1
        assert len(list((scene.workdir / "staged").glob("*/*"))) <= 2
        assert scene.line.manifests[0].weights[0].blake3 not in {p.name for p in (scene.workdir / "cache").iterdir()}

    def test_progress(self, scene: Scene) -> None:
        seen: list[tuple[int, int]] = []
        staged = scene.stage(2, progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (staged.bytes_downloaded, staged.bytes_downloaded)
        assert seen == sorted(seen)


class TestBase:
    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        write_checkpoint(tmp_path / "base", V0, max_shard_bytes=3000)
        return tmp_path / "base"

    def based(self, scene: Scene, base: Path) -> Staging:
        scene.staging.close()
        scene.staging = Staging(scene.workdir, scene.store, base=base)
        return scene.staging

    def test_matching_base_spares_the_download(self, scene: Scene, base: Path) -> None:
        self.based(scene, base)
        staged = scene.stage(1)
        assert_same(loaded(staged.path), V1)
        assert staged.bytes_downloaded == scene.size(1) + len(CONFIG)
        assert_same(loaded(base), V0)

    def test_other_base_is_not_used(self, scene: Scene, base: Path, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "other", V3)
        self.based(scene, tmp_path / "other")
        assert scene.stage(1).bytes_downloaded > scene.size(0)

    def test_damaged_base_is_not_used(self, scene: Scene, base: Path) -> None:
        next(base.glob("*.safetensors")).unlink()
        self.based(scene, base)
        assert_same(loaded(scene.stage(1).path), V1)

    def test_base_that_is_none(self, scene: Scene, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="no directory"):
            Staging(tmp_path / "w", scene.store, base=tmp_path / "none")


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
            with pytest.raises(CorruptObject, match=rf"r1/weight_v000002: \w+.safetensors"):
                scene.stage(2)
            assert_same(loaded(scene.stage(2).path), V2)
        finally:
            scene.staging.close()

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
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
            except CorruptObject:
                staged = scene.stage(target)
            # Some bits (of the header's padding, or of tensors that the delta replaces) leave the result right.
            assert_same(loaded(staged.path), ALL[target])
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
        wrong = Line(scene.store, RunId("r1"))
        wrong.manifests, wrong.refs = dict(scene.line.manifests), dict(scene.line.refs)
        ref = _publish_lie(scene, lie, tensors)
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
        with pytest.raises(CorruptObject, match="base r1/weight_v000001 is missing|manifest .* is missing"):
            scene.stage(2)

    def test_carried_file(self, scene: Scene) -> None:
        scene.go(1)
        carried = next((scene.workdir / "files").iterdir())
        carried.write_bytes(b"x" * len(CONFIG))
        assert (scene.stage(2).path / "config.json").read_bytes() == CONFIG

    @pytest.mark.parametrize("path", ["model.safetensors", "pytorch_model.bin", "sub/x.pt", "model.safetensors.index.json"])
    def test_carried_file_that_poses_as_weights(self, scene: Scene, path: str) -> None:
        from dataclasses import replace

        from stitch.store.manifests import write_manifest

        manifest = scene.line.manifests[0]
        forged = replace(manifest, files=(replace(manifest.files[0], path=path),))
        ref = write_manifest(scene.store, forged)
        with pytest.raises(CorruptObject, match=path):
            scene.staging.stage(scene.line.ref(0), ref)


def _publish_lie(scene: Scene, manifest: Manifest, tensors: object):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    from stitch.core.manifest import weights_digest
    from stitch.store.manifests import write_manifest

    forged = replace(manifest, tensors=tensors, weights_digest=weights_digest(tensors))  # type: ignore[arg-type]
    return write_manifest(scene.store, forged)


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


def test_one_process_per_workdir(scene: Scene) -> None:
    with pytest.raises(InvalidRequest, match="another process"):
        Staging(scene.workdir, scene.store)


def test_threads_take_turns(scene: Scene) -> None:
    scene.go(0)
    found: list[Weights] = []
    threads = [threading.Thread(target=lambda n=n: found.append(loaded(scene.stage(n).path))) for n in (0, 0, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    for weights in found:
        assert_same(weights, V0)


@settings(deadline=None, max_examples=25)
@given(targets=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8), data=st.data())
def test_any_order_of_targets(
    targets: list[tuple[int, bool]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Forward, back, over two anchors, with restarts between: always what was published, and never in the active buffer."""
    scene = Scene(tmp_path_factory.mktemp("order"))
    weights = [*ALL, changed(V3, "mask", seed=4)]
    scene.line.full(4, weights[4])
    weights.append(changed(weights[4], "layer.0", seed=5))
    scene.line.delta(5, 4, weights[5])
    try:
        for number, activate in targets:
            active = scene.staging.active
            staged = scene.stage(number)
            assert_same(loaded(staged.path), weights[number])
            if active is not None:
                assert_same(loaded(active.path), weights[active.ref.number])
            if activate:
                scene.staging.mark_active(staged)
            elif data.draw(st.booleans()):
                scene.restart()
    finally:
        scene.staging.close()


def test_copy_without_help_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stitch.weights.files import copy_file

    data = np.random.default_rng(0).bytes(100_003)
    (tmp_path / "source").write_bytes(data)
    copy_file(tmp_path / "source", tmp_path / "1")
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    copy_file(tmp_path / "source", tmp_path / "2")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes() == data
