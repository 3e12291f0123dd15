"""The bytes of the version before, wherever they lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stitch.core.errors import InvalidRequest
from stitch.core.ids import Digest, StateDigest
from stitch.core.manifest import TensorSpec
from stitch.weights.digest import specs
from stitch.weights.encode import Encoded, encode_delta, encode_full, encode_sparse
from stitch.weights.previous import Previous, default_budget
from stitch.weights.safetensors import write_checkpoint
from stitch.weights.tensors import iterate
from tests.weights.versions import Weights, assert_same, changed, model

pytestmark = pytest.mark.unit

A, B = Digest("a" * 64), Digest("b" * 64)
BUDGETS = pytest.mark.parametrize("budget", [1 << 30, 0], ids=["memory", "file"])


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "previous"


def held(previous: Previous, weights: Weights) -> Weights:
    """All that is held of a model."""
    found = {spec.name: previous.tensor(spec) for spec in specs(iterate(weights))}
    return {name: tensor.array().copy() for name, tensor in found.items() if tensor is not None}


def full(previous: Previous, weights: Weights, folder: Path, digest: Digest = A) -> None:
    encoded = encode_full(weights, folder, max_shard_bytes=2000)
    previous.follow_full([file.source for file in encoded.weights], encoded.tensors, digest)


def follow(previous: Previous, encoded: Encoded, before: Weights, digest: Digest = B) -> None:
    old = {spec.name: spec for spec in specs(iterate(before))}
    previous.follow_delta(encoded.codec, [file.source for file in encoded.weights], old, encoded.tensors, digest)


@BUDGETS
def test_full_then_deltas(scratch: Path, tmp_path: Path, budget: int) -> None:
    previous = Previous(scratch, budget)
    full(previous, model(), tmp_path / "0")
    assert_same(held(previous, model()), model())
    one, two = changed(model(), "embed", "mask"), changed(model(), "layer.1", seed=2)
    follow(previous, encode_sparse(one, specs(iterate(model())), previous.tensor, tmp_path / "1"), model())
    assert previous.digest == B
    assert_same(held(previous, one), one)
    follow(previous, encode_delta(two, specs(iterate(one)), tmp_path / "2"), one, A)
    assert_same(held(previous, two), two)
    full(previous, one, tmp_path / "3", B)
    assert_same(held(previous, one), one)
    previous.close()
    assert previous.digest is None
    assert not scratch.exists()


@BUDGETS
def test_a_directory_is_copied_once_it_must_move_on(scratch: Path, tmp_path: Path, budget: int) -> None:
    base = tmp_path / "base"
    write_checkpoint(base, model(), max_shard_bytes=2000)
    content = {path.name: path.read_bytes() for path in base.iterdir()}
    previous = Previous(scratch, budget)
    previous.map_directory(base, A)
    after = changed(model(), "embed")
    follow(previous, encode_sparse(after, specs(iterate(model())), previous.tensor, tmp_path / "1"), model())
    assert {path.name: path.read_bytes() for path in base.iterdir()} == content
    assert_same(held(previous, after), after)


def test_a_directory_is_believed_tensor_by_tensor(scratch: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", changed(model(), "mask"))
    previous = Previous(scratch, 0)
    previous.map_directory(tmp_path / "base", A)
    assert held(previous, model()).keys() == model().keys() - {"mask"}


@BUDGETS
def test_a_version_copied_in_passing(scratch: Path, tmp_path: Path, budget: int) -> None:
    previous = Previous(scratch, budget)
    full(previous, model(), tmp_path / "0")
    after = changed(model(), "embed")
    filling = previous.fill([(spec.name, spec.dtype, spec.shape) for spec in specs(iterate(after))])
    assert filling is not None
    for tensor in iterate(after):
        filling.put(tensor)
    assert_same(held(previous, model()), model())
    previous.adopt(filling, B)
    assert previous.digest == B
    assert_same(held(previous, after), after)
    other = next(iterate({"other": np.zeros(3)}))
    with pytest.raises(InvalidRequest, match="'other'"):
        filling.put(other)


def test_what_a_rank_did_not_give_is_let_go(scratch: Path, tmp_path: Path) -> None:
    """It may have moved on elsewhere."""
    previous = Previous(scratch, 1 << 30)
    full(previous, model(), tmp_path / "0")
    share = [spec for spec in specs(iterate(model())) if spec.name.startswith("layer")]
    before: dict[str, TensorSpec] = {spec.name: spec for spec in specs(iterate(model()))}
    previous.follow_delta(encode_sparse({}, [], previous.tensor, tmp_path / "1").codec, [], before, share, B)
    assert held(previous, model()).keys() == {"layer.0", "layer.1"}


def test_wrong_bytes_are_told_and_let_go(scratch: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    previous = Previous(scratch, 1 << 30)
    full(previous, model(), tmp_path / "0")
    encoded = encode_sparse(changed(model(), "embed"), specs(iterate(model())), previous.tensor, tmp_path / "1")
    wrong = [
        TensorSpec(name=s.name, dtype=s.dtype, shape=s.shape, state=StateDigest("0" * 16) if s.name == "embed" else s.state)
        for s in encoded.tensors
    ]
    before = {spec.name: spec for spec in specs(iterate(model()))}
    previous.follow_delta(encoded.codec, [file.source for file in encoded.weights], before, wrong, B)
    assert previous.doubted
    assert previous.digest is None
    assert "'embed' came to the state digest" in caplog.text
    full(previous, model(), tmp_path / "2")
    assert not previous.doubted


def test_without_room_nothing_is_held(scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert Previous(scratch, 0).fill([("a", "F32", (10_000,))]) is None
    assert "1000 are free" in caplog.text


def test_a_budget_is_a_part_of_the_memory() -> None:
    assert 0 < default_budget(8) <= default_budget() // 8 + 8
