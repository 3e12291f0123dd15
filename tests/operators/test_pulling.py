"""A pulled directory is the version, whole, or is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from stitch.core.errors import CorruptObject, InvalidRequest, Unavailable
from stitch.operators import pulling
from stitch.operators.pulling import Pulled, pull, scratch_of
from stitch.store.faulty import Fault, FaultyStore, Kind
from stitch.store.memory import MemoryStore
from stitch.weights.digest import specs, weights_digest
from stitch.weights.host import host_tensors
from stitch.weights.safetensors import INDEX_FILE, WEIGHTS_FILE, open_checkpoint
from stitch.weights.staging import NotEnoughSpace, Staging, StagingCancelled
from tests.operators.published import CONFIG, Weights, line_of_four

pytestmark = pytest.mark.unit


class Line:
    """Four versions, and a folder for what is pulled of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = FaultyStore(MemoryStore())
        self.made, self.weights = line_of_four(self.store)

    def pull(self, number: int, name: str = "out", **options: object) -> Pulled:
        return pull(self.store, self.made.policy, self.made.version(number), self.folder / name, **options)  # type: ignore[arg-type]

    def downloads(self) -> list[str]:
        return [key for call, key in self.store.calls if call == "download"]

    def there(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def assert_holds(directory: Path, weights: Weights) -> None:
    """As Hugging Face's own library and ours read it."""
    with open_checkpoint(directory) as checkpoint:
        assert set(checkpoint.names) == set(weights)
        for name, array in weights.items():
            assert checkpoint.array(name).dtype == array.dtype
            assert checkpoint.array(name).shape == array.shape
            assert checkpoint.array(name).tobytes() == array.tobytes()
    read: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        read |= load_file(path)
    assert {name: array.tobytes() for name, array in read.items()} == {name: array.tobytes() for name, array in weights.items()}


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_every_form_of_a_version_becomes_the_checkpoint(line: Line, number: int) -> None:
    pulled = line.pull(number)
    assert_holds(line.folder / "out", line.weights[number])
    assert sorted(path.name for path in (line.folder / "out").iterdir()) == ["config.json", WEIGHTS_FILE]
    assert (line.folder / "out" / "config.json").read_bytes() == CONFIG
    assert line.there() == ["out"], "the scratch folder is gone"
    assert pulled.weights == (WEIGHTS_FILE,)
    assert pulled.files == ("config.json",)
    assert pulled.weights_digest == weights_digest(specs(host_tensors(line.weights[number])))
    assert pulled.bytes == sum(path.stat().st_size for path in (line.folder / "out").iterdir())


def test_a_full_version_is_byte_for_byte_what_was_published(line: Line) -> None:
    line.pull(0)
    stored = line.made.manifest(0).weights[0]
    assert (line.folder / "out" / WEIGHTS_FILE).read_bytes() == line.store.get(stored.key, limit=1 << 30)


def test_shards_under_an_index(line: Line) -> None:
    pulled = line.pull(3, max_shard_bytes=1200)
    assert len(pulled.weights) > 2
    assert (line.folder / "out" / INDEX_FILE).is_file()
    assert_holds(line.folder / "out", line.weights[3])


def test_an_empty_directory_is_filled_also_through_a_link(line: Line) -> None:
    (line.folder / "real").mkdir()
    (line.folder / "out").symlink_to("real")
    line.pull(1)
    assert (line.folder / "out").is_symlink()
    assert_holds(line.folder / "real", line.weights[1])


def test_folders_above_are_made(line: Line) -> None:
    line.pull(1, "a/b/c")
    assert_holds(line.folder / "a/b/c", line.weights[1])


def _full(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("x")


@pytest.mark.parametrize(("make", "said"), [(_full, "is not empty"), (Path.touch, "is no directory")])
def test_nothing_is_ever_overwritten(line: Line, make: Callable[[Path], None], said: str) -> None:
    make(line.folder / "out")
    with pytest.raises(InvalidRequest, match=said):
        line.pull(1)
    assert line.there() == ["out"]
    assert line.downloads() == []


def test_a_mount_point_cannot_be_replaced(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    (line.folder / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "out")
    with pytest.raises(InvalidRequest, match=r"mount point.*give a directory below it"):
        line.pull(1)


def test_the_root_is_no_place(line: Line) -> None:
    with pytest.raises(InvalidRequest, match="below it"):
        pull(line.store, line.made.policy, line.made.version(0), Path("/"))


def test_a_directory_that_was_filled_meanwhile_stays(line: Line) -> None:
    def tell(what: str) -> None:
        if what == "writing the checkpoint":
            _full(line.folder / "out")

    with pytest.raises(InvalidRequest, match="is not empty"):
        line.pull(1, tell=tell)
    assert (line.folder / "out" / "precious").read_text() == "x"


def test_an_interrupted_download_goes_on(line: Line) -> None:
    key = line.made.manifest(0).weights[0].key
    line.store.add(Fault(call="download", kind=Kind.CUT, key=key, at=1000))
    with pytest.raises(Unavailable):
        line.pull(1)
    assert line.there() == [".out.stitch-pull"]
    assert scratch_of(line.folder / "out") == line.folder / ".out.stitch-pull"
    parts = [path.stat().st_size for path in line.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert 1000 in parts
    pulled = line.pull(1)
    whole = sum(file.size for number in (0, 1) for file in line.made.manifest(number).weights)
    assert pulled.bytes_downloaded <= whole - 1000
    assert_holds(line.folder / "out", line.weights[1])
    assert line.there() == ["out"]


def test_after_a_crash_before_the_rename_nothing_is_downloaded_again(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def crash(path: Path, target: Path) -> Path:
        if Path(target).name == "out":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        line.pull(3)
    monkeypatch.undo()
    assert not (line.folder / "out").exists()
    assert line.pull(3).bytes_downloaded == 0
    assert_holds(line.folder / "out", line.weights[3])


def test_another_version_may_follow_an_interrupted_one(line: Line) -> None:
    with pytest.raises(StagingCancelled):
        line.pull(3, cancelled=lambda: bool(line.downloads()))
    line.pull(1)
    assert_holds(line.folder / "out", line.weights[1])


def test_two_at_once_are_told_apart(line: Line) -> None:
    with Staging(scratch_of(line.folder / "out") / "staging", line.store), pytest.raises(InvalidRequest, match="another process"):
        line.pull(1)


def test_a_damaged_object_is_named_and_no_directory_appears(line: Line) -> None:
    key = line.made.manifest(1).weights[0].key
    line.store.add(Fault(call="download", kind=Kind.FLIP, key=key, at=99, times=5))
    with pytest.raises(CorruptObject, match=r"r1/weight_v000001: delta\.safetensors: object "):
        line.pull(1)
    assert not (line.folder / "out").exists()


def test_shards_need_room(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "SPARE_BYTES", 1 << 62)
    with pytest.raises(NotEnoughSpace, match="shards need"):
        line.pull(1, max_shard_bytes=1200)
    assert not (line.folder / "out").exists()
