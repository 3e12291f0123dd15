"""Each bench runs and tells what it is asked for. What it measures is not looked at: see the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench

PATIENCE_S = 300.0
KEYS = {
    "publish": {"publish_1gib_vs_s3transfer", "small_publish_ms_p50"},
    "download": {"download_1gib_vs_s3transfer"},
    "replay": {"replay_events_per_s", "vs_bare_aiokafka"},
    "start": {"gateway_ready_s", "replica_ready_s"},
}
SERVER = {"publish": "s3", "download": "s3", "replay": "kafka", "start": "kafka"}
ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.mark.parametrize("name", [pytest.param(name, marks=getattr(pytest.mark, server)) for name, server in SERVER.items()])
def test_smoke(name: str) -> None:
    done = bench(name, "--small", "--json")
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) >= KEYS[name]


def test_a_name_that_is_none_lists_them() -> None:
    done = bench("no-such-bench")
    assert done.returncode == 2
    assert "publish" in done.stderr
