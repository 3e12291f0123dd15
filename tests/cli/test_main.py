"""The command's manners: one-line errors, exit codes, the trace only when asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import stitch
from tests.support.engines import reference_models

pytestmark = pytest.mark.integration


def _places(folder: Path) -> list[str]:
    return ["--log", f"sqlite://{folder / 'log.db'}", "--store", f"file://{folder / 'store'}", "--policy", "math"]


def test_help_names_every_command() -> None:
    told = stitch("--help").stdout
    for command in ("demo", "gateway", "replica", "engine", "publish", "status", "log", "topics"):
        assert f"  {command} " in told


def test_publish_status_and_log_tail_tell_one_story(tmp_path: Path) -> None:
    models = reference_models(tmp_path, (1, 2))
    places = _places(tmp_path)
    for number, model in enumerate(models):
        row = json.loads(stitch("publish", str(model), "--run", "r1", "--json", *places).stdout)
        assert row["number"] == number
    told = json.loads(stitch("status", "--json", *places[:2]).stdout)
    assert told["policies"][0]["channels"] == {"latest": "r1/weight_v000001"}
    rows = [json.loads(line) for line in stitch("log", "tail", "--json", *places[:2]).stdout.splitlines()]
    assert [row["type"] for row in rows] == ["RunClaimed", "VersionPublished", "RunClaimed", "VersionPublished"]
    assert {row["verdict"] for row in rows} == {"accepted"}


def test_an_error_is_one_line_and_debug_gives_the_trace(tmp_path: Path) -> None:
    (model,) = reference_models(tmp_path, (1,))
    done = stitch("publish", str(model), "--run", "No Name", *_places(tmp_path), check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("stitch: run: 'No Name' is not a name")
    traced = stitch("--debug", "publish", str(model), "--run", "No Name", *_places(tmp_path), check=False)
    assert "Traceback" in traced.stderr


def test_a_fenced_publish_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    (model,) = reference_models(tmp_path, (1,))
    stitch("publish", str(model), "--run", "r1", *_places(tmp_path))
    done = stitch("publish", str(model), "--run", "r2", *_places(tmp_path), check=False)
    assert done.returncode == 4
    assert "r1" in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [("nowhere", "not a URL"), ("ftp://x", "unknown scheme"), ("sqlite://", "path of a file")],
)
def test_a_wrong_log_url_says_what_is_right(url: str, said: str) -> None:
    done = stitch("status", "--log", url, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_option_is_a_usage_error() -> None:
    done = stitch("status", check=False, env={"STITCH_LOG": ""})
    assert done.returncode == 2
    assert "--log" in done.stderr
