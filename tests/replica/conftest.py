from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.replica.world import World, unique_log


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A world over a log in memory."""
    made = World(tmp_path, unique_log())
    await made.begin()
    try:
        yield made
    finally:
        await made.end()


@pytest.fixture
async def sqlite_world(tmp_path: Path) -> AsyncIterator[World]:
    """A world over a log that other processes can share."""
    made = World(tmp_path, f"sqlite://{tmp_path / 'log.db'}")
    await made.begin()
    try:
        yield made
    finally:
        await made.end()
