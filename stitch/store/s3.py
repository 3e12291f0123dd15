"""BlobStore in an S3 bucket: `s3://bucket/prefix?endpoint=URL&region=R`. Needs the extra `s3` (boto3).

Create-once is the server's own condition (`If-None-Match: *`). Every upload carries its SHA-256, so the server refuses what was
mangled on the way, and its blake3 as metadata, so an equal upload is recognised without a download. Credentials come from
boto3's usual chain, never from the URL. A server that ignores conditions or checksums (many look-alikes do) is not safe to use.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from stitch.core.errors import InvalidRequest, StitchError, Unavailable, VersionConflict
from stitch.core.ids import Digest
from stitch.store.hashing import Stream, checked, checked_body, digest_body, digest_chunks, download_verified, too_long
from stitch.store.keys import check_key, check_prefix, is_key
from stitch.store.port import MAX_KEY_BYTES, BlobStore, Body, Entry, Receipt
from stitch.store.s3_calls import TRIES, Refusal, S3Calls, pause_before

MIB: Final = 1 << 20
PART_BYTES: Final = 64 * MIB
"""Large enough that a checkpoint is some hundred requests, small enough that a lost one costs a second."""
MAX_PARTS: Final = 10_000
"""S3's own limit on a multipart upload."""
PARTS_AT_ONCE: Final = 4
"""For the whole store: enough to fill a fast link, and a bound on memory of as many parts."""
LOOK_FIRST_BYTES: Final = MIB
"""From this size on, a put first asks whether the object is there: one round trip instead of uploading it all again."""
CREATE_TRIES: Final = 8
"""Of a create that collides with others (409) or with a delete; each waits longer, with jitter."""
_MAX_PREFIX_BYTES: Final = 1024 - MAX_KEY_BYTES - 1
"""S3 allows a whole key 1,024 bytes; one is the slash between."""

_DIGEST_METADATA: Final = "blake3"
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_REGION = re.compile(r"[a-z0-9-]{1,64}\Z")
_TAKEN: Final = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchUpload"})
"""The name is taken, or another create is under way, or our own upload was completed by a call whose answer was lost."""
_BEYOND_END: Final = frozenset({"InvalidRange", "416"})


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Place:
    """What the URL says. `prefix` is empty or ends with a slash; `endpoint` None means AWS itself."""

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None

    @property
    def url(self) -> str:
        query = "&".join(
            f"{name}={quote(value, safe=':/')}"
            for name, value in (("endpoint", self.endpoint), ("region", self.region))
            if value is not None
        )
        place = quote(f"{self.bucket}/{self.prefix}".rstrip("/"))
        return f"s3://{place}?{query}" if query else f"s3://{place}"


class S3Store(BlobStore):
    """The objects of a bucket below a prefix. `part_bytes` (at least 5 MiB, S3's limit) is the size of a large one's parts."""

    def __init__(self, place: S3Place, *, part_bytes: int = PART_BYTES) -> None:
        self._place = place
        self._calls = S3Calls(place.url, bucket=place.bucket, endpoint=place.endpoint, region=place.region)
        self._part_bytes = part_bytes
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._place.url

    def put(self, key: str, body: Body) -> Receipt:
        name = self._name(key)
        body = checked_body(body)
        if isinstance(body, Path) and body.stat().st_size <= self._part_bytes:
            body = body.read_bytes()
        digest, size = digest_body(body)
        receipt = Receipt(key=key, size=size, blake3=digest)
        if size >= LOOK_FIRST_BYTES and self._holds(name, receipt):
            return receipt
        for attempt in range(1, CREATE_TRIES + 1):
            if self._create(name, body, receipt) or self._holds(name, receipt):
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
        download_verified(expect, path, lambda offset: self._stream(name, expect.key, offset, limit=None))

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

    def close(self) -> None:
        with self._pool_lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._calls.close()

    def _name(self, key: str) -> str:
        return self._place.prefix + check_key(key)

    def _holds(self, name: str, wanted: Receipt) -> bool:
        """False where there is no object; VersionConflict where there is another."""
        try:
            head = self._calls.call("head_object", Key=name)
            size, digest = int(head["ContentLength"]), head["Metadata"].get(_DIGEST_METADATA, "")
            if size == wanted.size and not _DIGEST.match(digest):  # written by another tool
                digest, size = digest_chunks(self._stream(name, wanted.key, 0, limit=None))
        except KeyError:
            return False
        if (digest, size) != (wanted.blake3, wanted.size):
            raise VersionConflict(
                f"object {wanted.key!r} exists with {size} bytes, blake3 {digest or 'unknown'}, not {wanted.blake3}"
            )
        return True

    def _create(self, name: str, body: Body, receipt: Receipt) -> bool:
        """Whether this call made the object. Where not, another may exist, or may not."""
        try:
            if receipt.size > self._part_bytes:
                self._put_in_parts(name, body, receipt)
            else:
                data = body.read_bytes() if isinstance(body, Path) else bytes(body)
                self._calls.call(
                    "put_object",
                    Key=name,
                    Body=data,
                    IfNoneMatch="*",
                    ChecksumSHA256=_sha256(data),
                    Metadata={_DIGEST_METADATA: receipt.blake3},
                )
        except Refusal as refusal:
            if refusal.code in _TAKEN:
                return False
            raise
        return True

    def _put_in_parts(self, name: str, body: Body, receipt: Receipt) -> None:
        made = self._calls.call(
            "create_multipart_upload",
            Key=name,
            ChecksumAlgorithm="SHA256",
            Metadata={_DIGEST_METADATA: receipt.blake3},
        )
        upload = {"Key": name, "UploadId": made["UploadId"]}
        try:
            parts = self._upload_parts(upload, body, receipt.size)
            self._calls.call("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*")
        except BaseException:
            with contextlib.suppress(StitchError, KeyError):  # what matters is why it failed; an upload left over is no object
                self._calls.call("abort_multipart_upload", **upload)
            raise

    def _upload_parts(self, upload: dict[str, str], body: Body, size: int) -> list[dict[str, Any]]:
        length = max(self._part_bytes, math.ceil(size / MAX_PARTS))
        pool = self._part_pool()
        futures = [
            pool.submit(self._upload_part, upload, number, body, start, min(length, size - start))
            for number, start in enumerate(range(0, size, length), start=1)
        ]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # no part may arrive after the abort

    def _upload_part(self, upload: dict[str, str], number: int, body: Body, start: int, length: int) -> dict[str, Any]:
        data = _slice(body, start, length)
        checksum = _sha256(data)
        answer = self._calls.call("upload_part", **upload, PartNumber=number, Body=data, ChecksumSHA256=checksum)
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

    def _part_pool(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="stitch-s3")
            return self._pool

    def _stream(self, name: str, key: str, offset: int, *, limit: int | None) -> Stream:
        """The object's bytes from `offset` on, continued where the connection breaks. CorruptObject past `limit`."""
        fruitless = 0
        while True:
            span = {"Range": f"bytes={offset}-"} if offset else {}
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
                if offset and "ContentRange" not in answer:
                    raise InvalidRequest(f"store: {self.url} ignores ranges, so a download cannot be continued", field="store")
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


def _sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _slice(body: Body, start: int, length: int) -> bytes:
    if not isinstance(body, Path):
        return bytes(memoryview(body)[start : start + length])
    with body.open("rb") as file:
        file.seek(start)
        data = file.read(length)
    if len(data) != length:
        raise InvalidRequest(f"body: {body} was cut short while it was uploaded", field="body")
    return data


def open_s3(url: str) -> S3Store:
    return S3Store(parse_s3(url))


def parse_s3(url: str) -> S3Place:
    """The parts of `s3://bucket/prefix?endpoint=URL&region=R`; InvalidRequest says which one is wrong, without repeating it."""
    try:
        parts = urlsplit(url)
        prefix = unquote(parts.path, errors="strict").strip("/")
    except ValueError as error:
        raise _bad("not a URL of the form s3://BUCKET/PREFIX?endpoint=URL&region=R") from error
    if "@" in parts.netloc:
        raise _bad("credentials do not belong into the URL; boto3 finds them in the environment or its files")
    if not _BUCKET.match(parts.netloc):
        raise _bad("s3:// needs a bucket's name of 3 to 63 of a-z 0-9 . -")
    if parts.fragment:
        raise _bad("an s3:// URL has no fragment")
    if prefix and (not is_key(prefix) or len(prefix.encode()) > _MAX_PREFIX_BYTES):
        raise _bad(f"the prefix must be a key of at most {_MAX_PREFIX_BYTES} bytes, without empty or dotted segments")
    endpoint, region = _parameters(parts.query)
    if endpoint is not None:
        _check_endpoint(endpoint)
    if region is not None and not _REGION.match(region):
        raise _bad("region is not a region's name")
    return S3Place(bucket=parts.netloc, prefix=f"{prefix}/" if prefix else "", endpoint=endpoint, region=region)


def _parameters(query: str) -> tuple[str | None, str | None]:
    """Endpoint and region."""
    found = parse_qsl(query, keep_blank_values=True)
    names = [name for name, _ in found]
    if not set(names) <= {"endpoint", "region"} or len(names) > len(set(names)):
        raise _bad("an s3:// URL takes endpoint and region, each once, and nothing else")
    values = dict(found)
    return values.get("endpoint"), values.get("region")


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        parts.port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise _bad("endpoint is not a URL") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _bad("endpoint must be an http:// or https:// URL")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise _bad("endpoint must hold a host, a port and perhaps a path, and no credentials")


def _bad(reason: str) -> InvalidRequest:
    return InvalidRequest(f"store: {reason}", field="store")
