"""blake3 of bytes, files and streams in bounded memory, and the verified, resumable download that the stores share.

One thread per hash: a single core hashes over 4 GB/s, which is more than disks and networks bring, and blake3's own thread pool
was measured slower for blocks below 4 MiB. Parallelism comes from several objects at once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import Digest
from stitch.store.port import BlobStore, Body, Cancelled, PutCancelled, Receipt

CHUNK_BYTES: Final = 1 << 20
"""Read at a time: amortises the calls, and some dozens of streams at once still need little memory."""


Stream = Generator[bytes, None, None]
"""Chunks of an object; closing it lets go of the file or the connection behind it."""


class Hasher:
    """blake3 of what it is fed, and how many bytes that were."""

    __slots__ = ("_hash", "size")

    def __init__(self) -> None:
        self._hash = blake3()
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self.size += len(data)

    @property
    def digest(self) -> Digest:
        return Digest(self._hash.hexdigest())


def digest_bytes(data: bytes | memoryview) -> Digest:
    return Digest(blake3(data).hexdigest())


def digest_chunks(chunks: Iterable[bytes | memoryview]) -> tuple[Digest, int]:
    """Digest and size in bytes."""
    hasher = Hasher()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.digest, hasher.size


def digest_file(path: Path) -> tuple[Digest, int]:
    """Digest and size in bytes."""
    with path.open("rb") as file:
        return digest_chunks(read_chunks(file))


def checked_body(body: Body) -> Body:
    """The body as a file that exists, bytes, or a flat view of bytes; InvalidRequest names `body`."""
    if isinstance(body, Path):
        if not body.is_file():
            raise InvalidRequest(f"body: there is no file {body}", field="body")
        return body
    if isinstance(body, memoryview):
        return body.cast("B") if body.c_contiguous else body.tobytes()
    return body


def digest_body(body: Body) -> tuple[Digest, int]:
    """Digest and size in bytes of a checked body."""
    if isinstance(body, Path):
        return digest_file(body)
    return digest_bytes(body), len(body)


def put_hashed_first(store: BlobStore, key_of: Callable[[Digest], str], body: Body, cancelled: Cancelled) -> Receipt:
    """`put_named` for stores that must know a key before they read the body."""
    digest, size = digest_chunks(until_cancelled(body_chunks(checked_body(body)), cancelled))
    receipt = store.put(key_of(digest), body)
    if (receipt.blake3, receipt.size) != (digest, size):
        raise CorruptObject(f"object {receipt.key!r}: the body was changed while it was uploaded")
    return receipt


def read_chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def body_chunks(body: Body) -> Iterator[bytes | memoryview]:
    if isinstance(body, Path):
        with body.open("rb") as file:
            yield from read_chunks(file)
        return
    view = memoryview(body)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def until_cancelled(chunks: Iterable[bytes | memoryview], cancelled: Cancelled) -> Iterator[bytes | memoryview]:
    """The chunks; PutCancelled in the place of the next one where nobody waits any more."""
    for chunk in chunks:
        if cancelled():
            raise PutCancelled("the upload was given up")
        yield chunk


def checked(key: str, data: bytes, *, limit: int, expect: Digest | None) -> bytes:
    """The data, or CorruptObject where it is longer than `limit` bytes or its digest is not `expect`."""
    if len(data) > limit:
        raise too_long(key, len(data), limit)
    if expect is not None and (found := digest_bytes(data)) != expect:
        raise differs(key, found, expect)
    return data


def too_long(key: str, size: int, limit: int) -> CorruptObject:
    return CorruptObject(f"object {key!r} has {size} bytes; at most {limit} were expected")


def differs(key: str, found: str, expect: str) -> CorruptObject:
    return CorruptObject(f"object {key!r} has blake3 {found}; {expect} was expected")


def download_verified(expect: Receipt, path: Path, fetch: Callable[[int], Stream]) -> None:
    """BlobStore.download over `fetch`, which yields the object's bytes from an offset on (none where it is shorter), and
    raises KeyError, before its first chunk, where there is no object, and Unavailable where the stream was cut.

    A whole and right file needs no fetch. What an earlier call left is hashed and continued; only the whole tells whether it
    was right, so a mismatch after a continuation says nothing about the store's object yet: all of it is fetched once more.
    """
    hasher = _hash_of_part(expect, path)
    if hasher.size == expect.size > 0:
        if hasher.digest == expect.blake3:
            return
        hasher = Hasher()
    resumed = hasher.size > 0
    fault = _fetch_rest(expect, path, hasher, fetch)
    if fault is not None and resumed:
        fault = _fetch_rest(expect, path, Hasher(), fetch)
    if fault is not None:
        path.unlink(missing_ok=True)
        raise fault


def _hash_of_part(expect: Receipt, path: Path) -> Hasher:
    hasher = Hasher()
    if path.exists() and path.stat().st_size <= expect.size:
        with path.open("rb") as file:
            for chunk in read_chunks(file):
                hasher.update(chunk)
    return hasher


def _fetch_rest(expect: Receipt, path: Path, hasher: Hasher, fetch: Callable[[int], Stream]) -> CorruptObject | None:
    with contextlib.closing(fetch(hasher.size)) as stream:
        first = next(stream, b"")  # raises KeyError before a file is made
        with path.open("r+b" if hasher.size else "wb") as file:
            file.seek(hasher.size)
            for chunk in itertools.chain((first,), stream):
                hasher.update(chunk)
                if hasher.size > expect.size:  # never fill a disk with what is wrong already
                    return too_long(expect.key, hasher.size, expect.size)
                file.write(chunk)
    if hasher.size != expect.size:
        return CorruptObject(f"object {expect.key!r} has {hasher.size} bytes; {expect.size} were expected")
    if hasher.digest != expect.blake3:
        return differs(expect.key, hasher.digest, expect.blake3)
    return None
