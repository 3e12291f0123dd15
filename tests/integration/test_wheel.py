"""A wheel, installed where there is nothing else, runs the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

INSTALL_SECONDS = 300.0
DEMO_SECONDS = 300.0


def _run(*command: str | Path, timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=timeout, check=False, env=environment, cwd="/"
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done


def test_a_wheel_in_an_empty_environment_runs_the_demo(tmp_path: Path) -> None:
    uv = shutil.which("uv")
    if uv is None:
        if os.environ.get("CI"):
            pytest.fail("uv is missing")
        pytest.skip("needs uv to build the wheel")
    checkout = Path(__file__).parents[2]
    _run(uv, "build", "--wheel", "--quiet", "--out-dir", tmp_path, checkout, timeout=INSTALL_SECONDS)
    (wheel,) = tmp_path.glob("stitch_rl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "stitch/schemas/version_published.v1.avsc" in names
    assert "stitch/py.typed" in names
    python = tmp_path / "empty" / "bin" / "python"
    _run(uv, "venv", "--quiet", "--python", "3.11", tmp_path / "empty", timeout=INSTALL_SECONDS)
    _run(uv, "pip", "install", "--quiet", "--python", python, wheel, timeout=INSTALL_SECONDS)
    told = _run(tmp_path / "empty" / "bin" / "stitch", "demo", "--steps", "6", "--json", timeout=DEMO_SECONDS)
    result = json.loads(told.stdout.splitlines()[-1])
    assert result["versions"] == 7
    assert result["wrong_version_answers"] == 0
