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
    "publish_delta": {"wall_vs_encode", "peak_growth_vs_declared"},
    "download": {"download_1gib_vs_s3transfer"},
    "delta": {"size_vs_xor_zstd", "encode_vs_xor_zstd", "decode_vs_xor_zstd"},
    "replay": {"replay_events_per_s", "vs_bare_aiokafka"},
    "stage": {"one_delta_vs_rewrite", "one_delta_incremental_vs_rewrite", "thirty_vs_one"},
    "start": {"gateway_ready_s", "replica_ready_s"},
    "slime": {"size_vs_directory"},
}
# The server that a bench needs, where it needs one.
SERVER = {"publish": "s3", "publish_delta": "s3", "download": "s3", "replay": "kafka", "start": "kafka"}
ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [getattr(pytest.mark, SERVER[name])] if name in SERVER else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in KEYS])
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
