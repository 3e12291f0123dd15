"""A store whose downloads are watched: how far they are, and which objects were read and found right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stitch.core.ids import Digest
from stitch.store.port import BlobStore, Body, Cancelled, Entry, Receipt, Trials, never


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Bytes on the local disk, of those of all downloads that began. What was there from an earlier call counts as done."""

    done: int
    total: int


class Watched(BlobStore):
    """Passes all on to another store, which stays the caller's to close. Safe for threads."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._running: dict[Path, Receipt] = {}
        self._finished: dict[Path, int] = {}
        self._verified: set[str] = set()
        self._announced = 0

    @property
    def amount(self) -> Amount:
        """Of this moment."""
        with self._lock:
            running, finished = dict(self._running), dict(self._finished)
        parts = sum(min(receipt.size, _size(path)) for path, receipt in running.items())
        whole = sum(finished.values())
        begun = whole + sum(receipt.size for path, receipt in running.items())
        return Amount(done=whole + parts, total=max(begun, self._announced))

    def announce(self, done: int, total: int) -> None:
        """What a progress callback is told: how much is to come, before all of it began."""
        with self._lock:
            self._announced = max(self._announced, sum(self._finished.values()) - done + total)

    def verified(self, key: str) -> bool:
        """Whether the store gave all of the object, and its digest was right. What a file held before is no proof of the object."""
        with self._lock:
            return key in self._verified

    @property
    def url(self) -> str:
        return self._store.url

    def download(self, expect: Receipt, path: Path) -> None:
        begun = _size(path)
        with self._lock:
            self._finished.pop(path, None)
            self._running[path] = expect
        try:
            self._store.download(expect, path)
        except BaseException:
            with self._lock:
                del self._running[path]
            raise
        with self._lock:
            del self._running[path]
            self._finished[path] = expect.size
            if not begun:
                self._verified.add(expect.key)

    def put(self, key: str, body: Body) -> Receipt:
        return self._store.put(key, body)

    def put_named(self, key_of: Callable[[Digest], str], body: Body, *, cancelled: Cancelled = never) -> Receipt:
        return self._store.put_named(key_of, body, cancelled=cancelled)

    def get(self, key: str, *, limit: int, expect: Digest | None = None) -> bytes:
        return self._store.get(key, limit=limit, expect=expect)

    def stat(self, key: str) -> Entry | None:
        return self._store.stat(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        return self._store.entries(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def sweep(self, older_than_s: float) -> int:
        return self._store.sweep(older_than_s)

    def trials(self, prefix: str) -> Trials:
        return self._store.trials(prefix)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
