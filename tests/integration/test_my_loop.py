"""The example of a training loop of one's own runs as its docstring says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, stitch

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_loop.py"
LOOP_SECONDS = 240.0


def test_the_example_learns_in_under_a_hundred_lines(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 100
    base = tmp_path / "base"
    stitch("engine", "reference", "--init", str(base), "--seed", "1")
    with Cluster(tmp_path) as cluster:
        gateway = cluster.start("gateway", ["gateway", "--json", "--log", cluster.log, "--port", "0"])
        cluster.start(
            "replica",
            [
                "replica",
                "--json",
                "--log",
                cluster.log,
                "--store",
                cluster.store,
                "--policy",
                "mine",
                "--workdir",
                str(tmp_path / "w"),
            ],
        )
        done = subprocess.run(
            [
                sys.executable,
                EXAMPLE,
                "--log",
                cluster.log,
                "--store",
                cluster.store,
                "--gateway",
                gateway,
                "--base",
                base,
                *("--steps", "12"),
            ],
            capture_output=True,
            text=True,
            timeout=LOOP_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    steps = re.findall(r"step \d+: reward ([\d.]+), oldest version used (\d+), published my-run/weight_v(\d+)", done.stdout)
    assert len(steps) == 12
    rewards = [float(reward) for reward, _, _ in steps]
    assert sum(rewards[-3:]) / 3 > 1.5 * rewards[0]
    assert all(int(published) - int(oldest) <= 3 for _, oldest, published in steps)
