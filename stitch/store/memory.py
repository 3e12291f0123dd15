"""BlobStore in memory: `memory://` is a fresh one, `memory://name` the one of that name in this process."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stitch.core.errors import InvalidRequest, VersionConflict
from stitch.core.ids import Digest
from stitch.store.hashing import CHUNK_BYTES, Stream, checked, checked_body, digest_bytes, download_verified, put_hashed_first
from stitch.store.keys import check_key, check_prefix, folders_of, tree_conflict
from stitch.store.port import BlobStore, Body, Cancelled, Entry, Receipt, never

_NAME = re.compile(r"[A-Za-z0-9._-]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Object:
    data: bytes
    blake3: Digest
    modified_ms: int


class MemoryStore(BlobStore):
    """What it holds ends with the process."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, _Object] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def put(self, key: str, body: Body) -> Receipt:
        check_key(key)
        body = checked_body(body)
        data = body.read_bytes() if isinstance(body, Path) else bytes(body)
        digest = digest_bytes(data)
        with self._lock:
            held = self._objects.get(key)
            if held is None:
                self._refuse_tree_conflict(key)
                self._objects[key] = _Object(data=data, blake3=digest, modified_ms=time.time_ns() // 1_000_000)
        if held is not None and held.blake3 != digest:
            raise VersionConflict(f"object {key!r} exists with blake3 {held.blake3}, not {digest}")
        return Receipt(key=key, size=len(data), blake3=digest)

    def put_named(self, key_of: Callable[[Digest], str], body: Body, *, cancelled: Cancelled = never) -> Receipt:
        return put_hashed_first(self, key_of, body, cancelled)

    def get(self, key: str, *, limit: int, expect: Digest | None = None) -> bytes:
        return checked(key, self._object(key).data, limit=limit, expect=expect)

    def download(self, expect: Receipt, path: Path) -> None:
        def fetch(offset: int) -> Stream:
            data = self._object(expect.key).data
            for start in range(offset, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]

        download_verified(expect, path, fetch)

    def stat(self, key: str) -> Entry | None:
        with self._lock:
            held = self._objects.get(check_key(key))
        return None if held is None else Entry(key=key, size=len(held.data), modified_ms=held.modified_ms)

    def entries(self, prefix: str) -> Iterator[Entry]:
        check_prefix(prefix)
        with self._lock:
            found = [
                Entry(key=key, size=len(held.data), modified_ms=held.modified_ms)
                for key, held in self._objects.items()
                if key.startswith(prefix)
            ]
        return iter(sorted(found, key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def _object(self, key: str) -> _Object:
        with self._lock:
            return self._objects[check_key(key)]

    def _refuse_tree_conflict(self, key: str) -> None:
        below = f"{key}/"
        if any(folder in self._objects for folder in folders_of(key)) or any(k.startswith(below) for k in self._objects):
            raise tree_conflict(key)


_shared: Final[dict[str, MemoryStore]] = {}
_shared_lock: Final = threading.Lock()


def open_memory(name: str) -> MemoryStore:
    """The shared store of this name, or a fresh one where the name is empty."""
    if not _NAME.match(name):
        raise InvalidRequest("store: the name in memory://NAME may hold letters, digits, `.`, `_` and `-`", field="store")
    if not name:
        return MemoryStore()
    with _shared_lock:
        return _shared.setdefault(name, MemoryStore(name))
