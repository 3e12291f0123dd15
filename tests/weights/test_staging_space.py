"""Tight disks: a budget, a single buffer, and no more on the disk than there must be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.store.faulty import Fault, Kind
from stitch.weights import building, fetch
from stitch.weights.apply import THREAD_CHUNKS
from stitch.weights.buffers import Buffer
from stitch.weights.files import held_bytes
from stitch.weights.safetensors import WEIGHTS_FILE
from stitch.weights.sparse import CHUNK_BYTES
from stitch.weights.staging import NotEnoughSpace, StagingCancelled, Verify
from tests.weights.scene import ALL, MIXED, SPARSE, V0, V2, Scene, expected_file
from tests.weights.versions import assert_same, changed, loaded

pytestmark = pytest.mark.unit


@pytest.fixture
def single(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "work", deltas=MIXED, buffers=1)
    yield made
    made.staging.close()


class TestSingleBuffer:
    def test_it_follows_and_the_disk_holds_the_model_once(self, single: Scene) -> None:
        for number in (0, 1, 2, 3):
            staged = single.go(number)
            assert (staged.path / WEIGHTS_FILE).read_bytes() == expected_file(number)
            assert staged.buffer == "a"
            assert single.staging.active == staged
            assert [path.name for path in (single.workdir / "buffers").iterdir()] == ["a"]
            assert not list((single.workdir / "cache").iterdir())
            assert [path.name for path in (single.workdir / "staged").glob("*/*")] == [staged.path.name]
            if number:
                assert staged.bytes_downloaded == single.size(number)

    def test_going_back_costs_a_download(self, single: Scene) -> None:
        single.go(3)
        staged = single.go(1)
        assert_same(loaded(staged.path), ALL[1])
        assert staged.bytes_downloaded == single.size(0) + single.size(1)

    def test_nobody_can_load_from_it_while_it_is_on_its_way(self, single: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        before = single.go(1)
        seen: list[bool] = []
        original = building.Chain.apply

        def apply(self: building.Chain, *arguments: object, **options: object) -> None:
            seen.append(before.path.exists() or single.staging.active is not None)
            original(self, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(building.Chain, "apply", apply)
        single.stage(2)
        assert seen == [False]

    def test_what_fails_before_the_first_change_leaves_it(self, single: Scene) -> None:
        before = single.go(0)
        single.store.add(Fault(call="download", kind=Kind.FLIP, key=single.line.manifests[1].weights[0].key, at=300))
        with pytest.raises(CorruptObject):
            single.stage(1)
        with pytest.raises(StagingCancelled):
            single.stage(1, cancelled=lambda: True)
        assert single.staging.active == before
        assert_same(loaded(before.path), V0)
        assert single.stage(1).bytes_downloaded == single.size(1)

    def test_what_fails_after_it_is_built_anew(self, single: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        single.go(0)
        with monkeypatch.context() as patched:
            patched.setattr(Buffer, "mark_clean", _crash)
            with pytest.raises(_Crash):
                single.stage(1)
        assert single.staging.active is None
        staged = single.stage(1)
        assert_same(loaded(staged.path), ALL[1])
        assert staged.bytes_downloaded == single.size(0)

    @pytest.mark.parametrize("clean", ["a", "b"])
    def test_of_two_buffers_the_better_is_kept(self, clean: str, tmp_path: Path) -> None:
        scene = Scene(tmp_path, deltas=SPARSE)
        scene.go(0)
        scene.go(1)
        (tmp_path / "buffers" / {"a": "b", "b": "a"}[clean] / "buffer.json").unlink()
        scene.restart(buffers=1)
        with scene.staging:
            assert [path.name for path in (tmp_path / "buffers").iterdir()] == [clean]
            assert scene.stage(2).bytes_downloaded <= scene.size(1) + scene.size(2)
            scene.restart(buffers=2)
            assert_same(loaded(scene.go(3).path), ALL[3])
            assert_same(loaded(scene.go(2).path), V2)
            scene.staging.close()


@settings(deadline=None, max_examples=30)
@given(
    targets=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=8),
    mode=st.sampled_from(list(Verify)),
)
def test_any_order_of_targets_in_one_buffer(
    targets: list[tuple[int, bool, bool]], mode: Verify, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scene = Scene(tmp_path_factory.mktemp("order"), deltas=MIXED, buffers=1, verify=mode)
    try:
        for number, activate, restart in targets:
            staged = scene.stage(number)
            assert (staged.path / WEIGHTS_FILE).read_bytes() == expected_file(number)
            if activate:
                scene.staging.mark_active(staged)
            if restart:
                scene.restart()
    finally:
        scene.staging.close()


class TestBudget:
    def test_what_is_needed_is_said_and_suffices(self, tmp_path: Path) -> None:
        """For any version from any state: with one byte less it is refused before anything changed, with so many it goes."""
        budget = 1
        scene = Scene(tmp_path, deltas=MIXED, disk_budget=budget)
        with scene.staging:
            for number in (1, 2, 3, 0):
                while (refused := _refusal(scene, number)) is not None:
                    assert f"the disk budget is {budget}" in refused
                    assert "single buffer" in refused
                    needed = int(refused.split("raise it to ")[1].split(",")[0])
                    assert needed > budget
                    budget = needed
                    scene.restart(disk_budget=budget)
                staged = scene.go(number)
                assert_same(loaded(staged.path), ALL[number])
                assert held_bytes(tmp_path) <= budget + 2 * RECORD_BYTES
            scene.staging.close()

    def test_the_disk_never_holds_more(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two models and their deltas, also while an anchor in shards is put together."""
        scene = Scene(tmp_path, deltas=MIXED)
        other = changed(V0, "embed", seed=7)
        scene.line.full(8, other, max_shard_bytes=2000)
        model = len(expected_file(0))
        budget = 2 * model + 2 * max(file.size for file in scene.line.manifests[8].weights) + 1000
        scene.restart(disk_budget=budget)
        most = 0

        def watch(*_: object) -> bool:
            nonlocal most
            most = max(most, held_bytes(tmp_path))
            return False

        with scene.staging:
            for number in (0, 1, 2, 8):
                scene.staging.mark_active(scene.stage(number, cancelled=watch))
                watch()
            scene.staging.close()
        assert model < most <= budget

    def test_a_single_buffer_fits_where_two_do_not(self, tmp_path: Path) -> None:
        budget = len(expected_file(0)) + 6000
        scene = Scene(tmp_path, deltas=SPARSE, disk_budget=budget)
        with scene.staging:
            scene.go(0)
            with pytest.raises(NotEnoughSpace):
                scene.go(1)
            scene.restart(buffers=1)
            for number in (1, 2, 3):
                assert_same(loaded(scene.go(number).path), ALL[number])
            scene.staging.close()

    def test_bad_options_name_the_field(self, tmp_path: Path) -> None:
        scene = Scene(tmp_path)
        scene.staging.close()
        for field, value in (("buffers", 0), ("buffers", 3), ("disk_budget", 0), ("memory_budget", -1)):
            with pytest.raises(InvalidRequest, match=field) as caught:
                scene.restart(**{field: value})
            assert caught.value.field == field
            del scene.options[field]


def test_a_memory_budget_bounds_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    original = building.Chain.apply

    def apply(self: building.Chain, *arguments: object, **options: int) -> None:
        threads.append(options["threads"])
        original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(building.Chain, "apply", apply)
    monkeypatch.setattr(building, "default_threads", lambda: 6)
    for budget, expected in ((None, 6), (1, 1), (2 * THREAD_CHUNKS * CHUNK_BYTES + 1, 2), (1 << 40, 6)):
        scene = Scene(tmp_path / str(budget), deltas=SPARSE, memory_budget=budget)
        with scene.staging:
            assert_same(loaded(scene.stage(3).path), ALL[3])
        assert threads.pop() == expected


def test_progress_is_told_while_a_file_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "CHECK_EVERY_S", 0.001)
    scene = Scene(tmp_path)
    with scene.staging:
        for number in range(4):
            scene.store.add(Fault(call="download", kind=Kind.SLOW, seconds=0.02, nth=number + 1))
        seen: list[tuple[int, int]] = []
        staged = scene.stage(3, progress=lambda done, total: seen.append((done, total)))
        assert seen[0] == (0, staged.bytes_downloaded)
        assert seen[-1] == (staged.bytes_downloaded, staged.bytes_downloaded)
        assert seen == sorted(set(seen))


def _refusal(scene: Scene, number: int) -> str | None:
    try:
        scene.stage(number)
    except NotEnoughSpace as error:
        return str(error)
    return None


RECORD_BYTES = 400
"""Two small records change their size as they go."""


class _Crash(BaseException):
    """What no code of ours catches."""


def _crash(*_: object) -> None:
    raise _Crash
