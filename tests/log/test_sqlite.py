"""What is particular to the log in a SQLite file: several processes, crashes, and files that are not what they were."""

# ruff: noqa: ASYNC240 - a test may block its own loop

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from stitch.core.errors import InvalidRequest, LogDiverged, OutcomeUnknown, Unavailable
from stitch.core.ids import Offset
from stitch.log.port import Draft, Record, Stream
from stitch.log.read import read_all
from stitch.log.sqlite import SqliteLog
from tests.support import provision

WORKER = Path(__file__).with_name("sqlite_worker.py")
NEVER = 1_000_000
"""More appends than a worker makes before it is killed."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
async def log(path: Path) -> AsyncIterator[SqliteLog]:
    async with SqliteLog(path) as log:
        await log.setup(create=True)
        yield log


def draft(number: int) -> Draft:
    return Draft(key="p", value=b"%d" % number)


async def numbers(log: SqliteLog, key: str = "p") -> list[int]:
    return [int(record.value) for record in await read_all(log, Stream.PUBLICATIONS) if record.key == key]


def start_worker(path: Path, name: str, count: int) -> provision.Running:
    return provision.start([sys.executable, WORKER, path, name, str(count)], output=path.with_name(f"{name}.txt"))


def acknowledged(worker: provision.Running) -> list[int]:
    """Whole lines only: a killed worker may leave half of one."""
    return [int(line) for line in worker.output.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.integration
async def test_processes_append_while_others_follow(path: Path, log: SqliteLog) -> None:
    workers = [start_worker(path, f"w{index}", 100) for index in range(3)]
    try:
        followed: list[Record] = []
        async with await log.reader(Stream.PUBLICATIONS, Offset(0)) as reader, asyncio.timeout(60):
            while len(followed) < 300:
                followed += await reader.poll(1.0)
        assert followed == await read_all(log, Stream.PUBLICATIONS)
        for worker in workers:
            await asyncio.to_thread(worker.process.wait, 30)
            assert worker.process.returncode == 0, worker.tail()
            assert await numbers(log, worker.output.stem) == list(range(100))
    finally:
        for worker in workers:
            worker.stop()


@pytest.mark.chaos
async def test_a_killed_process_loses_nothing_that_was_acknowledged(path: Path, log: SqliteLog) -> None:
    for life in range(4):
        workers = [start_worker(path, f"w{life}-{index}", NEVER) for index in range(2)]
        try:
            await provision.eventually(lambda: all(len(acknowledged(each)) > 20 for each in workers), "both append")  # noqa: B023
        finally:
            for worker in workers:
                worker.kill()
        for worker in workers:
            told = acknowledged(worker)
            there = await numbers(log, worker.output.stem)
            assert told == list(range(len(told)))
            # The last may have landed without the process living to say so.
            assert there in (told, [*told, len(told)])
    await log.append(Stream.PUBLICATIONS, draft(1))
    assert await numbers(log) == [1]


async def test_offsets_grow_although_all_records_expired(path: Path) -> None:
    days = 24 * 60 * 60 * 1000
    now = 1_700_000_000_000
    async with SqliteLog(path, clock=lambda: now) as log:
        await log.setup(create=True)
        for _ in range(3):
            await log.append(Stream.ACTIVATIONS, draft(0))
        now += 8 * days
        await log.append(Stream.ACTIVATIONS, draft(1))
        bounds = await log.bounds(Stream.ACTIVATIONS)
        assert (bounds.start, bounds.end) == (3, 4)
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("DELETE FROM activations")
        raw.commit()
    async with SqliteLog(path) as log:
        await log.append(Stream.ACTIVATIONS, draft(2))
        newest = await log.newest(Stream.ACTIVATIONS)
        assert newest is not None
        assert newest.offset == 4


async def test_a_replaced_file_is_noticed_by_reader_and_writer(path: Path, log: SqliteLog) -> None:
    await log.append(Stream.PUBLICATIONS, draft(0))
    reader = await log.reader(Stream.PUBLICATIONS, Offset(1))
    waiting = asyncio.create_task(reader.poll(60.0))
    await asyncio.sleep(0)
    async with SqliteLog(path.with_name("other.db")) as other:
        await other.setup(create=True)
        await other.append(Stream.PUBLICATIONS, draft(1))
    for left in path.parent.glob("log.db-*"):
        left.unlink()
    path.with_name("other.db").replace(path)
    with pytest.raises(LogDiverged, match="removed or replaced"):
        await waiting
    with pytest.raises(LogDiverged):
        await log.bounds(Stream.PUBLICATIONS)
    with pytest.raises(Unavailable, match="nothing was appended"):
        await log.append(Stream.PUBLICATIONS, draft(2))
    async with SqliteLog(path) as again:
        assert await numbers(again) == [1]


async def test_a_removed_file_is_noticed(path: Path, log: SqliteLog) -> None:
    await log.append(Stream.PUBLICATIONS, draft(0))
    for left in path.parent.glob("log.db*"):
        left.unlink()
    with pytest.raises(Unavailable, match="nothing was appended"):
        await log.append(Stream.PUBLICATIONS, draft(1))
    with pytest.raises(LogDiverged):
        await log.newest(Stream.PUBLICATIONS)


async def test_an_older_copy_put_back_is_noticed(path: Path, log: SqliteLog) -> None:
    """By its position, since the copy carries the same id and even the same inode."""
    await log.append(Stream.PUBLICATIONS, draft(0))
    await log.aclose()
    copy = path.with_name("copy.db")
    shutil.copyfile(path, copy)
    async with SqliteLog(path) as later:
        await later.append(Stream.PUBLICATIONS, draft(1))
        end = (await later.bounds(Stream.PUBLICATIONS)).end
    shutil.copyfile(copy, path)
    async with SqliteLog(path) as restored, await restored.reader(Stream.PUBLICATIONS, end) as reader:
        with pytest.raises(LogDiverged):
            await reader.poll(1.0)


async def test_without_a_file_nothing_is_made_by_accident(path: Path) -> None:
    async with SqliteLog(path) as log:
        with pytest.raises(Unavailable, match="stitch topics create"):
            await log.append(Stream.PUBLICATIONS, draft(0))
        with pytest.raises(Unavailable, match="stitch topics create"):
            await log.bounds(Stream.PUBLICATIONS)
        assert not path.exists()
        async with SqliteLog(path) as maker:
            await maker.setup(create=True)
        await log.append(Stream.PUBLICATIONS, draft(0))
        assert await numbers(log) == [0]


async def test_a_file_of_a_newer_release_is_refused(path: Path, log: SqliteLog) -> None:
    await log.aclose()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version = 2")
    async with SqliteLog(path) as newer:
        with pytest.raises(InvalidRequest, match="schema 2"):
            await newer.setup(create=True)
        with pytest.raises(InvalidRequest, match="schema 2"):
            await newer.append(Stream.PUBLICATIONS, draft(0))


async def test_another_programs_database_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE theirs (a)")
    before = path.read_bytes()
    async with SqliteLog(path) as log:
        with pytest.raises(InvalidRequest, match="not a log of Stitch"):
            await log.setup(create=True)
    assert path.read_bytes() == before


async def test_a_file_that_is_no_database_is_left_alone(path: Path) -> None:
    path.write_bytes(b"not a database" * 1000)
    async with SqliteLog(path) as log:
        with pytest.raises(InvalidRequest, match="no SQLite database"):
            await log.setup(create=True)
    assert path.read_bytes() == b"not a database" * 1000


async def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with SqliteLog(tmp_path / "file" / "log.db") as log:
        with pytest.raises(Unavailable):
            await log.setup(create=True)


async def test_an_append_that_waits_too_long_for_the_lock_never_lands(path: Path, log: SqliteLog) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        results = await asyncio.gather(
            *(log.append(Stream.PUBLICATIONS, draft(number), timeout=0.5) for number in range(3)), return_exceptions=True
        )
        assert [type(result) for result in results] == [Unavailable] * 3
        assert time.monotonic() - started >= 0.45
        assert await numbers(log) == []  # readers do not wait for writers
        patient = asyncio.create_task(log.append(Stream.PUBLICATIONS, draft(9), timeout=60.0))
        cancelled = asyncio.create_task(log.append(Stream.PUBLICATIONS, draft(8), timeout=60.0))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        holder.execute("COMMIT")
    await patient
    assert await numbers(log) == [9]


async def test_a_commit_that_hangs_leaves_the_outcome_unknown(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    from stitch.log import sqlite_file

    may_commit = threading.Event()
    commit = sqlite_file.LogFile.commit

    def slow_commit(self: sqlite_file.LogFile) -> None:
        may_commit.wait(60)
        commit(self)

    monkeypatch.setattr(sqlite_file.LogFile, "commit", slow_commit)
    with pytest.raises(OutcomeUnknown):
        await log.append(Stream.PUBLICATIONS, draft(1), timeout=0.2)
    may_commit.set()

    async def landed() -> bool:
        return await numbers(log) == [1]

    await provision.eventually(landed, "the append lands late")


async def test_many_appends_share_a_commit(log: SqliteLog) -> None:
    await asyncio.gather(*(log.append(Stream.ROLLOUTS, draft(number)) for number in range(1000)))
    assert [int(record.value) for record in await read_all(log, Stream.ROLLOUTS)] == list(range(1000))


async def test_a_page_of_large_records_is_cut(log: SqliteLog) -> None:
    for _ in range(20):
        await log.append(Stream.ROLLOUTS, Draft(key="k", value=bytes(900_000)))
    async with await log.reader(Stream.ROLLOUTS, Offset(0)) as reader:
        first = await reader.poll(1.0)
        assert 0 < len(first) < 20
        assert len(first) + len(await reader.poll(1.0)) == 20


async def test_time_does_not_go_back_with_the_clock(path: Path) -> None:
    times = iter([1000, 5000, 2000, 6000])
    async with SqliteLog(path, clock=lambda: next(times)) as log:
        await log.setup(create=True)
        for number in range(4):
            await log.append(Stream.PUBLICATIONS, draft(number))
        assert [record.time_ms for record in await read_all(log, Stream.PUBLICATIONS)] == [1000, 5000, 5000, 6000]


async def test_closing_ends_the_threads(path: Path) -> None:
    async with SqliteLog(path) as log:
        await log.setup(create=True)
        await log.append(Stream.PUBLICATIONS, draft(0))
        assert await numbers(log) == [0]
        mine = [thread for thread in threading.enumerate() if log.url in thread.name]
        assert len(mine) == 2
    assert not any(thread.is_alive() for thread in mine)
    assert list(path.parent.iterdir()) == [path]  # the last to close folds the journal into the file


async def test_a_relative_path_does_not_follow_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with SqliteLog(Path("log.db")) as log:
        assert log.url == "sqlite://log.db"
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        await log.setup(create=True)
    assert (tmp_path / "log.db").exists()
