"""The two threads of a SqliteLog. Each opens its own connection at its first job, and again after a fault."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from stitch.core.errors import LogDiverged, OutcomeUnknown, StitchError, Unavailable
from stitch.log.bell import Bell
from stitch.log.port import Draft, Stream
from stitch.log.sqlite_file import BUSY_S, Identity, LogFile, is_busy

FOLLOW_INTERVAL_S: Final = 0.025
"""Between two looks for commits of other processes: a follower hears of a record within 50 ms, and idles at half a percent
of a slow core."""
APPEND_BUSY_S: Final = 0.1
"""After it, a writer that waits for the lock looks whether anybody still waits for the append."""
APPEND_BATCH: Final = 256
"""Records that one transaction takes at most."""
CLOSE_TIMEOUT_S: Final = 10.0
"""For a thread to finish the job in hand: one commit, or one page of records."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What the two threads of a handle share."""

    path: Path
    url: str
    clock: Callable[[], int]
    bells: Mapping[Stream, Bell]
    """Rung when the stream has grown, or the file is no longer what it was."""
    identity: Identity = field(default_factory=Identity)

    def ring_all(self) -> None:
        for bell in self.bells.values():
            bell.ring()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Append:
    stream: Stream
    draft: Draft
    deadline: float
    done: Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    ask: Callable[[LogFile], object]
    answer: Future[Any]


J = TypeVar("J")


class _Worker(ABC, Generic[J]):
    """A thread with a queue of jobs. It starts with the first job and ends with `close`."""

    def __init__(self, home: Home, name: str, busy_s: float) -> None:
        self._home = home
        self._busy_s = busy_s
        self._jobs: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._file: LogFile | None = None
        # A daemon, since a handle that is never closed must not keep its process from ending.
        self._thread = threading.Thread(target=self._run, name=f"{name} {home.url}", daemon=True)

    def put(self, job: J) -> None:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if self._thread.ident is None:
                self._thread.start()
            self._jobs.put(job)

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    def _closed_error(self) -> Unavailable:
        return Unavailable(f"{self._home.url}: closed")

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._drop_file()

    @abstractmethod
    def _work(self) -> None:
        """Takes jobs until it takes None; then fails those that came after."""

    def _opened(self) -> LogFile:
        if self._file is None:
            self._file = LogFile(self._home.path, self._home.url, self._home.identity, self._busy_s)
        return self._file

    def _drop_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Appender(_Worker[_Append]):
    """Appends all that wait in one transaction."""

    def __init__(self, home: Home) -> None:
        super().__init__(home, "append", APPEND_BUSY_S)

    async def append(self, stream: Stream, draft: Draft, timeout: float) -> None:
        done: Future[None] = Future()
        self.put(_Append(stream=stream, draft=draft, deadline=time.monotonic() + timeout, done=done))
        landed = asyncio.wrap_future(done)
        try:
            await asyncio.wait([landed], timeout=timeout)
            if not landed.done():
                # What the thread has not begun can be taken back for good; a commit under way cannot.
                if done.cancel():
                    raise self._late()
                raise OutcomeUnknown(f"{self._home.url}: the append was not confirmed within {timeout:g} s")
            landed.result()
        finally:
            landed.cancel()

    def _late(self) -> Unavailable:
        return Unavailable(f"{self._home.url}: others held the log for too long; nothing was appended")

    def _work(self) -> None:
        last = False
        while not last:
            batch: list[_Append] = []
            job = self._jobs.get()
            with contextlib.suppress(queue.Empty):
                while job is not None:
                    batch.append(job)
                    if len(batch) == APPEND_BATCH:
                        break
                    job = self._jobs.get_nowait()
            last = job is None
            try:
                self._append(batch)
            except Exception as error:  # noqa: BLE001 - a fault of ours ends those appends, not the thread
                self._drop_file()
                self._fail(batch, error)

    def _append(self, batch: list[_Append]) -> None:
        while batch := self._still_wanted(batch):
            try:
                file = self._opened()
                file.begin()
            except sqlite3.OperationalError as error:
                if not is_busy(error):
                    self._fail(batch, Unavailable(f"{self._home.url}: {error}; nothing was appended"))
                elif self._closed:
                    self._fail(batch, self._closed_error())
            except (StitchError, sqlite3.Error) as error:
                self._fail(batch, self._as_ours(error))
            else:
                self._commit(file, [each for each in batch if each.done.set_running_or_notify_cancel()])
                return

    def _still_wanted(self, batch: list[_Append]) -> list[_Append]:
        now = time.monotonic()
        self._fail([each for each in batch if each.deadline <= now], self._late())
        return [each for each in batch if not each.done.done()]

    def _commit(self, file: LogFile, batch: list[_Append]) -> None:
        try:
            file.check_place()
            at_ms = self._home.clock()
            for each in batch:
                file.insert(each.stream, each.draft, at_ms)
        except (StitchError, sqlite3.Error) as error:
            self._drop_file()  # which rolls back
            self._fail(batch, self._as_ours(error))
            return
        try:
            file.commit()
            file.check_place()
        except (StitchError, sqlite3.Error) as error:
            # A commit that failed half-way may yet be found in the journal when the file is next recovered.
            self._drop_file()
            self._fail(batch, OutcomeUnknown(f"{self._home.url}: {error} while committing"))
            return
        for each in batch:
            each.done.set_result(None)
        for stream in {each.stream for each in batch}:
            self._home.bells[stream].ring()

    def _as_ours(self, error: Exception) -> StitchError:
        if isinstance(error, StitchError) and not isinstance(error, LogDiverged):
            return error
        return Unavailable(f"{error}; nothing was appended")

    def _fail(self, batch: list[_Append], error: Exception) -> None:
        for each in batch:
            if not each.done.done() and (each.done.running() or each.done.set_running_or_notify_cancel()):
                each.done.set_exception(error)


class Asker(_Worker[_Question]):
    """Answers questions, and between them looks for commits of others while somebody follows."""

    def __init__(self, home: Home) -> None:
        super().__init__(home, "read", BUSY_S)
        self._followers = 0

    async def ask(self, question: Callable[[LogFile], T], timeout: float) -> T:
        answer: Future[Any] = Future()
        self.put(_Question(ask=question, answer=answer))
        try:
            async with asyncio.timeout(timeout):
                result: T = await asyncio.wrap_future(answer)
                return result
        except TimeoutError:
            raise Unavailable(f"{self._home.url}: no answer within {timeout:g} s") from None

    def follow(self, count: int) -> None:
        """Adds (+1) or removes (-1) a follower. Takes effect with the next question, which every follower asks."""
        self._followers += count

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=FOLLOW_INTERVAL_S if self._followers else None)
            except queue.Empty:
                self._look()
                continue
            if job is None:
                return
            self._answer(job)

    def _answer(self, job: _Question) -> None:
        if not job.answer.set_running_or_notify_cancel():
            return
        try:
            job.answer.set_result(job.ask(self._opened()))
        except StitchError as error:
            job.answer.set_exception(error)
        except sqlite3.Error as error:
            self._drop_file()
            job.answer.set_exception(Unavailable(f"{self._home.url}: {error}"))
            self._home.ring_all()  # the next connection sees only what is committed after it was opened
        except Exception as error:  # noqa: BLE001 - a fault of ours ends this question, not the thread
            job.answer.set_exception(error)

    def _look(self) -> None:
        try:
            moved = self._opened().moved()
        except (StitchError, sqlite3.Error):
            # Whoever follows asks again, and is told by that question.
            self._drop_file()
            self._home.ring_all()
        else:
            for stream in moved:
                self._home.bells[stream].ring()
