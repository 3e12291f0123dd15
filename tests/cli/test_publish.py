"""`stitch publish` as a script meets it: what becomes a version, what is refused and by which words, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch.log.faulty import Fault, FaultyLog
from stitch.log.opening import open_log
from stitch.log.port import Draft, EventLog, Stream
from stitch.trainer import opening
from stitch.weights.safetensors import write_checkpoint
from tests.operators.published import CONFIG, Weights, model, stepped
from tests.support import slime_writer
from tests.support.commands import Said, command

pytestmark = pytest.mark.integration


class Place:
    """An empty log and store, and checkpoint directories to publish."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_url = f"sqlite://{folder / 'log.db'}"
        self.places = ("--log", self.log_url, "--store", f"file://{folder / 'store'}", "--policy", "p")

    def directory(self, name: str, weights: Mapping[str, Any]) -> Path:
        path = self.folder / name
        write_checkpoint(path, weights)
        (path / "config.json").write_bytes(CONFIG)
        return path

    def publish(self, directory: Path, *options: object, run: str = "r1") -> Said:
        return command("publish", directory, "--run", run, "--json", *options, *self.places)

    def pulled(self, version: str) -> Weights:
        """The bytes of a version's tensors, as uint8."""
        from safetensors.numpy import load_file

        target = self.folder / f"pulled-{version.replace('/', '-')}"
        told = command("pull", version, target, *self.places)
        assert told.code == 0, told.err
        return dict(load_file(target / "model.safetensors"))

    def tip(self) -> str | None:
        status = command("status", "--json", "--log", self.log_url)
        tip: str | None = status.json["policies"][0]["tip"]
        return tip


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def same(found: Weights, expected: Weights) -> bool:
    return {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in expected.items()}


# --- what becomes a version ----------------------------------------------------------------------------------------------------


def test_directories_one_after_the_other(place: Place) -> None:
    old, new = model(), stepped(model())
    first, second = place.publish(place.directory("a", old)), place.publish(place.directory("b", new))
    assert (first.code, second.code) == (0, 0)
    assert [said.json["kind"] for said in (first, second)] == ["full", "delta"]
    assert [said.json["number"] for said in (first, second)] == [0, 1]
    assert same(place.pulled("latest"), new)


def test_a_new_run_begins_with_a_base(place: Place) -> None:
    old, new = model(), stepped(model())
    told = place.publish(place.directory("b", new), "--base", place.directory("a", old))
    assert told.code == 0, told.err
    assert (told.json["number"], told.json["kind"]) == (1, "delta")
    diff = command("diff", "0", "1", "--json", *place.places).json
    assert diff["way"] == "delta", "the base was at hand, so the delta holds what changed in each tensor"
    assert same(place.pulled("0"), old)
    again = place.publish(place.folder / "b", "--base", place.folder / "a", "--number", "1")
    assert again.json == {**told.json, "offset": again.json["offset"]}


def test_a_base_that_is_not_what_the_run_began_with(place: Place) -> None:
    place.publish(place.directory("b", stepped(model())), "--base", place.directory("a", model()))
    told = place.publish(place.folder / "b", "--base", place.directory("c", model(9)), "--boot-version", "0")
    assert told.code == 1
    assert told.err.count("\n") == 1


def test_a_person_is_told_in_one_line(place: Place) -> None:
    told = command("publish", place.directory("a", model()), "--run", "r1", *place.places)
    assert told.out.startswith("published r1/weight_v000000 of policy p: full, ")
    assert told.err == ""


def test_boot_version_abandons_what_lies_beyond(place: Place) -> None:
    weights = [model(seed) for seed in range(3)]
    for seed in (0, 1):
        place.publish(place.directory(f"d{seed}", weights[seed]))
    told = place.publish(place.directory("d2", weights[2]), "--boot-version", "0")
    assert told.json["number"] == 2
    renamed = place.publish(place.folder / "d2", "--boot-version", "r1/weight_v000002", "--take-over", run="r2")
    assert renamed.json["version"] == "r2/weight_v000001"


def test_versions_as_slime_writes_them(place: Place) -> None:
    old = {"w": np.arange(300, dtype=np.float32), "b": np.ones(7, np.float32)}
    new = {**old, "w": old["w"] * np.float32(1.5)}
    full = slime_writer.write_full(place.folder / "rollout", 0, old)
    delta = slime_writer.write_delta(place.folder / "rollout", 1, old, new)
    assert place.publish(full).json["number"] == 0
    told = place.publish(delta)
    assert told.code == 0, told.err
    assert (told.json["number"], told.json["kind"]) == (1, "delta")
    assert same(place.pulled("1"), new)
    (delta / slime_writer.INDEX).unlink()
    half = place.publish(delta)
    assert (half.code, half.err.count("\n")) == (1, 1)
    assert place.tip() == "r1/weight_v000001"


# --- what is refused -----------------------------------------------------------------------------------------------------------


def _renamed(weights: Weights) -> Weights:
    return {("layers.0.w" if name == "layers.0.weight" else name): array for name, array in weights.items()}


def _missing(weights: Weights) -> Weights:
    return {name: array for name, array in weights.items() if name != "layers.0.weight"}


def _extra(weights: Weights) -> Weights:
    return {**weights, "layers.9.weight": np.zeros(3, np.float32)}


def _reshaped(weights: Weights) -> Weights:
    return {**weights, "layers.0.weight": weights["layers.0.weight"].T.copy()}


def _recast(weights: Weights) -> Weights:
    return {**weights, "layers.0.weight": weights["layers.0.weight"].astype(np.float32)}


def _other(weights: Weights) -> Weights:
    return {"blocks.0.attn": np.zeros((4, 4), np.float32), "blocks.1.attn": np.zeros((4, 4), np.float32)}


STRANGE = pytest.mark.parametrize(
    ("strange", "tensor"),
    [
        (_renamed, "layers.0.w"),
        (_missing, "layers.0.weight"),
        (_extra, "layers.9.weight"),
        (_reshaped, "layers.0.weight"),
        (_recast, "layers.0.weight"),
        (_other, "blocks.0.attn"),
    ],
)


@STRANGE
def test_a_delta_of_another_form_is_refused_by_its_tensor(place: Place, strange: Callable[[Weights], Weights], tensor: str) -> None:
    place.publish(place.directory("a", model()))
    told = place.publish(place.directory("b", strange(stepped(model()))), "--kind", "delta")
    assert told.code == 1
    assert f"tensor '{tensor}'" in told.err
    assert "kind='full'" in told.err
    assert told.err.count("\n") == 1
    assert place.tip() == "r1/weight_v000000"


@STRANGE
def test_left_to_itself_it_becomes_a_full_version(place: Place, strange: Callable[[Weights], Weights], tensor: str) -> None:
    """A model may grow within a run. Nobody builds another form on the old bytes: the version needs no base."""
    changed = strange(stepped(model()))
    place.publish(place.directory("a", model()))
    told = place.publish(place.directory("b", changed))
    assert told.code == 0, told.err
    assert told.json["kind"] == "full"
    assert same(place.pulled("latest"), changed)
    diff = command("diff", "0", "1", *place.places)
    assert diff.code == 0, diff.err
    assert tensor in diff.out


def test_a_slime_delta_of_another_model_is_refused_by_its_tensor(place: Place) -> None:
    old = {"w": np.arange(300, dtype=np.float32)}
    other = {"x": np.arange(300, dtype=np.float32)}
    place.publish(slime_writer.write_full(place.folder / "rollout", 0, old))
    told = place.publish(slime_writer.write_delta(place.folder / "other", 1, other, {"x": other["x"] + 1}))
    assert told.code == 1
    assert "tensor 'x'" in told.err


def test_a_directory_that_is_not_whole(place: Place) -> None:
    (place.folder / "empty").mkdir()
    told = place.publish(place.folder / "empty")
    assert (told.code, told.err.count("\n")) == (1, 1)
    assert "holds neither model.safetensors nor model.safetensors.index.json" in told.err
    sharded = place.folder / "sharded"
    write_checkpoint(sharded, model(), 1200)
    next(sharded.glob("model-00002-*")).unlink()
    told = place.publish(sharded)
    assert (told.code, told.err.count("\n")) == (1, 1)
    assert "shard model-00002-of-" in told.err
    cut = place.directory("cut", model()) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-5])
    told = place.publish(place.folder / "cut")
    assert (told.code, told.err.count("\n")) == (1, 1)
    assert "model.safetensors" in told.err
    assert place.publish(place.folder / "nowhere").code == 2


def test_a_number_that_is_taken(place: Place) -> None:
    place.publish(place.directory("a", model()), "--number", "5")
    told = place.publish(place.directory("b", model(1)), "--number", "5")
    assert (told.code, told.err.count("\n")) == (1, 1)
    assert place.publish(place.folder / "b", "--number", "4").code == 1
    assert place.publish(place.folder / "a", "--number", "5").code == 0, "the same weights are that publication"


# --- exit codes ----------------------------------------------------------------------------------------------------------------


def test_another_run_owns_the_policy(place: Place) -> None:
    place.publish(place.directory("a", model()))
    told = place.publish(place.folder / "a", run="r2")
    assert told.code == 4
    assert "r1" in told.err
    assert told.err.count("\n") == 1
    assert place.publish(place.folder / "a", "--take-over", run="r2").code == 0
    assert place.publish(place.folder / "a").code == 4, "a superseded run never publishes again"


def test_an_unknown_outcome_is_settled_by_the_same_command(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = place.directory("a", model())
    appended: list[Stream] = []

    def plan(stream: Stream, draft: Draft) -> Fault:
        if stream is not Stream.PUBLICATIONS:
            return Fault.NONE
        appended.append(stream)
        return Fault.NONE if len(appended) == 1 else Fault.LOSE

    def losing(url: str) -> EventLog:
        return FaultyLog(open_log(url), plan)

    monkeypatch.setattr(opening, "open_log", losing)
    told = place.publish(directory, "--timeout", "5")  # in which even a slow disk takes all that comes before
    assert told.code == 3, told.err
    assert told.err.splitlines()[-1].startswith("stitch: ")
    monkeypatch.undo()
    again = place.publish(directory)
    assert again.code == 0, again.err
    assert again.json["number"] == 0


def test_debug_shows_the_trace(place: Place) -> None:
    told = command("--debug", "publish", place.folder, "--run", "No Name", *place.places)
    assert told.code == 1
    assert "Traceback" in told.err


def test_given_the_version_before_a_delta_holds_what_changed(place: Place) -> None:
    old, new = model(), stepped(model())
    before, after = place.directory("a", old), place.directory("b", new)
    place.publish(before)
    told = place.publish(after, "--previous", before)
    assert told.code == 0, told.err
    assert told.json["kind"] == "delta"
    assert command("diff", "0", "1", "--json", *place.places).json["way"] == "delta"
    assert same(place.pulled("latest"), new)


def test_another_directory_than_the_version_before_is_said_and_of_no_use(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    old, new = model(), stepped(model())
    place.publish(place.directory("a", old))
    other = place.directory("c", model(9))
    told = place.publish(place.directory("b", new), "--previous", other)
    assert told.code == 0, told.err
    assert f"{other} does not hold the weights of r1/weight_v000000" in caplog.text
    assert same(place.pulled("latest"), new)


def test_the_version_before_must_be_a_checkpoint(place: Place, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    told = place.publish(place.directory("a", model()), "--previous", tmp_path / "empty")
    assert told.code == 1
    assert "holds neither model.safetensors nor" in told.err


def test_json_holds_what_a_script_needs(place: Place) -> None:
    row = json.loads(place.publish(place.directory("a", model())).out)
    assert row.keys() == {"version", "number", "kind", "manifest_key", "weights_digest", "bytes_written", "offset"}
