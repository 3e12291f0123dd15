"""Staging under faults: damage is found before it returns, every crash is survivable, a full disk is told."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, InvalidRequest, Unavailable
from stitch.core.manifest import Codec, weights_digest
from stitch.store.directory import DirectoryStore
from stitch.store.faulty import Fault, Kind
from stitch.store.manifests import object_key, prefix_of, write_manifest
from stitch.weights.safetensors import WEIGHTS_FILE
from stitch.weights.staging import NotEnoughSpace, Staging, StagingCancelled, Verify
from tests.weights.scene import ALL, MIXED, V0, V1, V2, V3, Scene, buffer_bytes, flip
from tests.weights.versions import CONFIG, Line, Weights, assert_same, changed, loaded

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
            with pytest.raises(CorruptObject, match=r"r1/weight_v000004: tensor 'layer\.1' differs from its base"):
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


def _variant(name: str) -> Weights:
    """V1, wrong in one way."""
    out = dict(V1)
    match name:
        case "renamed":
            out["layer.X"] = out.pop("layer.0")
        case "missing":
            del out["layer.0"]
        case "extra":
            out["layer.9"] = out["layer.0"]
        case "reshaped":
            out["layer.0"] = out["layer.0"].reshape(33, 16)
        case "dtype":
            out["layer.0"] = out["layer.0"].view(np.float16)
        case "another model":
            return {f"model.{name}": array for name, array in V1.items()}
    return out


VARIANTS: Final = {
    "renamed": r"tensor 'layer\.(X|0)'",
    "missing": r"tensor 'layer\.0'",
    "extra": r"tensor 'layer\.9'",
    "reshaped": r"tensor 'layer\.0' is BF16 \[33, 16\]",
    "dtype": r"tensor 'layer\.0' is F16 \[16, 33\]",
    "another model": r"tensor '(model\.)?\w+(\.\d)?'",
}


class TestOtherModels:
    """What a publisher should have refused is refused here too, by the tensor's name, and the live version stays."""

    @pytest.mark.parametrize("mode", list(Verify))
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("form", ["full, other bytes", "delta, other bytes", "delta, other manifest"])
    def test_refused_with_the_tensor_s_name(self, form: str, variant: str, mode: Verify, tmp_path: Path) -> None:
        scene = Scene(tmp_path, deltas=MIXED, verify=mode)
        with scene.staging:
            active = scene.go(0)
            right = scene.line.manifests[1]
            scene.line.full(7, _variant(variant))
            wrong = scene.line.manifests[7]
            (file,) = wrong.weights
            key = object_key(prefix_of(right), file.blake3)
            scene.store.put(key, scene.stored(7))
            forged = {
                "full, other bytes": replace(wrong, tensors=right.tensors, weights_digest=right.weights_digest),
                "delta, other bytes": replace(right, codec=Codec.CHANGED_TENSORS, weights=(replace(file, key=key),)),
                "delta, other manifest": replace(right, tensors=wrong.tensors, weights_digest=wrong.weights_digest),
            }[form]
            ref = write_manifest(scene.store, forged)
            with pytest.raises(CorruptObject, match=VARIANTS[variant]):
                scene.staging.stage(scene.line.ref(7), ref)
            assert_same(loaded(active.path), V0)


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


STEPS: Final = (
    "buffers.write_whole",
    "fetch.Fetcher.fetch",
    "fetch.Fetcher.evict_weights",
    "shelf.StagedFolders.withdraw",
    "shelf.StagedFolders.expose",
    "shelf.StagedFolders.keep_only",
    "building.copy_file",
    "shelf.remove",
    "building.merge",
    "building.verify",
    "origins.copy_range",
    "origins.remove",
    "apply.sparse.apply",
    "apply.copy_bytes",
)
"""Whatever changes something on the disk, or stands between two that do."""


@pytest.mark.parametrize(
    ("buffers", "before", "target"),
    [(2, (), 2), (2, (0,), 1), (2, (0, 1), 3), (1, (), 9), (1, (0,), 3), (1, (2,), 9)],
)
def test_crash_at_every_step(
    buffers: int, before: tuple[int, ...], target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a step, or after it and all that it wrote: what is left is known to be good, or built anew; the active one of two
    buffers is as it was. Half of the crashes end the process, so that the next one has nothing but the disk."""
    for point in range(1, 200):
        mode = Verify.FULL if point % 2 else Verify.INCREMENTAL
        scene = Scene(tmp_path / str(point), deltas=MIXED, buffers=buffers, verify=mode)
        scene.line.full(9, V3, max_shard_bytes=2000)
        try:
            for number in before:
                active = scene.go(number)
            with monkeypatch.context() as patched:
                survived = _crashed_at(point, patched, lambda scene=scene: scene.stage(target)) is None  # type: ignore[misc]
            if before and buffers == 2:
                assert_same(loaded(active.path), ALL[before[-1]])
            if survived:
                assert point > 8
                return
            if point % 4 in (1, 2):
                scene.restart()
            for number in (target, 1):
                staged = scene.go(number)
                assert_same(loaded(staged.path), V3 if number == 9 else ALL[number])
        finally:
            scene.staging.close()
    pytest.fail("never got through")


def _crashed_at(point: int, monkeypatch: pytest.MonkeyPatch, stage: Callable[[], object]) -> str | None:
    """The step that the staging was ended at, the `point`-th; None where it has fewer."""
    passed = 0
    ended: str | None = None

    def crashing(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **options: object) -> object:
            crash()
            result = original(*arguments, **options)
            crash()
            return result

        def crash() -> None:
            nonlocal passed, ended
            passed += 1
            if passed == point:
                ended = name
                raise _Crash

        return step

    for name in STEPS:
        path = f"stitch.weights.{name}"
        monkeypatch.setattr(path, crashing(name, resolve_name(path)))
    try:
        stage()
    except _Crash:
        return ended
    return None


KILLED = """
import os, signal, sys
from pathlib import Path
from pkgutil import resolve_name
from stitch.store.directory import DirectoryStore
from stitch.weights.staging import Staging
from stitch.core.ids import *
from stitch.core.manifest import ManifestRef

work, store, step = Path(sys.argv[1]), DirectoryStore(Path(sys.argv[2])), sys.argv[3]
staging = Staging(work, store)

def ref(number):
    return VersionRef(policy=PolicyId("p"), run=RunId("r1"), number=VersionNumber(number))

def manifest(text):
    key, digest, weights = text.split(",")
    return ManifestRef(key=key, digest=Digest(digest), weights_digest=Digest(weights))

staging.mark_active(staging.stage(ref(0), manifest(sys.argv[4])))
staging.mark_active(staging.stage(ref(1), manifest(sys.argv[5])))
owner, _, name = step.rpartition(".")
setattr(resolve_name(owner), name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
staging.stage(ref(3), manifest(sys.argv[6]))
"""


@pytest.mark.parametrize(
    "step",
    ["fetch.Fetcher.fetch", "building.Chain.apply", "building.verify", "buffers.Buffer.mark_clean", "shelf.StagedFolders.expose"],
)
def test_killed_process(step: str, tmp_path: Path) -> None:
    """SIGKILL in the middle; the next process finds what it can use and rebuilds the rest."""
    store = DirectoryStore(tmp_path / "store")
    line = Line(store)
    line.full(0, V0)
    for number in (1, 2, 3):
        line.sparse(number, number - 1, ALL[number])
    refs = [f"{r.key},{r.digest},{r.weights_digest}" for r in (line.refs[n] for n in (0, 1, 3))]
    step = f"stitch.weights.{step}"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "work"), str(tmp_path / "store"), step, *refs]
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
        monkeypatch.setattr("stitch.weights.space.SPARE_BYTES", 0)
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

        monkeypatch.setattr("stitch.weights.building.copy_file", full)
        with pytest.raises(NotEnoughSpace, match="became full"):
            scene.stage(1)
        monkeypatch.undo()
        assert_same(loaded(scene.stage(1).path), V1)
