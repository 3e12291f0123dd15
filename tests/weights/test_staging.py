"""Staging: cheap paths, the active buffer untouched, one folder per version."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import InvalidRequest
from stitch.core.ids import RunId
from stitch.weights.files import copy_file
from stitch.weights.origins import LocalBase
from stitch.weights.parallel import Check
from stitch.weights.safetensors import WEIGHTS_FILE, write_checkpoint
from stitch.weights.staging import Staging
from tests.weights.scene import ALL, MIXED, V0, V1, V2, V3, Scene, buffer_bytes, flip
from tests.weights.versions import CONFIG, Line, Weights, assert_same, changed, loaded

pytestmark = pytest.mark.unit


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "work")
    yield made
    made.staging.close()


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

    def test_anchor_whose_manifest_is_gone(self, scene: Scene) -> None:
        """It would have spared work; the chain still leads there."""
        added = Line(scene.store, RunId("compacted"))
        added.full(2, V2)
        scene.store.delete(added.refs[2].key)
        assert_same(loaded(scene.stage(3, anchors=[added.refs[2]]).path), V3)

    def test_behind_an_anchor_nothing_is_needed(self, scene: Scene) -> None:
        """Older versions were retired, and everything of them is deleted."""
        added = Line(scene.store, RunId("compacted"))
        added.full(2, V2)
        for number in (0, 1):
            scene.store.delete(scene.line.refs[number].key)
        assert_same(loaded(scene.stage(2, anchors=[added.refs[2]]).path), V2)
        assert_same(loaded(scene.stage(3, anchors=[added.refs[2]]).path), V3)

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

    def test_deltas_upon_a_base(self, base: Path, tmp_path: Path) -> None:
        """In shards, and with sparse deltas on top."""
        scene = Scene(tmp_path / "mixed", deltas=MIXED, base=base)
        with scene.staging:
            staged = scene.stage(3)
            assert_same(loaded(staged.path), V3)
            assert staged.bytes_downloaded == sum(scene.size(n) for n in (1, 2, 3)) + len(CONFIG)
            assert_same(loaded(base), V0)

    def test_the_version_of_the_base_itself(self, scene: Scene, base: Path) -> None:
        self.based(scene, base)
        staged = scene.stage(0)
        assert_same(loaded(staged.path), V0)
        assert staged.bytes_downloaded == len(CONFIG)

    def test_base_that_changes_after_it_was_read(self, scene: Scene, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.based(scene, base)
        original = LocalBase.copy_to

        def copy_to(self: LocalBase, target: Path, check: Check) -> None:
            flip(max(base.glob("*.safetensors"), key=lambda path: path.stat().st_size), -9)
            original(self, target, check)

        monkeypatch.setattr(LocalBase, "copy_to", copy_to)
        staged = scene.stage(1)
        assert_same(loaded(staged.path), V1)
        assert staged.bytes_downloaded == scene.size(0) + scene.size(1) + len(CONFIG)

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
    data = np.random.default_rng(0).bytes(100_003)
    (tmp_path / "source").write_bytes(data)
    copy_file(tmp_path / "source", tmp_path / "1")
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    copy_file(tmp_path / "source", tmp_path / "2")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes() == data
