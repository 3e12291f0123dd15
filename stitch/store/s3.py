"""BlobStore in an S3 bucket: `s3://bucket/prefix?endpoint=URL&region=R&addressing=path|virtual`. Needs the extra `s3` (boto3).

Create-once is the server's own condition (`If-None-Match: *`). Every upload carries its CRC-32, so the server refuses what was
mangled on the way, and its blake3 as metadata, so an equal upload is recognised without a download. Credentials come from
boto3's usual chain, never from the URL. A server that ignores conditions or checksums (many look-alikes do) is not safe to use.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from stitch.core.errors import InvalidRequest, Unavailable, VersionConflict
from stitch.core.ids import Digest
from stitch.store.fingerprint import body_size
from stitch.store.hashing import Stream, checked, checked_body, digest_chunks, download_verified, too_long
from stitch.store.keys import check_key, check_prefix, is_key
from stitch.store.port import BlobStore, Body, Cancelled, Entry, Receipt, Trials, never
from stitch.store.read_ahead import RANGE_BYTES, ReadAhead
from stitch.store.s3_calls import TRIES, Refusal, S3Calls, pause_before
from stitch.store.s3_place import S3Place, parse_s3
from stitch.store.s3_upload import DIGEST_METADATA, PART_BYTES, Uploads

__all__ = ["S3Place", "S3Store", "open_s3", "parse_s3"]

LOOK_FIRST_BYTES: Final = 1 << 20
"""From this size on, a put first asks whether the object is there: one round trip instead of uploading it all again."""
CREATE_TRIES: Final = 8
"""Of a create that collides with others (409) or with a delete; each waits longer, with jitter."""

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_BEYOND_END: Final = frozenset({"InvalidRange", "416"})


class S3Store(BlobStore):
    """The objects of a bucket below a prefix.

    `part_bytes` (at least 5 MiB, S3's limit) is the size of a large one's parts on the way up, `range_bytes` on the way down.
    """

    def __init__(self, place: S3Place, *, part_bytes: int = PART_BYTES, range_bytes: int = RANGE_BYTES) -> None:
        self._place = place
        self._calls = S3Calls(place)
        self._uploads = Uploads(self._calls, part_bytes=part_bytes)
        self._read_ahead = ReadAhead(range_bytes=range_bytes)

    @property
    def url(self) -> str:
        return self._place.url

    def put(self, key: str, body: Body) -> Receipt:
        self._name(key)  # refused before the body is read
        return self._put(lambda _: key, body, never)

    def put_named(self, key_of: Callable[[Digest], str], body: Body, *, cancelled: Cancelled = never) -> Receipt:
        return self._put(key_of, body, cancelled)

    def _put(self, key_of: Callable[[Digest], str], body: Body, cancelled: Cancelled) -> Receipt:
        body = checked_body(body)
        with self._uploads.taken_in(body, body_size(body), cancelled) as (taken, found):
            key = key_of(found.blake3)
            name = self._name(key)
            receipt = Receipt(key=key, size=found.size, blake3=found.blake3)
            if receipt.size >= LOOK_FIRST_BYTES and self._holds(name, receipt):
                return receipt
            for attempt in range(1, CREATE_TRIES + 1):
                if self._uploads.create(name, taken, found, cancelled) or self._holds(name, receipt):
                    return receipt
                pause_before(attempt)
            raise Unavailable(f"store {self.url}: creating {key!r} keeps colliding with others")

    def get(self, key: str, *, limit: int, expect: Digest | None = None) -> bytes:
        name = self._name(key)
        with contextlib.closing(self._stream(name, key, 0, limit=limit)) as chunks:
            data = b"".join(chunks)
        return checked(key, data, limit=limit, expect=expect)

    def download(self, expect: Receipt, path: Path) -> None:
        name = self._name(expect.key)

        def fetch(start: int, end: int | None) -> Stream:
            return self._stream(name, expect.key, start, end=end, limit=None)

        download_verified(expect, path, lambda offset: self._read_ahead.stream(fetch, offset, expect.size))

    def stat(self, key: str) -> Entry | None:
        try:
            head = self._calls.call("head_object", Key=self._name(key))
        except KeyError:
            return None
        return _entry(key, int(head["ContentLength"]), head["LastModified"])

    def entries(self, prefix: str) -> Iterator[Entry]:
        return self._list(self._place.prefix + check_prefix(prefix))

    def delete(self, key: str) -> None:
        with contextlib.suppress(KeyError):
            self._calls.call("delete_object", Key=self._name(key))

    def sweep(self, older_than_s: float) -> int:
        return self._uploads.abort_left_over(self._place.prefix, older_than_s)

    def trials(self, prefix: str) -> Trials:
        mangled, parts = self._name(f"{prefix}/mangled"), self._name(f"{prefix}/parts")
        return Trials(
            checksums=not self._uploads.takes_mangled(mangled),
            conditional_parts=not self._uploads.overwrites_in_parts(parts),
            clock_skew_s=self._uploads.clock_skew_s(parts),
        )

    def close(self) -> None:
        self._uploads.close()
        self._read_ahead.close()
        self._calls.close()

    def _name(self, key: str) -> str:
        return self._place.prefix + check_key(key)

    def _holds(self, name: str, wanted: Receipt) -> bool:
        """False where there is no object; VersionConflict where there is another."""
        try:
            head = self._calls.call("head_object", Key=name)
            told = {name.lower(): value for name, value in head["Metadata"].items()}  # some proxies write them Like-This
            size, digest = int(head["ContentLength"]), told.get(DIGEST_METADATA, "")
            if size == wanted.size and not _DIGEST.match(digest):  # written by another tool
                digest, size = digest_chunks(self._stream(name, wanted.key, 0, limit=None))
        except KeyError:
            return False
        if (digest, size) != (wanted.blake3, wanted.size):
            raise VersionConflict(
                f"object {wanted.key!r} exists with {size} bytes, blake3 {digest or 'unknown'}, not {wanted.blake3}"
            )
        return True

    def _stream(self, name: str, key: str, offset: int, *, end: int | None = None, limit: int | None) -> Stream:
        """The object's bytes from `offset` to before `end`, continued where the connection breaks. CorruptObject past `limit`."""
        fruitless = 0
        while True:
            span = _range(offset, end)
            try:
                answer = self._calls.call("get_object", Key=name, **span)
            except KeyError:
                raise KeyError(key) from None
            except Refusal as refusal:
                if refusal.code in _BEYOND_END:
                    return
                raise
            with contextlib.closing(answer["Body"]) as body:
                length = int(answer["ContentLength"])
                if limit is not None and offset + length > limit:
                    raise too_long(key, offset + length, limit)
                if span and "ContentRange" not in answer:
                    raise InvalidRequest(f"store: {self.url} ignores ranges, which downloads are made of", field="store")
                try:
                    for chunk in self._calls.read(body):
                        offset += len(chunk)
                        fruitless = 0
                        yield chunk
                except Unavailable:
                    fruitless += 1
                    if fruitless >= TRIES:
                        raise
                else:
                    return
            if offset == end:
                return
            pause_before(fruitless)

    def _list(self, beginning: str) -> Iterator[Entry]:
        page: dict[str, str] = {}
        while True:
            answer = self._calls.call("list_objects_v2", Prefix=beginning, **page)
            for row in answer.get("Contents", ()):
                key = row["Key"][len(self._place.prefix) :]
                if is_key(key):
                    yield _entry(key, int(row["Size"]), row["LastModified"])
            if not answer.get("IsTruncated"):
                return
            page = {"ContinuationToken": answer["NextContinuationToken"]}


def _entry(key: str, size: int, modified: datetime) -> Entry:
    return Entry(key=key, size=size, modified_ms=int(modified.timestamp() * 1000))


def _range(offset: int, end: int | None) -> dict[str, str]:
    """The parameter that asks for these bytes; none where they are the whole object."""
    if end is None:
        return {"Range": f"bytes={offset}-"} if offset else {}
    return {"Range": f"bytes={offset}-{end - 1}"}


def open_s3(url: str) -> S3Store:
    return S3Store(parse_s3(url))
