"""The hooks for Slime and Miles, called as they call them, with the environment as a user sets it."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stitch.core.errors import CorruptObject, Fenced, InvalidRequest, OutcomeUnknown, Unavailable, VersionConflict
from stitch.core.manifest import Codec, Kind
from stitch.log.faulty import Fault as LogFault
from stitch.log.faulty import FaultyLog, script
from stitch.log.port import Stream
from stitch.store.faulty import ALWAYS, Fault
from stitch.store.faulty import Kind as FaultKind
from stitch.store.opening import open_store
from stitch.trainer import miles, slime
from stitch.trainer.hook_settings import REQUIRED
from stitch.weights.safetensors import write_checkpoint
from tests.support import slime_writer as writer
from tests.trainer.places import POLICY, Place, same
from tests.trainer.slime_model import fail_by, model

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
Hook = Callable[[Any, str, Any], None]


class Engines:
    """Whatever the trainer has: not to be touched."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"the hook touched an engine's {name}")


class Trainer:
    """What Slime or Miles does around the hook: it writes a version, calls the hook, and may delete the directory."""

    def __init__(self, folder: Path, hook: Hook, encoding: str = "xor", *, keep: bool = False) -> None:
        self.folder, self.hook, self.encoding, self.keep = folder / "updates", hook, encoding, keep
        self.folder.mkdir(exist_ok=True)
        hf_checkpoint = folder / "hf"
        if not hf_checkpoint.exists():
            write_checkpoint(hf_checkpoint, model(0))
            (hf_checkpoint / "config.json").write_text("{}")
        self.args = SimpleNamespace(hf_checkpoint=str(hf_checkpoint))

    def baseline(self) -> None:
        self.call(self.folder)

    def delta(self, version: int, before: int | None = None) -> Path:
        old = model(version - 1 if before is None else before)
        directory = writer.write_delta(self.folder, version, old, model(version), encoding=self.encoding)
        self.call(directory)
        return self._cleaned(directory)

    def full(self, version: int) -> Path:
        directory = writer.write_full(self.folder, version, model(version))
        self.call(directory)
        return self._cleaned(directory)

    def call(self, directory: Path) -> None:
        self.hook(self.args, str(directory), [Engines()])

    def _cleaned(self, directory: Path) -> Path:
        if not self.keep:
            shutil.rmtree(directory)
        return directory


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place.in_memory() if request.param == "memory" else Place.on_disk(tmp_path)


@pytest.fixture
def hook(request: pytest.FixtureRequest) -> Iterator[Hook]:
    """Slime's, unless a test says otherwise: they share all but their names."""
    module = getattr(request, "param", slime)
    yield module.publish
    module.close()


both_hooks = pytest.mark.parametrize("hook", [slime, miles], ids=["slime", "miles"], indirect=True)


@pytest.fixture(autouse=True)
def environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(place).items():
        monkeypatch.setenv(name, value)


def variables(place: Place, run: str = "r1") -> dict[str, str]:
    return {"STITCH_LOG": place.log_url, "STITCH_STORE": place.store_url, "STITCH_POLICY": POLICY, "STITCH_RUN": run}


def check(place: Place, numbers: list[int], run: str = "r1") -> None:
    assert place.numbers(run) == numbers
    place.check_durable()
    place.check_pointers()
    for number in numbers:
        tensors, files = place.read_back(number, run)
        assert same(tensors, model(number)), number
        assert files == {"config.json": b"{}"}


# --- as the trainers call it ---


@both_hooks
@pytest.mark.parametrize("encoding", writer.ENCODINGS)
def test_a_stream_of_deltas(place: Place, hook: Hook, encoding: str, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hook, encoding)
    trainer.baseline()
    check(place, [0])  # the first rollout is generated before the first update
    for version in (1, 2, 3):
        trainer.delta(version)
        check(place, list(range(version + 1)))
    manifests = [place.manifest(number) for number in range(4)]
    assert [manifest.kind for manifest in manifests] == [Kind.FULL, *[Kind.DELTA] * 3]
    assert {manifest.codec for manifest in manifests[1:]} == {Codec.SPARSE}
    assert sum(file.size for file in manifests[3].weights) < 1000
    assert manifests[3].metadata == {"trainer": hook.__module__.rpartition(".")[2], "directory": "weight_v000003"}


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_long_stream_gets_a_full_version_now_and_then(place: Place, hook: Hook, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hook)
    trainer.baseline()
    for version in range(1, 19):
        trainer.delta(version)
    kinds = [place.manifest(number).kind for number in range(19)]
    assert [number for number, kind in enumerate(kinds) if kind is Kind.FULL] == [0, 16]
    for number in (15, 16, 17, 18):
        assert same(place.read_back(number)[0], model(number))


def test_full_versions_then_deltas(place: Place, hook: Hook, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hook)
    for version in (1, 2):
        trainer.full(version)
    for version in (3, 4):
        trainer.delta(version)
    trainer.full(5)
    check(place, [0, 1, 2, 3, 4, 5])


def test_a_base_that_was_published_before_is_not_uploaded_again(place: Place, hook: Hook, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hook)
    with place.publisher() as pub:
        pub.publish(trainer.args.hf_checkpoint, number=0)
    with open_store(place.store_url) as store:
        before = {entry.key for entry in store.entries("")}
        trainer.baseline()
        assert {entry.key for entry in store.entries("")} == before
    trainer.delta(1)
    check(place, [0, 1])


def test_another_base_needs_another_run(place: Place, hook: Hook, tmp_path: Path) -> None:
    with place.publisher() as pub:
        pub.publish(model(5), number=0)
    with pytest.raises(VersionConflict, match=r"version 0 of run r1 has other weights.*another STITCH_RUN"):
        Trainer(tmp_path, hook).baseline()


def test_a_version_in_which_nothing_changed(place: Place, hook: Hook, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hook)
    trainer.baseline()
    trainer.call(writer.write_delta(trainer.folder, 1, model(0), model(0)))
    assert place.numbers() == [0, 1]
    assert same(place.read_back(1)[0], model(0))


def test_the_same_version_again_is_the_same_publication(place: Place, hook: Hook, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hook, keep=True)
    trainer.baseline()
    for directory in (trainer.delta(1), trainer.delta(2), trainer.full(3)):
        offset = place.policy().versions[max(place.policy().versions, key=lambda ref: ref.number)].position
        trainer.call(directory)
        assert place.policy().versions[max(place.policy().versions, key=lambda ref: ref.number)].position == offset
    check(place, [0, 1, 2, 3])


@pytest.mark.parametrize("path", ["stitch.trainer.slime.publish", "stitch.trainer.miles.publish"])
def test_it_is_found_by_its_dotted_path(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_a_process_that_ends_leaves_nothing_behind(place: Place, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, lambda *_: None, keep=True)
    trainer.delta(1)
    script = (
        "import sys; from types import SimpleNamespace; from stitch.trainer.slime import publish\n"
        "args = SimpleNamespace(hf_checkpoint=sys.argv[1])\n"
        "publish(args, sys.argv[2], []); publish(args, sys.argv[2] + '/weight_v000001', [])\n"
    )
    command = [sys.executable, "-c", script, trainer.args.hf_checkpoint, str(trainer.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    check(place, [0, 1])


# --- what goes wrong ---


def test_what_is_missing_is_named(place: Place, hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tmp_path, hook, keep=True)
    for name in REQUIRED:
        monkeypatch.delenv(name)
    with pytest.raises(InvalidRequest, match="STITCH_LOG, STITCH_STORE, STITCH_POLICY, STITCH_RUN"):
        trainer.baseline()
    for name, value in variables(place).items():
        with pytest.raises(InvalidRequest, match=f"needs .*{name}"):
            trainer.full(1) if not trainer.folder.joinpath("weight_v000001").exists() else trainer.call(
                trainer.folder / "weight_v000001"
            )
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STITCH_TAKE_OVER", "perhaps")
    with pytest.raises(InvalidRequest, match="STITCH_TAKE_OVER"):
        trainer.baseline()
    monkeypatch.delenv("STITCH_TAKE_OVER")
    monkeypatch.setenv("STITCH_PUBLISH_TIMEOUT", "-1")
    with pytest.raises(InvalidRequest, match="STITCH_PUBLISH_TIMEOUT"):
        trainer.baseline()
    monkeypatch.delenv("STITCH_PUBLISH_TIMEOUT")
    trainer.args.hf_checkpoint = "Qwen/Qwen3-0.6B"
    with pytest.raises(InvalidRequest, match=r"Qwen/Qwen3-0\.6B"):
        trainer.baseline()
    place.publisher().close()
    assert place.numbers() == []


def test_a_trainer_that_counts_from_one_again_is_told_what_to_do(
    place: Place, hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tmp_path, hook)
    trainer.baseline()
    trainer.delta(1)
    trainer.delta(2)
    slime.close()

    with pytest.raises(VersionConflict, match=r"up to 2 .*another STITCH_RUN, and with STITCH_TAKE_OVER=1"):
        trainer.baseline()
    directory = writer.write_full(trainer.folder, 1, model(9))
    with pytest.raises(VersionConflict, match=r"another STITCH_RUN, and with STITCH_TAKE_OVER=1"):
        trainer.call(directory)
    shutil.rmtree(directory)
    slime.close()

    monkeypatch.setenv("STITCH_RUN", "r2")
    with pytest.raises(Fenced, match="STITCH_TAKE_OVER=1"):
        trainer.baseline()
    monkeypatch.setenv("STITCH_TAKE_OVER", "1")
    trainer.baseline()
    trainer.delta(1)
    check(place, [0, 1], run="r2")
    assert place.numbers("r1") == [0, 1, 2]


def test_a_half_written_directory_publishes_nothing(place: Place, hook: Hook, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hook)
    trainer.baseline()
    directory = writer.write_delta(trainer.folder, 1, model(0), model(1))
    index = directory / writer.INDEX
    content = index.read_text()
    index.unlink()
    with pytest.raises(InvalidRequest, match="still being written"):
        trainer.call(directory)
    index.write_text(content[:-1])
    with pytest.raises(CorruptObject, match="not readable"):
        trainer.call(directory)
    assert place.numbers() == [0]
    index.write_text(content)
    trainer.call(directory)
    check(place, [0, 1])


def test_a_delta_against_another_base_is_refused(place: Place, hook: Hook, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hook)
    trainer.baseline()
    with pytest.raises(CorruptObject, match="xxh3-128 after the change"):
        trainer.delta(1, before=5)
    shutil.rmtree(trainer.folder / "weight_v000001")
    with pytest.raises((InvalidRequest, VersionConflict), match=r"version 1\b"):
        trainer.delta(2)
    shutil.rmtree(trainer.folder / "weight_v000002")
    trainer.delta(1)
    trainer.delta(2)
    check(place, [0, 1, 2])


def test_a_store_that_is_away_is_waited_for_until_the_deadline(
    place: Place, hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = fail_by(monkeypatch)
    trainer = Trainer(tmp_path, hook, keep=True)
    trainer.baseline()
    slime.close()
    monkeypatch.setenv("STITCH_PUBLISH_TIMEOUT", "1.5")
    faults.append(Fault(call="put", kind=FaultKind.FAIL_BEFORE, times=ALWAYS))
    with pytest.raises(Unavailable):
        trainer.delta(1)
    assert place.numbers() == [0]
    faults.clear()
    slime.close()
    trainer.call(trainer.folder / "weight_v000001")
    check(place, [0, 1])


@pytest.mark.parametrize("place", ["memory"], indirect=True)
@pytest.mark.parametrize("fault", [LogFault.HOLD, LogFault.LOSE, LogFault.MUTE])
def test_an_unknown_outcome_is_settled_by_the_same_call_again(
    place: Place, hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: LogFault
) -> None:
    log = FaultyLog(place.memory_log())
    fail_by(monkeypatch, log)
    monkeypatch.setenv("STITCH_PUBLISH_TIMEOUT", "1")
    trainer = Trainer(tmp_path, hook, keep=True)
    trainer.baseline()
    log.plan(lambda stream, _: fault if stream is Stream.PUBLICATIONS else LogFault.NONE)
    if fault is LogFault.MUTE:
        directory = trainer.delta(1)  # it is read back, whatever the acknowledgement
    else:
        with pytest.raises(OutcomeUnknown):
            trainer.delta(1)
        directory = trainer.folder / "weight_v000001"
    log.plan(script())
    asyncio.run(log.release())
    trainer.call(directory)
    trainer.delta(2)
    check(place, [0, 1, 2])


def test_an_index_that_lies_is_not_believed(place: Place, hook: Hook, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, hook)
    trainer.baseline()
    directory = writer.write_delta(trainer.folder, 1, model(0), model(1))
    index = json.loads((directory / writer.INDEX).read_text())
    del index["metadata"]["delta_encoding"]
    (directory / writer.INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptObject, match="frames of a delta"):
        trainer.call(directory)
    assert place.numbers() == [0]
