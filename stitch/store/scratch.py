"""Folders of a process's own for bytes on their way. What a killed process left is removed by the next one of its kind."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

LOCK: Final = ".lock"
"""Held by the process that a folder belongs to, for as long as it lives."""
YOUNG_S: Final = 60.0
"""A folder that was touched so short a time ago may be one whose lock is about to be taken."""

_logger = logging.getLogger(__name__)


@contextmanager
def scratch_folder(purpose: str, parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder `stitch-<purpose>-…` below `parent` (default: the system's folder for such), removed in the end.

    Before, it removes those of the same purpose there that belong to this user and to no process any more: a publisher's may be as
    large as its model, and one that is killed again and again would fill the disk. Raises OSError.
    """
    home = Path(tempfile.gettempdir() if parent is None else parent)
    home.mkdir(parents=True, exist_ok=True)
    prefix = f"stitch-{purpose}-"
    for left in home.glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_if_left(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=home) as made, (Path(made) / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(made)


def _remove_if_left(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_S:
        return
    with (folder / LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _logger.info("removing %s, which a process that was killed left", folder)
        shutil.rmtree(folder, ignore_errors=True)
