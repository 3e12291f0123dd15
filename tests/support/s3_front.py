"""A proxy before a real S3 server that misbehaves by script: `front.script(Fault(…))`. All else is passed on as it is."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})
FORWARD_TIMEOUT_S: Final = 60.0


class Kind(StrEnum):
    ANSWER = "answer"
    """An error of S3's, by `status` and `code`; the server sees nothing."""
    RESET = "reset"
    """The connection is reset; the server sees nothing."""
    LOSE = "lose"
    """The server does it, and the connection is reset instead of its answer."""
    CUT = "cut"
    """`at` bytes of the answer's body, and then a reset."""
    SLOW = "slow"
    """Right, after `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What befalls the next `times` requests of a method whose path, query and range (`/bucket/key?a=b bytes=0-9`) contain
    `contains`."""

    method: str
    kind: Kind
    contains: str = ""
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    at: int = 0
    seconds: float = 0.0


class Front:
    """`seen` holds method, and path, query and range, of each request in order of arrival."""

    def __init__(self, endpoint: str) -> None:
        self.upstream: Final = urlsplit(endpoint).netloc
        self.seen: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._faults: list[list[Any]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"front": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def script(self, *faults: Fault) -> None:
        with self._lock:
            self._faults += [[fault, fault.times] for fault in faults]

    def count(self, method: str, contains: str = "") -> int:
        with self._lock:
            return sum(seen == method and contains in path for seen, path in self.seen)

    def meet(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.seen.append((method, path))
            for row in self._faults:
                if row[1] and row[0].method == method and row[0].contains in path:
                    row[1] -= 1
                    return row[0]  # type: ignore[no-any-return]
        return None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def front_of(endpoint: str) -> Iterator[Front]:
    front = Front(endpoint)
    try:
        yield front
    finally:
        front.close()


class _Handler(BaseHTTPRequestHandler):
    front: Front
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.front.meet(self.command, f"{self.path} {self.headers.get('Range', '')}")
        kind = None if fault is None else fault.kind
        if fault is None:
            self._answer(*self._forward(body))
        elif kind is Kind.ANSWER:
            text = f"<Error><Code>{fault.code}</Code><Message>scripted</Message></Error>".encode()
            self._answer(fault.status, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else text)
        elif kind is Kind.SLOW:
            time.sleep(fault.seconds)
            self._answer(*self._forward(body))
        else:
            if kind is not Kind.RESET:
                answer = self._forward(body)
                if kind is Kind.CUT:
                    self._answer(*answer, cut=fault.at)
            self._reset()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        with contextlib.closing(http.client.HTTPConnection(self.front.upstream, timeout=FORWARD_TIMEOUT_S)) as upstream:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: int | None = None) -> None:
        length = str(len(body))
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
            elif name.lower() == "content-length" and self.command == "HEAD":
                length = value
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body if cut is None else body[:cut])

    def _reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RD)

    def log_message(self, *_: object) -> None:
        pass
