"""An S3 server in a thread that keeps, or on purpose breaks, what a store must promise. For the probe that must find it out.

It knows only as much of S3 as Stitch uses, and checks no signatures. With no flaw set it is right, so what the probe finds in it is
the flaw's doing.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import time
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TRAILER: Final = b"\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"


class Flaw(StrEnum):
    IGNORES_CONDITIONS = "ignores If-None-Match"
    LOOKS_THEN_WRITES = "checks If-None-Match, and writes without holding what it saw"
    IGNORES_CONDITIONS_IN_PARTS = "ignores If-None-Match when an upload in parts is completed"
    IGNORES_CHECKSUMS = "keeps what does not fit its checksum"
    KEEPS_TRAILERS = "writes a part of the request's framing into the object"
    FORBIDS_LISTING = "allows no listing"
    FORBIDS_DELETING = "allows no deleting"
    FORBIDS_WRITING = "allows no writing"
    CLOCK_IS_OFF = "its clock is an hour ahead"


@dataclass(slots=True)
class UnsafeS3:
    flaws: frozenset[Flaw]
    objects: dict[str, tuple[bytes, dict[str, str]]] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    racers: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    numbers: Iterator[int] = field(default_factory=itertools.count)
    endpoint: str = ""


@contextlib.contextmanager
def unsafe_s3(*flaws: Flaw) -> Iterator[UnsafeS3]:
    state = UnsafeS3(frozenset(flaws))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: UnsafeS3
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _begin(self) -> None:
        parts = urlsplit(self.path)
        self.name = unquote(parts.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _has(self, flaw: Flaw) -> bool:
        return flaw in self.state.flaws

    def do_PUT(self) -> None:
        self._begin()
        if self._has(Flaw.FORBIDS_WRITING):
            return self._refuse(403, "AccessDenied")
        sent = self.headers.get("x-amz-checksum-crc32")
        right = base64.b64encode(zlib.crc32(self.body).to_bytes(4, "big")).decode()
        if sent is not None and sent != right and not self._has(Flaw.IGNORES_CHECKSUMS):
            return self._refuse(400, "BadDigest")
        if self._has(Flaw.KEEPS_TRAILERS):
            self.body += TRAILER
        if "uploadId" in self.query:
            self.state.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = self.body
            return self._answer(200, etag=True)
        metadata = {name.lower(): value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}
        return self._create(self.body, metadata, flaw=Flaw.IGNORES_CONDITIONS)

    def do_POST(self) -> None:
        self._begin()
        if "uploads" in self.query:
            number = f"u{next(self.state.numbers)}"
            self.state.uploads[number] = {}
            self.state.metadata[number] = {n.lower(): v for n, v in self.headers.items() if n.lower().startswith("x-amz-meta-")}
            return self._answer(
                200, f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>".encode()
            )
        parts = self.state.uploads[self.query["uploadId"]]
        body = b"".join(parts[number] for number in sorted(parts))
        return self._create(body, self.state.metadata[self.query["uploadId"]], flaw=Flaw.IGNORES_CONDITIONS_IN_PARTS)

    def _create(self, body: bytes, metadata: dict[str, str], *, flaw: Flaw) -> None:
        conditional = self.headers.get("If-None-Match") == "*" and not self._has(flaw)
        if conditional and self._has(Flaw.LOOKS_THEN_WRITES):
            seen = self.name in self.state.objects
            with contextlib.suppress(threading.BrokenBarrierError):
                self.state.racers.wait(0.1)  # another that looked, too
            self.state.racers.reset()
            if seen:
                return self._refuse(412, "PreconditionFailed")
            conditional = False
        with self.state.lock:
            if conditional and self.name in self.state.objects:
                return self._refuse(412, "PreconditionFailed")
            self.state.objects[self.name] = (body, metadata)
        return self._answer(200, b"<CompleteMultipartUploadResult/>" if self.command == "POST" else b"", etag=True)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self._begin()
        if "list-type" in self.query:
            return self._list()
        found = self.state.objects.get(self.name)
        if found is None:
            return self._refuse(404, "NoSuchKey")
        return self._answer(200, found[0], headers=found[1])

    def _list(self) -> None:
        if self._has(Flaw.FORBIDS_LISTING):
            return self._refuse(403, "AccessDenied")
        bucket = f"{self.name.rstrip('/')}/"
        rows = "".join(
            f"<Contents><Key>{escape(name.removeprefix(bucket))}</Key><Size>{len(body)}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, (body, _) in sorted(self.state.objects.items())
            if name.startswith(bucket + self.query.get("prefix", ""))
        )
        return self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode())

    def do_DELETE(self) -> None:
        self._begin()
        if self._has(Flaw.FORBIDS_DELETING):
            return self._refuse(403, "AccessDenied")
        if "uploadId" in self.query:
            self.state.uploads.pop(self.query["uploadId"], None)
        else:
            self.state.objects.pop(self.name, None)
        return self._answer(204)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _answer(self, status: int, body: bytes = b"", *, etag: bool = False, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        self.send_header("Date", formatdate(time() + 3600 * self._has(Flaw.CLOCK_IS_OFF), usegmt=True))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        if etag:
            self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
