"""The client of a replica or an engine: raw bytes there and back, and a truthful word about how far a failed request came.

The pool and the protocol are aiohttp's. Nothing outside this module knows that.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from stitch.core.errors import StitchError
from stitch.http.headers import RawHeaders, find, raw

CONNECT_SECONDS: Final = 5.0
"""Bound on opening a connection: within a cluster it takes milliseconds, or never comes."""
KEEP_ALIVE_SECONDS: Final = 4.0
"""How long an idle connection is kept. Common servers close theirs after 5 s; using one just as it closes loses a request."""
READ_BUFFER: Final = 256 * 1024
"""Bytes of an answer held before the upstream is slowed down."""
MAX_ANSWER: Final = 256 * 1024 * 1024
"""Default bound on an answer that is read whole."""

_SKIPPED: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_LARGE_BODY: Final = 1024 * 1024
"""From here on aiohttp sends a body in pieces, and wants it as a file."""


class Stage(StrEnum):
    """How far a request came before it failed."""

    NOT_SENT = "not_sent"
    """No connection: the other side knows nothing of it."""
    UNANSWERED = "unanswered"
    """Sent, perhaps in part; the connection ended, or the time did, before the first byte of an answer."""
    MIDWAY = "midway"
    """The answer broke off."""


class UpstreamError(StitchError):
    """The upstream could not be reached or went away. `stage` tells what may have happened there."""

    def __init__(self, message: str, *, stage: Stage, timed_out: bool = False) -> None:
        super().__init__(message)
        self.stage = stage
        self.timed_out = timed_out
        """Whether the caller's own bound on the first byte ended it."""

    @property
    def may_have_started(self) -> bool:
        """Whether the upstream may have begun to work on the request."""
        return self.stage is not Stage.NOT_SENT


class UpstreamResponse:
    """An answer whose headers are here and whose body may be still to come. Close it, or read it to its end."""

    __slots__ = ("_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: tuple[tuple[bytes, bytes], ...] = tuple((name.lower(), value) for name, value in response.raw_headers)

    def header(self, name: str) -> str | None:
        """The value of a header, by its name in any case."""
        value = find(self.headers, raw(name))
        return None if value is None else value.decode("latin-1")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises UpstreamError(MIDWAY) where it breaks off. To end early, call `close`."""
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(f"the answer of {self._response.url} broke off: {error!r}", stage=Stage.MIDWAY) from error
        finally:
            if not content.at_eof():
                self.close()

    async def read(self, limit: int = MAX_ANSWER) -> bytes:
        """The whole body. Raises UpstreamError(MIDWAY) where it breaks off or has more than `limit` bytes."""
        parts, size = [], 0
        async for chunk in self.chunks():
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                self.close()
                raise UpstreamError(f"the answer of {self._response.url} has more than {limit} bytes", stage=Stage.MIDWAY)
        return b"".join(parts)

    def close(self) -> None:
        """Ends it. Before the body's end this closes the connection, by which the upstream notices; after it, nothing is lost."""
        self._response.close()


class Upstream:
    """A pool of connections to any number of upstreams. Belongs to the event loop that it is first used on."""

    def __init__(self, *, connect_timeout: float = CONNECT_SECONDS, keep_alive: float = KEEP_ALIVE_SECONDS) -> None:
        self._connect_timeout, self._keep_alive = connect_timeout, keep_alive
        self._session: aiohttp.ClientSession | None = None

    async def open(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        *,
        first_byte_timeout: float | None = None,
    ) -> UpstreamResponse:
        """Sends the request and returns at the answer's headers. Redirects are answers, bodies are not decompressed.

        `headers` are sent as they are, without those of one hop (see `headers.to_forward`); Host and Content-Length are added.
        `first_byte_timeout` bounds all up to the answer's headers, in seconds. Raises UpstreamError.
        """
        session = self._session or self._start()
        data = body if len(body) < _LARGE_BODY else io.BytesIO(body)
        try:
            target, pairs = URL(url, encoded=True), _multidict(headers)
        except ValueError as error:
            raise UpstreamError(f"{url}: not an address: {error}", stage=Stage.NOT_SENT) from error
        try:
            async with asyncio.timeout(first_byte_timeout):
                response = await session.request(method, target, data=data or None, headers=pairs, allow_redirects=False)
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                message = f"{url}: no connection within {self._connect_timeout:g} s"
                raise UpstreamError(message, stage=Stage.NOT_SENT) from error
            message = f"{url}: no answer within {first_byte_timeout:g} s"
            raise UpstreamError(message, stage=Stage.UNANSWERED, timed_out=True) from error
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise UpstreamError(f"{url}: not reached: {error}", stage=Stage.NOT_SENT) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UpstreamError(f"{url}: gone before it answered: {error!r}", stage=Stage.UNANSWERED) from error
        return UpstreamResponse(response)

    async def aclose(self) -> None:
        """Closes every connection. May be called twice."""
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _start(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keep_alive),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_SKIPPED,
            read_bufsize=READ_BUFFER,
            # Header sizes of answers are bounded by aiohttp's own defaults (8 KiB a line).
        )
        return self._session


def _multidict(headers: RawHeaders) -> CIMultiDict[str]:
    return CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in headers)


def _text(value: bytes) -> str:
    """aiohttp writes headers as UTF-8; what is valid UTF-8 leaves as it came."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
