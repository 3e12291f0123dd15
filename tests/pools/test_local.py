"""Replicas as local processes: as many as asked for, and none left afterwards."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stitch.core.errors import Unavailable
from stitch.pools.children import Child
from stitch.pools.local import LocalPool
from stitch.trainer.publisher import Publisher
from tests.support import provision
from tests.support.cluster import status_report
from tests.support.engines import reference_models
from tests.support.processes import processes_with

pytestmark = pytest.mark.integration


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """By which everything that a test starts is found."""
    mark = f"pool-{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv("STITCH_TEST_MARK", mark)
    return mark


@pytest.fixture
async def pool(tmp_path: Path, mark: str) -> AsyncIterator[LocalPool]:
    (model,) = reference_models(tmp_path, (1,))
    log, store = f"sqlite://{tmp_path / 'log.db'}", f"file://{tmp_path / 'store'}"
    opened = await asyncio.to_thread(Publisher.open, policy="math", run="r1", log=log, store=store, base=model)
    await asyncio.to_thread(opened.close)
    options = ["--log", log, "--store", store, "--policy", "math", "--heartbeat", "0.5"]
    async with LocalPool(workdir=tmp_path / "pool", options=options) as pool:
        yield pool
    assert processes_with(mark) == []


async def _serving(tmp_path: Path) -> set[str]:
    report = await status_report(f"sqlite://{tmp_path / 'log.db'}")
    return {r["replica"] for r in report["replicas"] if r["phase"] == "serving" and not r["silent"]}


async def test_it_scales_up_and_down(pool: LocalPool, tmp_path: Path, mark: str) -> None:
    await pool.scale(2)
    await provision.eventually(lambda: _are(tmp_path, {"replica-0", "replica-1"}), "two replicas serve")
    assert len(processes_with(mark)) >= 4
    await pool.scale(1)
    await provision.eventually(lambda: _are(tmp_path, {"replica-0"}), "one replica serves")
    assert [m.exit_code is None for m in pool.members()] == [True, False]


async def _are(tmp_path: Path, expected: set[str]) -> bool:
    return await _serving(tmp_path) == expected


async def test_one_that_was_killed_leaves_no_engine_and_is_replaced(pool: LocalPool, tmp_path: Path, mark: str) -> None:
    await pool.scale(1)
    await provision.eventually(lambda: _are(tmp_path, {"replica-0"}), "a replica serves")
    await pool.kill(pool.members()[0].replica)
    await provision.eventually(lambda: processes_with(mark) == [], "its engine ended too")
    await pool.scale(1)
    await provision.eventually(lambda: _are(tmp_path, {"replica-1"}), "another replica serves")
    assert [m.replica for m in pool.members()] == ["replica-0", "replica-1"]


async def test_a_child_that_does_not_start_says_why(tmp_path: Path) -> None:
    script = "import sys; sys.exit('no such engine')"
    child = await Child.start("engine", [sys.executable, "-c", script], log=tmp_path / "child.log")
    with pytest.raises(Unavailable, match="no such engine"):
        await child.ready(30)
    await child.stop(1)
    assert child.exit_code == 1
