"""The hook on four ranks, as Slime calls it: all of them succeed, or all raise the same, and none waits for one that failed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from stitch.weights.safetensors import write_checkpoint
from tests.support.provision import start
from tests.trainer.places import POLICY, Place, same
from tests.trainer.slime_model import model, smaller

pytestmark = [pytest.mark.integration, pytest.mark.torch]

ROOT = Path(__file__).parents[2]
RANKS = 4
PATIENCE_S = 240.0


def run_ranks(folder: Path, place: Place) -> list[list[str]]:
    """What each rank told. The environment speaks to rank 0 alone."""
    told = {"STITCH_LOG": place.log_url, "STITCH_STORE": place.store_url, "STITCH_POLICY": POLICY, "STITCH_RUN": "r1"}
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        start(
            [sys.executable, "-m", "tests.trainer.slime_rank", folder, str(rank), str(RANKS)],
            output=folder / f"rank-{rank}.log",
            cwd=ROOT,
            env={**common, **told} if rank == 0 else common,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            assert rank.process.wait(PATIENCE_S) == 0, [each.tail() for each in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_all_ranks_succeed_or_fail_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", model(0))
    place = Place.on_disk(tmp_path)
    told = run_ranks(tmp_path, place)
    assert [rank.pop() for rank in told] == [f"rank {rank}" for rank in range(RANKS)]
    assert all(rank == told[0] for rank in told), told
    first, second, cut, mended, away, back, full, less, nameless = told[0]
    assert (first, second, mended, back, full, less) == ("published",) * 6
    assert cut.startswith("CorruptObject: ")
    assert "model-00000-of-00002.safetensors" in cut
    assert away.startswith("Unavailable: ")
    assert nameless.startswith("InvalidRequest: ")
    assert "'No Name' is not a name" in nameless

    assert place.numbers() == [0, 1, 2, 3, 4, 5, 6]
    place.check_durable()
    place.check_pointers()
    for number in range(6):
        assert same(place.read_back(number)[0], model(number))
    assert same(place.read_back(6)[0], smaller(6))
