"""One connection to a log's SQLite file: its schema, and what is asked of it. Blocking; each thread has its own."""

# ruff: noqa: S608 - the only names put into statements are those of Stream's members

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from stitch.core.errors import InvalidRequest, LogDiverged, Unavailable
from stitch.core.ids import Offset
from stitch.log.keeping import COMPACTED, RETENTION_MS
from stitch.log.port import Bounds, Draft, Headers, Record, Stream

APPLICATION_ID: Final = 0x5354_4348
"""Written into the file's header, by which a log is told from any other database."""
SCHEMA_VERSION: Final = 1

BUSY_S: Final = 5.0
"""Readers wait for nobody in WAL mode, save for a recovery after a crash."""
CREATE_TIMEOUT_S: Final = 10.0
"""For several processes that create the same file at once; each holds it for a few fsyncs."""
CREATE_RETRY_S: Final = 0.02
PAGE_BYTES: Final = 16 * 1024 * 1024
"""Values that one read returns at most, however many records were asked for."""
EXPIRE_BATCH: Final = 100
"""Expired records that one append removes at most: more than come in, and little enough not to be felt."""
FULL_LOOK_EVERY: Final = 10
"""Calls of `moved` between two that trust no time stamp."""

Place = tuple[int, int, str]
"""Device and inode of the file, and the log's own id."""


class Identity:
    """Which file a handle works on, fixed by whichever of its connections opens it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._place: Place | None = None

    @property
    def fixed(self) -> bool:
        return self._place is not None

    def fix(self, place: Place) -> bool:
        """False where another file was fixed before."""
        with self._lock:
            if self._place is None:
                self._place = place
            return self._place == place


def prepare(path: Path, url: str, *, create: bool) -> None:
    """Makes the log if asked to, and checks it. Raises InvalidRequest or Unavailable."""
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            _create(path, url)
        elif not path.exists():
            raise InvalidRequest(f"log: there is none at {url}; make it with: stitch topics create --log {url}", field="log")
        LogFile(path, url, Identity()).close()
    except OSError as error:
        raise Unavailable(f"{url}: {error.strerror}") from error
    except sqlite3.Error as error:
        if _primary_code(error) == sqlite3.SQLITE_NOTADB:
            raise InvalidRequest(f"log: {url} is no SQLite database", field="log") from error
        raise Unavailable(f"{url}: {error}") from error


def is_busy(error: sqlite3.Error) -> bool:
    """Whether others held a lock for too long; nothing was done then."""
    return _primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _connect(path: Path, mode: str, busy_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=busy_s)
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _schema_version(connection: sqlite3.Connection, url: str) -> int:
    """0 for an empty database. InvalidRequest for one that is no log, or a log of another age."""
    # One statement, hence one snapshot: another process may be making the log at this moment.
    application, version, tables = connection.execute(
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if application == 0 and version == 0 and tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise InvalidRequest(f"log: {url} is a database, but not a log of Stitch", field="log")
    if version != SCHEMA_VERSION:
        raise InvalidRequest(f"log: {url} has schema {version}; this release of Stitch reads {SCHEMA_VERSION}", field="log")
    return int(version)


def _check_made(connection: sqlite3.Connection, url: str) -> None:
    if _schema_version(connection, url) == 0:
        raise Unavailable(f"{url}: the log is being made")


def _create(path: Path, url: str) -> None:
    deadline = time.monotonic() + CREATE_TIMEOUT_S
    with closing(_connect(path, "rwc", BUSY_S)) as connection:
        while True:
            try:
                if _schema_version(connection, url) == 0:
                    _write_schema(connection, url)
            except sqlite3.OperationalError as error:
                # Of two that switch to WAL at once, one is told so without the busy time-out having its say.
                if not is_busy(error) or time.monotonic() > deadline:
                    raise
                time.sleep(CREATE_RETRY_S)
            else:
                return


def _write_schema(connection: sqlite3.Connection, url: str) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    with _transaction(connection, "IMMEDIATE"):
        if _schema_version(connection, url) != 0:
            return
        connection.execute("CREATE TABLE log (id TEXT NOT NULL)")
        connection.execute("INSERT INTO log VALUES (?)", (uuid.uuid4().hex,))
        connection.execute(
            "CREATE TABLE streams (name TEXT PRIMARY KEY, start INTEGER NOT NULL, next INTEGER NOT NULL, "
            "last_ms INTEGER NOT NULL) WITHOUT ROWID"
        )
        for stream in Stream:
            connection.execute("INSERT INTO streams VALUES (?, 0, 0, 0)", (stream.value,))
            # `next` gives the offsets, not the highest row, so they grow although all rows may expire.
            connection.execute(
                f'CREATE TABLE {stream.value} ("offset" INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, '
                "key TEXT NOT NULL, headers TEXT NOT NULL, value BLOB NOT NULL)"
            )
        for stream in COMPACTED:
            connection.execute(f"CREATE INDEX {stream.value}_by_key ON {stream.value} (key)")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str = "DEFERRED") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


class LogFile:
    """An open log. Methods raise sqlite3.Error as it comes, and LogDiverged where the file is not the identity's."""

    def __init__(self, path: Path, url: str, identity: Identity, busy_s: float = BUSY_S) -> None:
        self._path = path
        self._url = url
        self._identity = identity
        if not path.exists():
            if identity.fixed:
                raise self._diverged()
            raise Unavailable(f"{url}: there is no log; make it with: stitch topics create --log {url}")
        self._connection = _connect(path, "rw", busy_s)
        try:
            _check_made(self._connection, url)
            self.check_place()
            self._opened = self._inode()
            self._seen_version = self._data_version()
        except BaseException:
            self._connection.close()
            raise
        self._ends = dict.fromkeys(Stream, 0)
        self._journal = path.with_name(f"{path.name}-wal")
        self._stamp = self._journal_stamp()
        self._ask_again = True
        self._calls = 0

    def close(self) -> None:
        self._connection.close()

    # Identity

    def check_place(self) -> None:
        """LogDiverged where the path leads to another file than the one opened, or its content was exchanged."""
        (log_id,) = self._connection.execute("SELECT id FROM log").fetchone()
        if not self._identity.fix((*self._inode(), str(log_id))):
            raise self._diverged()

    def _inode(self) -> tuple[int, int]:
        # Never by opening it: to close a second descriptor of the file would drop all of SQLite's locks on it.
        try:
            there = self._path.stat()
        except FileNotFoundError:
            raise self._diverged() from None
        return there.st_dev, there.st_ino

    def _diverged(self) -> LogDiverged:
        return LogDiverged(f"{self._url}: the file was removed or replaced since it was opened")

    # Reading

    def bounds(self, stream: Stream) -> Bounds:
        with self._reading():
            return self._bounds(stream)

    def read(self, stream: Stream, position: int, most: int) -> tuple[Sequence[Record], int]:
        """Records from `position` on, and the position after them."""
        with self._reading():
            bounds = self._bounds(stream)
            if not bounds.start <= position <= bounds.end:
                raise LogDiverged(
                    f"{self._url}: offset {position} of {stream} is not in the log, which holds {bounds.start} to {bounds.end}"
                )
            found: list[Record] = []
            held = 0
            for row in self._rows(stream, '"offset" >= ? ORDER BY "offset" LIMIT ?', position, most):
                found.append(_record(stream, row))
                held += len(row[4])
                if held >= PAGE_BYTES:
                    break
            whole = len(found) < most and held < PAGE_BYTES
            return found, bounds.end if whole else found[-1].offset + 1

    def newest(self, stream: Stream) -> Record | None:
        with self._reading():
            row = self._rows(stream, '1 ORDER BY "offset" DESC LIMIT 1').fetchone()
            return None if row is None else _record(stream, row)

    def offset_at(self, stream: Stream, time_ms: int) -> Offset:
        with self._reading():
            bounds = self._bounds(stream)
            low, high = int(bounds.start), int(bounds.end)
            while low < high:  # times never go back, so this may halve
                middle = (low + high) // 2
                found = self._time_from(stream, middle)
                if found is None or found[1] >= time_ms:
                    high = middle
                else:
                    low = found[0] + 1
            found = self._time_from(stream, low)
            return bounds.end if found is None else Offset(found[0])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with _transaction(self._connection):
            self.check_place()
            yield

    def _bounds(self, stream: Stream) -> Bounds:
        start, end = self._connection.execute("SELECT start, next FROM streams WHERE name = ?", (stream.value,)).fetchone()
        return Bounds(start=Offset(start), end=Offset(end))

    def _rows(self, stream: Stream, condition: str, *values: int) -> sqlite3.Cursor:
        return self._connection.execute(
            f'SELECT "offset", time_ms, key, headers, value FROM {stream.value} WHERE {condition}', values
        )

    def _time_from(self, stream: Stream, offset: int) -> tuple[int, int] | None:
        found: tuple[int, int] | None = self._connection.execute(
            f'SELECT "offset", time_ms FROM {stream.value} WHERE "offset" >= ? ORDER BY "offset" LIMIT 1', (offset,)
        ).fetchone()
        return found

    # Following

    def moved(self) -> Sequence[Stream]:
        """Streams to which a connection, other than this one, has appended since the last call.

        To ask SQLite takes locks, which is ten times the cost of a look at the journal's time stamp. So it is asked where the
        stamp has changed, once more at the next call (a second commit may carry the same stamp), and at every tenth call.
        """
        stamp = self._journal_stamp()
        self._calls += 1
        if stamp == self._stamp and not self._ask_again and self._calls % FULL_LOOK_EVERY:
            return ()
        self._ask_again = stamp != self._stamp
        self._stamp = stamp
        if self._inode() != self._opened:
            raise self._diverged()
        version = self._data_version()
        if version == self._seen_version:
            return ()
        self._seen_version = version
        ends = {Stream(name): end for name, end in self._connection.execute("SELECT name, next FROM streams")}
        moved = [stream for stream in Stream if ends[stream] != self._ends[stream]]
        self._ends = ends
        return moved

    def _journal_stamp(self) -> tuple[int, int, int] | None:
        try:
            there = self._journal.stat()
        except FileNotFoundError:
            return None
        return there.st_ino, there.st_mtime_ns, there.st_size

    def _data_version(self) -> int:
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return int(version)

    # Appending

    def begin(self) -> None:
        """Takes the one lock for writing; sqlite3.OperationalError where others hold it for too long."""
        self._connection.execute("BEGIN IMMEDIATE")

    def insert(self, stream: Stream, draft: Draft, at_ms: int) -> None:
        """Within `begin` and `commit`."""
        offset, last_ms = self._connection.execute("SELECT next, last_ms FROM streams WHERE name = ?", (stream.value,)).fetchone()
        time_ms = max(last_ms, at_ms)
        self._connection.execute(
            f"INSERT INTO {stream.value} VALUES (?, ?, ?, ?, ?)",
            (offset, time_ms, draft.key, _headers_text(draft.headers), draft.value),
        )
        self._connection.execute("UPDATE streams SET next = ?, last_ms = ? WHERE name = ?", (offset + 1, time_ms, stream.value))
        if stream in COMPACTED:
            self._connection.execute(f'DELETE FROM {stream.value} WHERE key = ? AND "offset" < ?', (draft.key, offset))
        elif (kept_ms := RETENTION_MS.get(stream)) is not None:
            self._expire(stream, time_ms - kept_ms)

    def _expire(self, stream: Stream, before_ms: int) -> None:
        """Removes the oldest records, if old enough. The newest is always younger, so `start` stays below `next`."""
        start = self._bounds(stream).start
        first = self._time_from(stream, start)
        if first is None or first[1] >= before_ms:
            return
        (cut,) = self._connection.execute(
            f'SELECT coalesce(max("offset"), -1) + 1 FROM (SELECT "offset", time_ms FROM {stream.value} '
            'WHERE "offset" >= ? ORDER BY "offset" LIMIT ?) WHERE time_ms < ?',
            (start, EXPIRE_BATCH, before_ms),
        ).fetchone()
        self._connection.execute(f'DELETE FROM {stream.value} WHERE "offset" < ?', (cut,))
        self._connection.execute("UPDATE streams SET start = ? WHERE name = ?", (cut, stream.value))

    def commit(self) -> None:
        self._connection.execute("COMMIT")


def _headers_text(headers: Headers) -> str:
    # Latin-1 maps each byte to one character and back.
    return json.dumps([[name, value.decode("latin-1")] for name, value in headers]) if headers else ""


def _record(stream: Stream, row: tuple[int, int, str, str, bytes]) -> Record:
    offset, time_ms, key, headers, value = row
    return Record(
        stream=stream,
        offset=Offset(offset),
        time_ms=time_ms,
        key=key,
        value=value,
        headers=tuple((name, text.encode("latin-1")) for name, text in json.loads(headers)) if headers else (),
    )
