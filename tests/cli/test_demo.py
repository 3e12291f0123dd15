"""`stitch demo`, as the README's first command runs it, and on the real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import provision
from tests.support.cluster import status, stitch
from tests.support.processes import processes_with

DEMO_SECONDS = 300.0
"""Bound on a demo of some tens of steps on a busy machine; an idle one needs a tenth."""
STEPS = 30

KEYS = {
    "reward_first",
    "reward_last",
    "versions",
    "activations",
    "pause_ms_p50",
    "staleness_max",
    "answers",
    "wrong_version_answers",
    "constraint_violations",
    "replicas_added",
    "replicas_killed",
    "seconds",
}


def _run(*options: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = stitch("demo", "--json", *options, timeout=DEMO_SECONDS, env=env)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _holds(result: dict[str, Any], steps: int) -> None:
    assert set(result) == KEYS
    assert result["wrong_version_answers"] == 0
    assert result["constraint_violations"] == 0
    assert result["versions"] == steps + 1
    assert result["answers"] >= steps * 96
    assert (result["replicas_added"], result["replicas_killed"]) == (1, 1)
    assert result["activations"] >= steps
    assert result["staleness_max"] <= 3  # two allowed at admission, and one more that may be published while it runs


@pytest.mark.integration
def test_the_demo_learns_and_no_answer_lies(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    result = _run("--steps", str(STEPS), "--keep", str(keep))
    _holds(result, STEPS)
    assert result["reward_last"] >= 1.5 * result["reward_first"]
    told = status(f"sqlite://{keep / 'log.db'}")
    assert told["policies"][0]["tip"] == f"demo-1/weight_v{STEPS:06d}"
    assert {r["phase"] for r in told["replicas"]} >= {"left"}


@pytest.mark.integration
@pytest.mark.kafka
@pytest.mark.s3
def test_the_demo_on_kafka_and_s3(kafka_log_url: str, s3_store_url: str) -> None:
    result = _run("--steps", "9", "--log", kafka_log_url, "--store", s3_store_url)
    _holds(result, 9)


@pytest.mark.integration
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    mark = f"demo-{os.getpid()}-{tmp_path.name}"
    output = tmp_path / "demo.out"
    command = [sys.executable, "-m", "stitch", "demo", "--json", "--steps", "500"]
    demo = provision.start(command, output=output, name="demo", env={"STITCH_TEST_MARK": mark})
    provision.wait_until(lambda: "step " in output.read_text(), "the demo trains", timeout=DEMO_SECONDS, process=demo)
    assert len(processes_with(mark)) >= 6
    os.kill(demo.pid, signal.SIGINT)
    demo.process.wait(60)
    assert demo.process.returncode == 130
    provision.wait_until(lambda: not processes_with(mark), "all its processes ended", timeout=30)


@pytest.mark.integration
@pytest.mark.chaos
def test_killing_the_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    mark = f"demo-{os.getpid()}-{tmp_path.name}"
    output = tmp_path / "demo.out"
    command = [sys.executable, "-m", "stitch", "demo", "--json", "--steps", "500"]
    demo = provision.start(command, output=output, name="demo", env={"STITCH_TEST_MARK": mark})
    provision.wait_until(lambda: "step " in output.read_text(), "the demo trains", timeout=DEMO_SECONDS, process=demo)
    os.kill(demo.pid, signal.SIGKILL)
    demo.process.wait(60)
    provision.wait_until(lambda: not processes_with(mark), "all its processes ended", timeout=60)


@pytest.mark.unit
def test_a_folder_that_holds_something_is_not_kept_in(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    done = subprocess.run(
        [sys.executable, "-m", "stitch", "demo", "--keep", str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "not empty" in done.stderr
