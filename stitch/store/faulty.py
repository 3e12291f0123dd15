"""A BlobStore that misbehaves by script: for tests of all that uses a store, and for rehearsals. No chance in it.

    store = FaultyStore(inner, Fault(call="put", kind=Kind.FAIL_AFTER, nth=2))

The second put takes effect and raises Unavailable, as where an answer was lost; all else is the inner store's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal, TypeVar

from stitch.core.errors import CorruptObject, Unavailable
from stitch.core.ids import Digest
from stitch.store.hashing import checked, differs, digest_file, put_hashed_first
from stitch.store.port import BlobStore, Body, Cancelled, Entry, Receipt, Trials, never

Result = TypeVar("Result")
Call = Literal["put", "get", "download", "stat", "entries", "delete"]

ALWAYS: Final = 1 << 62
"""As `times`: until `clear`."""


class Kind(StrEnum):
    FAIL_BEFORE = "fail_before"
    """Unavailable, and nothing happened."""
    FAIL_AFTER = "fail_after"
    """Unavailable, though it took effect."""
    SLOW = "slow"
    """Right, after `seconds`."""
    CUT = "cut"
    """Of a read: Unavailable after `at` bytes; a download leaves those in its file."""
    TRUNCATE = "truncate"
    """Of a read: the bytes end at `at` as if the object were shorter."""
    FLIP = "flip"
    """Of a read: bit `at` (from the first byte's lowest) is wrong."""


_OF_READS: Final = frozenset({Kind.CUT, Kind.TRUNCATE, Kind.FLIP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What befalls the method `call` with a key (or prefix) that contains `key`: its calls number `nth` to `nth + times - 1`,
    counted from when the fault was set."""

    call: Call
    kind: Kind
    nth: int = 1
    times: int = 1
    key: str = ""
    at: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind in _OF_READS and self.call not in ("get", "download"):
            raise ValueError(f"{self.kind} is for get and download, not {self.call}")
        if self.nth < 1 or self.times < 1 or self.at < 0 or self.seconds < 0:
            raise ValueError("nth and times count from 1; at and seconds are not negative")


class FaultyStore(BlobStore):
    """Where several faults meet one call, the first set decides."""

    def __init__(self, inner: BlobStore, *faults: Fault, sleep: Callable[[float], None] = time.sleep) -> None:
        self._inner = inner
        self._sleep = sleep
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._seen: list[int] = []
        self._calls: list[tuple[Call, str]] = []
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)
            self._seen.append(0)

    def clear(self) -> None:
        """No more faults."""
        with self._lock:
            self._faults.clear()
            self._seen.clear()

    @property
    def calls(self) -> tuple[tuple[Call, str], ...]:
        """Every call so far: method and key or prefix."""
        with self._lock:
            return tuple(self._calls)

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, body: Body) -> Receipt:
        return self._around("put", key, lambda: self._inner.put(key, body))

    def put_named(self, key_of: Callable[[Digest], str], body: Body, *, cancelled: Cancelled = never) -> Receipt:
        return put_hashed_first(self, key_of, body, cancelled)

    def get(self, key: str, *, limit: int, expect: Digest | None = None) -> bytes:
        fault = self._begin("get", key)
        if fault is None or fault.kind not in _OF_READS:
            return self._finish(fault, key, lambda: self._inner.get(key, limit=limit, expect=expect))
        data = self._inner.get(key, limit=limit)
        if fault.kind is Kind.CUT:
            raise _failed(fault, key)
        return checked(key, _spoilt(fault, data), limit=limit, expect=expect)

    def download(self, expect: Receipt, path: Path) -> None:
        fault = self._begin("download", expect.key)
        self._finish(fault, expect.key, lambda: self._inner.download(expect, path))
        if fault is not None and fault.kind in _OF_READS:
            _spoil_file(fault, expect, path)

    def stat(self, key: str) -> Entry | None:
        return self._around("stat", key, lambda: self._inner.stat(key))

    def entries(self, prefix: str) -> Iterator[Entry]:
        return self._around("entries", prefix, lambda: self._inner.entries(prefix))

    def delete(self, key: str) -> None:
        self._around("delete", key, lambda: self._inner.delete(key))

    def sweep(self, older_than_s: float) -> int:
        return self._inner.sweep(older_than_s)

    def trials(self, prefix: str) -> Trials:
        return self._inner.trials(prefix)

    def close(self) -> None:
        self._inner.close()

    def _around(self, call: Call, key: str, act: Callable[[], Result]) -> Result:
        return self._finish(self._begin(call, key), key, act)

    def _begin(self, call: Call, key: str) -> Fault | None:
        with self._lock:
            self._calls.append((call, key))
            hit: Fault | None = None
            for index, fault in enumerate(self._faults):
                if fault.call == call and fault.key in key:
                    self._seen[index] += 1
                    if hit is None and fault.nth <= self._seen[index] < fault.nth + fault.times:
                        hit = fault
        return hit

    def _finish(self, fault: Fault | None, key: str, act: Callable[[], Result]) -> Result:
        if fault is not None:
            if fault.kind is Kind.FAIL_BEFORE:
                raise _failed(fault, key)
            if fault.kind is Kind.SLOW:
                self._sleep(fault.seconds)
        result = act()
        if fault is not None and fault.kind is Kind.FAIL_AFTER:
            raise _failed(fault, key)
        return result


def _failed(fault: Fault, key: str) -> Unavailable:
    return Unavailable(f"scripted: {fault.call} of {key!r}, {fault.kind}")


def _spoilt(fault: Fault, data: bytes) -> bytes:
    if fault.kind is Kind.TRUNCATE:
        return data[: fault.at]
    place, bit = divmod(fault.at, 8)
    if place >= len(data):
        return data
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]


def _spoil_file(fault: Fault, expect: Receipt, path: Path) -> None:
    """Makes of a right file what the fault makes of the download, and verifies it as every store does."""
    data = path.read_bytes()
    if fault.kind is Kind.CUT:
        path.write_bytes(data[: fault.at])
        raise _failed(fault, expect.key)
    path.write_bytes(_spoilt(fault, data))
    digest, size = digest_file(path)
    if (digest, size) != (expect.blake3, expect.size):
        path.unlink()
        if size != expect.size:
            raise CorruptObject(f"object {expect.key!r} has {size} bytes; {expect.size} were expected")
        raise differs(expect.key, digest, expect.blake3)
