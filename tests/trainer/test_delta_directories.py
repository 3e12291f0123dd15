"""Directories of Slime and Miles that hold what changed, published as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stitch.core.anchors import ANCHOR_EVERY
from stitch.core.errors import CorruptObject, InvalidRequest, OutcomeUnknown, VersionConflict
from stitch.core.manifest import Codec, Kind
from stitch.log.faulty import Fault, FaultyLog, script
from stitch.log.port import Stream
from stitch.weights.safetensors import write_checkpoint
from tests.support.slime_writer import write_delta
from tests.trainer.places import Place, Weights, same

pytestmark = pytest.mark.integration

SHORT = 0.5
"""A deadline that is meant to pass."""


def model(step: int, seed: int = 0) -> Weights:
    out: Weights = {}
    for index in range(5):
        data = np.random.default_rng(seed + index).standard_normal(999 + index).astype(np.float32)
        data[step % 7 :: 40] += np.float32(step * (index % 3))
        out[f"layer.{index}"] = data.astype(ml_dtypes.bfloat16)
    return out


def delta(root: Path, step: int, **form: Any) -> Path:
    return write_delta(root, step, model(step - 1), model(step), **form)


@pytest.fixture
def place() -> Place:
    return Place.in_memory()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "base", model(0), max_shard_bytes=4000)
    (tmp_path / "base" / "config.json").write_text('{"model_type": "tiny"}')
    return tmp_path / "base"


def check(place: Place, number: int) -> None:
    tensors, files = place.read_back(number)
    assert same(tensors, model(number))
    assert files == {"config.json": b'{"model_type": "tiny"}'}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_versions_follow_the_directories(place: Place, base: Path, tmp_path: Path, encoding: str, checksum: str) -> None:
    with place.publisher(base=base) as pub:
        for step in (1, 2, 3):
            done = pub.publish(str(delta(tmp_path, step, encoding=encoding, checksum=checksum)))
            assert (done.ref.number, done.kind) == (step, Kind.DELTA)
            shutil.rmtree(tmp_path / f"weight_v{step:06d}")
    assert place.manifest(3).codec is Codec.SPARSE
    for number in range(4):
        check(place, number)
    place.check_durable()


@pytest.mark.parametrize("memory_budget", [None, 0])
def test_another_life_brings_the_bytes_of_the_tip(place: Place, base: Path, tmp_path: Path, memory_budget: int | None) -> None:
    scratch = tmp_path / "scratch"
    for step in (1, 2, 3):
        with place.publisher(base=base if step == 1 else None, memory_budget=memory_budget, scratch=scratch) as pub:
            done = pub.publish(delta(tmp_path, step))
            assert pub.publish(tmp_path / f"weight_v{step:06d}") == done, "once more, as after a lost answer"
        assert list(scratch.iterdir()) == []
        shutil.rmtree(tmp_path / f"weight_v{step:06d}")
        shutil.rmtree(base, ignore_errors=True)
    assert place.numbers() == [0, 1, 2, 3]
    for number in range(4):
        check(place, number)


def test_a_delta_against_another_version_is_refused(place: Place, base: Path, tmp_path: Path) -> None:
    with place.publisher(base=base) as pub:
        with pytest.raises(InvalidRequest, match=r"against version 1, and run r1 stands at r1/weight_v000000"):
            pub.publish(delta(tmp_path, 2))
        pub.publish(delta(tmp_path, 1))
        with pytest.raises(InvalidRequest, match=r"against version 2"):
            pub.publish(delta(tmp_path, 3))
        assert pub.publish(tmp_path / "weight_v000002").ref.number == 2
    with Place.in_memory().publisher() as pub, pytest.raises(InvalidRequest, match="has no version yet"):
        pub.publish(tmp_path / "weight_v000001")


def test_the_same_directory_again_is_that_publication(place: Place, base: Path, tmp_path: Path) -> None:
    with place.publisher(base=base) as pub:
        done = pub.publish(delta(tmp_path, 1))
        assert pub.publish(tmp_path / "weight_v000001") == done
        other = write_delta(tmp_path / "other", 1, model(0), model(5))
        with pytest.raises(VersionConflict, match="published with other weights"):
            pub.publish(other)
        assert pub.publish(delta(tmp_path, 2)).kind is Kind.DELTA
    assert place.numbers() == [0, 1, 2]
    check(place, 2)


def test_an_unknown_outcome_is_asked_for_again(place: Place, base: Path, tmp_path: Path) -> None:
    log = FaultyLog(place.memory_log())
    with place.publisher(base=base, log=log) as pub:
        log.plan(lambda stream, draft: Fault.LOSE if stream is Stream.PUBLICATIONS else Fault.NONE)
        with pytest.raises(OutcomeUnknown):
            pub.publish(delta(tmp_path, 1), timeout=SHORT)
        log.plan(script())
        assert pub.publish(tmp_path / "weight_v000001").ref.number == 1
        assert pub.publish(delta(tmp_path, 2)).ref.number == 2
    for number in range(3):
        check(place, number)


def test_anchors_are_made_of_deltas_too(place: Place, base: Path, tmp_path: Path) -> None:
    with place.publisher(base=base) as pub:
        full = pub.publish(delta(tmp_path, 1), kind="full")
        assert full.kind is Kind.FULL
        for step in range(2, ANCHOR_EVERY + 3):
            last = pub.publish(delta(tmp_path, step))
        assert last.kind is Kind.DELTA
    kinds = [place.manifest(number).kind for number in place.numbers()]
    anchors = [number for number, kind in enumerate(kinds) if kind is Kind.FULL]
    assert anchors[:2] == [0, 1]
    assert len(anchors) == 3
    for number in (*anchors, anchors[2] + 1, max(place.numbers())):
        check(place, number)


def test_a_delta_of_another_model_is_refused_by_name(place: Place, base: Path, tmp_path: Path) -> None:
    with place.publisher(base=base) as pub:
        with pytest.raises(CorruptObject, match=r"layer\.1"):
            pub.publish(write_delta(tmp_path / "a", 1, model(0, seed=50), model(1, seed=50)))
        strange = {"other": np.zeros(5, np.float32)}
        with pytest.raises(InvalidRequest, match="'other' is not in version 0"):
            pub.publish(write_delta(tmp_path / "b", 1, strange, {"other": np.ones(5, np.float32)}))
        folder = delta(tmp_path / "c", 1)
        (folder / "model.safetensors.index.json").unlink()
        with pytest.raises(InvalidRequest, match="still being written"):
            pub.publish(folder)
        assert pub.publish(delta(tmp_path, 1)).ref.number == 1
    assert place.manifest(1).codec is Codec.SPARSE
    check(place, 1)
