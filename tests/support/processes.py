"""Which processes a test's command left, by a mark that all of them inherit in their environment."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def processes_with(mark: str) -> list[int]:
    """Ids of the living processes, other than this one, whose environment holds STITCH_TEST_MARK=mark."""
    wanted = f"STITCH_TEST_MARK={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
