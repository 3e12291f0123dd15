"""EventLog in one SQLite file: the embedded default, shared by any number of processes of one machine.

Write-ahead journal, `synchronous=FULL`: a record is on disk before `append` returns. A handle has two threads, each with its
own connection: one appends (all that wait at that moment go into one transaction, hence one fsync), one reads and, while
somebody follows, looks every 25 ms whether another connection committed. Nothing ever blocks the event loop.

The file must lie on a local disk, since SQLite's locks do not hold over network file systems. Where it is removed or replaced
under an open handle, readers raise LogDiverged and appends are refused; a new handle takes the file that is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from stitch.core.errors import Unavailable
from stitch.core.ids import Offset
from stitch.log.bell import Bell
from stitch.log.keeping import APPEND_TIMEOUT_S, READ_TIMEOUT_S, check_draft
from stitch.log.memory import now_ms
from stitch.log.port import Bounds, Copies, Draft, EventLog, Reader, Record, Stream
from stitch.log.sqlite_file import LogFile, prepare
from stitch.log.sqlite_threads import Appender, Asker, Home


class SqliteLog(EventLog):
    """The log in the file `path`. `clock` gives milliseconds; the log's time never goes back, whatever it says."""

    def __init__(self, path: Path, *, clock: Callable[[], int] = now_ms) -> None:
        bells = {stream: Bell() for stream in Stream}
        self._home = Home(path=path.absolute(), url=f"sqlite://{path}", clock=clock, bells=bells)
        self._appender = Appender(self._home)
        self._asker = Asker(self._home)
        self._closed = False

    @property
    def url(self) -> str:
        return self._home.url

    @property
    def embedded(self) -> bool:
        return True

    async def setup(self, *, create: bool) -> Copies:
        self._check_open()
        await asyncio.to_thread(prepare, self._home.path, self.url, create=create)
        return Copies(1, 1)

    async def append(self, stream: Stream, draft: Draft, *, timeout: float | None = None) -> None:
        check_draft(draft)
        await self._appender.append(stream, draft, APPEND_TIMEOUT_S if timeout is None else timeout)

    async def bounds(self, stream: Stream) -> Bounds:
        return await self._asker.ask(lambda file: file.bounds(stream), READ_TIMEOUT_S)

    async def offset_at(self, stream: Stream, time_ms: int) -> Offset:
        return await self._asker.ask(lambda file: file.offset_at(stream, time_ms), READ_TIMEOUT_S)

    async def newest(self, stream: Stream) -> Record | None:
        return await self._asker.ask(lambda file: file.newest(stream), READ_TIMEOUT_S)

    async def reader(self, stream: Stream, start: Offset) -> Reader:
        self._check_open()
        return _SqliteReader(self, stream, start)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._home.ring_all()
            await asyncio.gather(self._appender.close(), self._asker.close())

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.url}: closed")


class _SqliteReader(Reader):
    def __init__(self, log: SqliteLog, stream: Stream, start: Offset) -> None:
        self._log = log
        self._stream = stream
        self._position: int = start
        self._closed = False
        log._asker.follow(1)

    @property
    def position(self) -> Offset:
        return Offset(self._position)

    async def poll(self, timeout: float, max_records: int = 1000) -> Sequence[Record]:
        deadline = time.monotonic() + timeout
        bell = self._log._home.bells[self._stream]
        while True:
            if self._closed:
                raise Unavailable(f"{self._log.url}: reader of {self._stream} is closed")
            rings = bell.rings
            page = partial(LogFile.read, stream=self._stream, position=self._position, most=max_records)
            found, self._position = await self._log._asker.ask(page, READ_TIMEOUT_S)
            remaining = deadline - time.monotonic()
            if found or remaining <= 0:
                return found
            await bell.wait(rings, remaining)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._log._asker.follow(-1)
            self._log._home.bells[self._stream].ring()
