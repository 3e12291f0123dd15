"""Scratch folders: gone with their process, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stitch.store import scratch
from stitch.store.scratch import scratch_folder

pytestmark = pytest.mark.unit

HOLD = """
import sys
from stitch.store.scratch import scratch_folder
with scratch_folder("publish", sys.argv[1]) as folder:
    (folder / "shard").write_bytes(b"x" * 100)
    print(folder, flush=True)
    sys.stdin.read()
"""


def age(folder: Path) -> None:
    then = time.time() - 2 * scratch.YOUNG_S
    os.utime(folder, (then, then))


def test_a_folder_is_there_while_it_is_used(tmp_path: Path) -> None:
    with scratch_folder("publish", tmp_path / "new") as folder:
        assert folder.parent == tmp_path / "new"
        (folder / "shard").write_bytes(b"x")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.integration
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, living = (Path(((process.stdout and process.stdout.readline()) or "").strip()) for process in processes)
        processes[0].kill()
        processes[0].wait(60)
        with scratch_folder("publish", tmp_path):
            assert killed.is_dir(), "it may be about to be locked"
        age(killed)
        age(living)
        with scratch_folder("verify", tmp_path):
            assert killed.is_dir(), "another purpose's"
        with scratch_folder("publish", tmp_path):
            assert not killed.exists()
            assert (living / "shard").is_file()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_what_is_not_ours_is_left(tmp_path: Path) -> None:
    for name in ("stitch-publish-unlocked", "stitch-publish-theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / scratch.LOCK).touch()
    (tmp_path / "stitch-publish-link").symlink_to(tmp_path / "elsewhere")
    for found in list(tmp_path.iterdir()):
        age(found)
    before = sorted(tmp_path.iterdir())
    with scratch_folder("publish", tmp_path):
        pass
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "elsewhere" / scratch.LOCK).exists()
