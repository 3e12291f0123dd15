"""How an object gets into a bucket: whole or in parts, created once, checked by the server, within a bound on memory."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

from stitch.core.errors import StitchError, Unavailable
from stitch.store.fingerprint import Fingerprint, changed, crc32, fingerprint, read_part
from stitch.store.port import Body, Cancelled, PutCancelled, never
from stitch.store.s3_calls import Refusal, S3Calls

MIB: Final = 1 << 20
PART_BYTES: Final = 64 * MIB
"""Large enough that a checkpoint is some hundred requests, small enough that a lost one costs a second."""
MAX_PARTS: Final = 10_000
"""S3's own limit on a multipart upload."""
PARTS_AT_ONCE: Final = 4
"""For the whole store: enough to fill a fast link, and a bound on memory of as many parts."""
SMALL_BYTES: Final = MIB
"""Bodies up to here take no part's room in memory, so that a manifest never waits for a checkpoint."""
SMALLEST_PART_BYTES: Final = 5 * MIB
"""S3's own limit, for all parts but the last."""
HALF_SECOND: Final = 0.5
"""A server tells its time in whole seconds, cut off."""
DIGEST_METADATA: Final = "blake3"

_TAKEN: Final = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchUpload"})
"""The name is taken, or another create is under way, or our own upload was completed by a call whose answer was lost."""


class Uploads:
    """The threads and the bound on memory that all uploads of one store share."""

    def __init__(self, calls: S3Calls, *, part_bytes: int) -> None:
        self._calls = calls
        self._part_bytes = part_bytes
        self._room = threading.BoundedSemaphore(PARTS_AT_ONCE)
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="stitch-s3-put")

    def close(self) -> None:
        """Waits for the requests in hand."""
        self._pool.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def taken_in(self, body: Body, size: int, cancelled: Cancelled) -> Iterator[tuple[Body, Fingerprint]]:
        """The body, in memory where one request can carry it, and all that is to be known of it."""
        if size > self._part_bytes:
            yield body, fingerprint(body, max(self._part_bytes, math.ceil(size / MAX_PARTS)), cancelled)
            return
        with self._room if size > SMALL_BYTES else contextlib.nullcontext():
            data = body.read_bytes() if isinstance(body, Path) else body
            yield data, fingerprint(data, self._part_bytes, cancelled)

    def create(self, name: str, body: Body, print_: Fingerprint, cancelled: Cancelled) -> bool:
        """Whether this call made the object. Where not, another may exist, or may not. `cancelled` is asked before each part."""
        try:
            if len(print_.checksums) == 1:
                self._put(name, body, print_)
            else:
                self._put_in_parts(name, body, print_, cancelled)
        except Refusal as refusal:
            if refusal.code in _TAKEN:
                return False
            raise
        return True

    def abort_left_over(self, beginning: str, older_than_s: float) -> int:
        """Ends the uploads in parts of names that begin so, and that began so long ago by the server's own clock."""
        page: dict[str, str] = {}
        ended = 0
        while True:
            answer = self._calls.call("list_multipart_uploads", Prefix=beginning, **page)
            now = _date(answer) + timedelta(seconds=1)  # the end of the second that the server tells
            for upload in answer.get("Uploads", ()):
                if (now - upload["Initiated"]).total_seconds() >= older_than_s:
                    ended += self._abort({"Key": upload["Key"], "UploadId": upload["UploadId"]})
            if not answer.get("IsTruncated"):
                return ended
            page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def takes_mangled(self, name: str) -> bool:
        """Whether the server keeps bytes that do not fit their checksum."""
        try:
            self._calls.once("put_object", Key=name, Body=b"mangled", ChecksumCRC32=crc32(b"whole"))
        except (Refusal, Unavailable):  # either way of saying it; what cannot be reached is learnt from the other trials
            return False
        return True

    def overwrites_in_parts(self, name: str) -> bool:
        """Whether an upload in parts replaces an object that came in parts, too: some servers honour conditions on others only."""
        self._put_in_parts(name, b"first", fingerprint(b"first", SMALLEST_PART_BYTES))
        try:
            self._put_in_parts(name, b"second", fingerprint(b"second", SMALLEST_PART_BYTES))
        except Refusal as refusal:
            if refusal.code not in _TAKEN:
                raise
            return False
        return True

    def clock_skew_s(self, name: str) -> float:
        """Seconds that the server's clock is ahead of this machine's, to half a second."""
        before = time.time()
        answer = self._calls.call("head_object", Key=name)
        middle = (before + time.time()) / 2
        return _date(answer).timestamp() + HALF_SECOND - middle

    def _put(self, name: str, body: Body, print_: Fingerprint) -> None:
        self._calls.call(
            "put_object",
            Key=name,
            Body=bytes(read_part(body, 0, print_.size)),
            IfNoneMatch="*",
            ChecksumCRC32=print_.checksums[0],
            Metadata={DIGEST_METADATA: print_.blake3},
        )

    def _put_in_parts(self, name: str, body: Body, print_: Fingerprint, cancelled: Cancelled = never) -> None:
        made = self._calls.call(
            "create_multipart_upload", Key=name, ChecksumAlgorithm="CRC32", Metadata={DIGEST_METADATA: print_.blake3}
        )
        upload = {"Key": name, "UploadId": made["UploadId"]}
        try:
            parts = self._put_parts(upload, body, print_, cancelled)
            self._calls.call("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*")
        except BaseException:
            with contextlib.suppress(StitchError):  # what matters is why it failed; an upload left over is no object
                self._abort(upload)
            raise

    def _put_parts(self, upload: dict[str, str], body: Body, print_: Fingerprint, cancelled: Cancelled) -> list[dict[str, Any]]:
        numbers = range(1, len(print_.checksums) + 1)
        futures = [self._pool.submit(self._put_part, upload, body, number, print_, cancelled) for number in numbers]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # no part may arrive after the abort

    def _put_part(
        self, upload: dict[str, str], body: Body, number: int, print_: Fingerprint, cancelled: Cancelled
    ) -> dict[str, Any]:
        start = (number - 1) * print_.part_bytes
        checksum = print_.checksums[number - 1]
        with self._room:
            if cancelled():
                raise PutCancelled("the upload was given up")
            data = bytes(read_part(body, start, min(print_.part_bytes, print_.size - start)))
            try:
                answer = self._calls.call("upload_part", **upload, PartNumber=number, Body=data, ChecksumCRC32=checksum)
            except Unavailable as error:
                if crc32(data) != checksum:  # not the network: these are other bytes than those that were read before
                    raise changed(body) from error
                raise
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": checksum}

    def _abort(self, upload: dict[str, str]) -> bool:
        """False where it has ended already."""
        try:
            self._calls.call("abort_multipart_upload", **upload)
        except KeyError:
            return False
        except Refusal as refusal:
            if refusal.code != "NoSuchUpload":
                raise
            return False
        return True


def _date(answer: dict[str, Any]) -> datetime:
    """The server's clock when it answered."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
