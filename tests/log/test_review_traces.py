"""Traces of the protocol's review at the logs; docs/reliability.md lists where each of the others is held."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.log import sqlite_file

pytestmark = pytest.mark.unit


def test_part_2_sqlite_waits_for_the_disk_at_each_commit(tmp_path: Path) -> None:
    """With NORMAL, which is often advised beside a write-ahead journal, a power loss takes acknowledged records along (I7)."""
    connection = sqlite_file._connect(tmp_path / "log.db", "rwc", 1.0)
    try:
        (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
    finally:
        connection.close()
    assert synchronous == 2, "FULL"
