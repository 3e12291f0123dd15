"""What is particular to the directory: crashes, other processes, links, and the order of syncs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stitch.core.errors import InvalidRequest, Unavailable, VersionConflict
from stitch.store import directory
from stitch.store.directory import UPLOAD_TTL_S, DirectoryStore
from stitch.store.hashing import digest_bytes
from stitch.store.keys import RESERVED_SEGMENT

WAIT_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    return DirectoryStore(root)


def keys_of(store: DirectoryStore) -> list[str]:
    return [entry.key for entry in store.entries("")]


def uploads_in(root: Path) -> list[Path]:
    folder = root / RESERVED_SEGMENT
    return sorted(folder.iterdir()) if folder.exists() else []


class Children:
    """Python processes that end with the test."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(self, code: str, *arguments: object) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", code, *map(str, arguments)]
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._all.append(child)
        return child

    def end(self) -> None:
        for child in self._all:
            child.kill()
            child.communicate()


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.end()


HALF_WRITTEN = """
import sys, time
from pathlib import Path
from stitch.store import directory

def half(body):
    yield body[: len(body) // 2]
    sys.stdout.write("half\\n"); sys.stdout.flush()
    time.sleep(3600)

directory.body_chunks = half
directory.DirectoryStore(Path(sys.argv[1])).put("run/7.e1/x", b"w" * (4 << 20))
"""

LINKED = """
import os, sys, time
from pathlib import Path
from stitch.store import directory

link = os.link
def link_and_hang(*arguments, **options):
    link(*arguments, **options)
    sys.stdout.write("linked\\n"); sys.stdout.flush()
    time.sleep(3600)

os.link = link_and_hang
directory.DirectoryStore(Path(sys.argv[1])).put("run/7.e1/x", b"w" * (4 << 20))
"""


def kill_at(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == f"{line}\n"
    child.kill()
    child.wait(WAIT_S)


@pytest.mark.chaos
def test_a_writer_killed_while_writing_leaves_nothing_to_see(root: Path, children: Children) -> None:
    kill_at(children.start(HALF_WRITTEN, root), "half")
    store = DirectoryStore(root)
    assert len(uploads_in(root)) == 1
    assert keys_of(store) == []
    assert store.stat("run/7.e1/x") is None
    store.put("run/7.e1/x", b"another writer's")
    assert store.get("run/7.e1/x", limit=100) == b"another writer's"


@pytest.mark.chaos
def test_a_writer_killed_after_the_link_leaves_the_whole_object(root: Path, children: Children) -> None:
    kill_at(children.start(LINKED, root), "linked")
    data = b"w" * (4 << 20)
    store = DirectoryStore(root)
    assert store.get("run/7.e1/x", limit=len(data), expect=digest_bytes(data)) == data
    assert store.put("run/7.e1/x", data).size == len(data)
    assert keys_of(store) == ["run/7.e1/x"]


@pytest.mark.chaos
def test_what_killed_writers_left_is_swept_after_its_time(root: Path, children: Children) -> None:
    kill_at(children.start(HALF_WRITTEN, root), "half")
    (left,) = uploads_in(root)
    DirectoryStore(root)
    assert uploads_in(root) == [left]
    past = left.stat().st_mtime - UPLOAD_TTL_S - 1
    os.utime(left, (past, past))
    DirectoryStore(root)
    assert uploads_in(root) == []


RACER = """
import sys
from pathlib import Path
from stitch.core.errors import VersionConflict
from stitch.store.directory import DirectoryStore

store, name = DirectoryStore(Path(sys.argv[1])), sys.argv[2]
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    try:
        store.put(f"race/{number}/x", f"{name} {number}".encode() * 100)
    except VersionConflict:
        continue
    print(number)
"""


@pytest.mark.integration
def test_of_several_processes_one_wins_each_object(root: Path, store: DirectoryStore, children: Children) -> None:
    rounds = 60
    racers = [children.start(RACER, root, name, rounds) for name in "abc"]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = {name: {int(n) for n in racer.communicate(timeout=WAIT_S)[0].split()} for name, racer in zip("abc", racers, strict=True)}
    assert sum(map(len, won.values())) == rounds
    for name, numbers in won.items():
        for number in numbers:
            assert store.get(f"race/{number}/x", limit=10_000) == f"{name} {number}".encode() * 100
    assert uploads_in(root) == []


@pytest.mark.unit
def test_links_in_the_tree_lead_nowhere(root: Path, store: DirectoryStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "folder").symlink_to(outside)
    (root / "object").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "made")
    for key in ("folder/secret", "object", "dangling"):
        with pytest.raises(KeyError):
            store.get(key, limit=100)
        assert store.stat(key) is None
        store.delete(key)
    for key in ("folder/new", "folder/secret", "object", "dangling"):
        with pytest.raises(InvalidRequest) as refused:
            store.put(key, b"x")
        assert refused.value.field == "key"
    assert keys_of(store) == []
    assert list(store.entries("folder/")) == []
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


@pytest.mark.unit
def test_what_others_put_into_the_tree_is_no_object(root: Path, store: DirectoryStore) -> None:
    os.mkfifo(root / "fifo")
    (root / "back\\slash").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(root) + b"/not-utf8-\xff")).write_bytes(b"")
    (root / "plain").write_bytes(b"copied in by hand")
    assert keys_of(store) == ["plain"]
    assert store.stat("fifo") is None
    with pytest.raises(KeyError):
        store.get("fifo", limit=10)


@pytest.mark.unit
def test_a_key_is_no_folder_of_another(store: DirectoryStore) -> None:
    store.put("a/b", b"1")
    for key in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(InvalidRequest):
            store.put(key, b"2")
    assert keys_of(store) == ["a/b"]


@pytest.mark.unit
def test_a_root_that_is_gone_is_unavailable(root: Path, store: DirectoryStore) -> None:
    store.put("k", b"x")
    moved = root.rename(root.with_name("away"))
    acts: list[Callable[[], object]] = [
        lambda: store.put("k", b"x"),
        lambda: store.get("k", limit=1),
        lambda: store.stat("k"),
        lambda: list(store.entries("")),
        lambda: store.delete("k"),
    ]
    for act in acts:
        with pytest.raises(Unavailable):
            act()
    moved.rename(root)
    assert store.get("k", limit=1) == b"x"


@pytest.mark.unit
def test_a_root_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidRequest) as refused:
        DirectoryStore(tmp_path / "file" / "below")
    assert refused.value.field == "store"
    with pytest.raises(InvalidRequest):
        DirectoryStore(tmp_path / "file")


def failing(number: int) -> Callable[..., None]:
    def act(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return act


@pytest.mark.unit
def test_a_full_disk_is_unavailable_and_leaves_nothing(root: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", failing(errno.ENOSPC))
        with pytest.raises(Unavailable):
            store.put("a/k", b"x")
    assert keys_of(store) == []
    assert uploads_in(root) == []
    store.put("a/k", b"x")


@pytest.mark.unit
def test_a_file_system_without_hard_links_is_refused(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    with pytest.raises(InvalidRequest) as refused:
        store.put("k", b"x")
    assert refused.value.field == "store"


@pytest.mark.unit
def test_bytes_are_synced_before_the_name_and_the_name_before_the_answer(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def noted_fsync(handle: int) -> None:
        target = Path(f"/proc/self/fd/{handle}").readlink()
        events.append(f"sync {'bytes' if target.is_file() else target.name}")
        fsync(handle)

    def noted_link(*arguments: object, **options: object) -> None:
        events.append("link")
        link(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted_link)
    store.put("run/attempt/k", b"x")
    # Each folder's own name is durable, in its parent, before an object in it is; then bytes, link, and the link's folder.
    assert events == ["sync store", "sync run", "sync store", "sync bytes", "link", "sync attempt"]
    events.clear()
    store.put("run/attempt/k", b"x")
    assert events == ["sync store", "sync run", "sync attempt"]


@pytest.mark.unit
def test_deletes_that_prune_do_not_disturb_puts(root: Path, store: DirectoryStore) -> None:
    """One thread removes the last object of a folder, again and again, while others put into it."""
    stop = threading.Event()

    def prune() -> None:
        while not stop.is_set():
            store.put("run/7.e1/gone", b"")
            store.delete("run/7.e1/gone")

    with ThreadPoolExecutor(3) as pool:
        pruner = pool.submit(prune)
        try:
            for number in range(200):
                store.put(f"run/7.e1/{number}", b"x")
                store.delete(f"run/7.e1/{number}")
            store.put("run/7.e1/kept", b"x")
        finally:
            stop.set()
        pruner.result()
    assert keys_of(store) == ["run/7.e1/kept"]
    store.delete("run/7.e1/kept")
    assert [path.name for path in root.iterdir()] == [RESERVED_SEGMENT]


@pytest.mark.unit
def test_an_object_deleted_during_a_collision_is_created_again(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = directory._settle

    def delete_first(*arguments: object) -> object:
        monkeypatch.setattr(directory, "_settle", settle)
        store.delete("k")
        return settle(*arguments)  # type: ignore[arg-type]

    store.put("k", b"old")
    monkeypatch.setattr(directory, "_settle", delete_first)
    store.put("k", b"new")
    assert store.get("k", limit=10) == b"new"
    with pytest.raises(VersionConflict):
        store.put("k", b"newer")
