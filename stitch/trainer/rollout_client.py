"""Rollouts through a gateway: constraints, one deadline for all retries, and the versions of every answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from stitch.core.errors import InvalidRequest, StitchError
from stitch.core.ids import policy_id, run_id
from stitch.http import headers as names
from stitch.http.auth import Bearer
from stitch.http.upstream import Stage, Upstream, UpstreamError, UpstreamResponse
from stitch.trainer.portal import LoopThread
from stitch.trainer.rollout_answer import Answer, Refusal, read_answer, read_json, read_refusal
from stitch.trainer.rollout_request import (
    GENERATE_SECONDS,
    Call,
    Request,
    VersionLike,
    encode_body,
    needs_run,
    version_headers,
)
from stitch.trainer.rollout_stream import AnswerStream

_logger = logging.getLogger(__name__)


class AsyncRolloutClient:
    """A client of a gateway, or of a replica. Of one event loop; any number of requests at a time.

    `policy` and `run` are sent with every request. Without `run`, a request that names a number sends the run of the newest
    answer: numbers compare within a run only.
    """

    def __init__(self, url: str, policy: str | None = None, run: str | None = None, token: str | None = None) -> None:
        """Raises InvalidRequest. Nothing is connected to yet."""
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest("url: not of the form http://HOST:PORT", field="url")
        self._url = url.rstrip("/") + "/generate"
        self._policy = None if policy is None else policy_id(policy)
        self._run: str | None = None if run is None else run_id(run)
        self._seen_run: str | None = None
        self._headers = [*Bearer(token).header(), (b"content-type", b"application/json")]
        self._upstream = Upstream()

    @overload
    async def generate(self, *, stream: Literal[False] = False, **request: Unpack[Request]) -> Answer: ...

    @overload
    async def generate(self, *, stream: Literal[True], **request: Unpack[Request]) -> AnswerStream: ...

    async def generate(
        self,
        *,
        prompt: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        channel: str | None = None,
        min_version: VersionLike | None = None,
        exact_version: VersionLike | None = None,
        max_lag: int | None = None,
        wait: float | None = None,
        session: str | None = None,
        stream: bool = False,
        timeout: float = GENERATE_SECONDS,
        extra: Mapping[str, Any] | None = None,
    ) -> Answer | AnswerStream:
        """One completion of a `prompt` or of `input_ids`.

        `max_lag` counts versions behind the tip, `wait` is how many seconds the gateway may hold the request for a version that
        satisfies it; `extra` holds further fields of the request's body, such as `return_logprob`. Within `timeout` seconds,
        refusals that cost nothing are retried (409, 429, 503 before generation began, a refused connection); a generation that
        may have begun is sent again only where the server says so, under a new request id. With `stream` it returns once the
        first piece is there.

        Raises InvalidRequest, VersionGone, WeightVersionNotReady at the deadline, Unavailable. Cancelling it closes the
        connection, by which the generation is aborted.
        """
        body = encode_body(prompt, input_ids, sampling_params, extra, stream=stream)
        run = self._run or (self._seen_run if needs_run(min_version, exact_version) else None)
        headers = version_headers(channel, min_version, exact_version, max_lag)
        headers |= {names.POLICY: self._policy, names.RUN: run, names.SESSION: session}
        call = Call(headers, body, wait=wait, timeout=timeout)
        response = await self._answered(call)
        if stream:
            return await AnswerStream(call, response, self._learn).begin()
        return await self._whole(call, response)

    async def aclose(self) -> None:
        """Closes every connection. May be called twice."""
        await self._upstream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _answered(self, call: Call) -> UpstreamResponse:
        """The answer of status 200, its body still to come."""
        before: StitchError | None = None
        while True:
            response = await self._try(call)
            if isinstance(response, UpstreamResponse):
                return response
            pause = call.pause(response.retry_after) if response.retryable else None
            if pause is None:
                # Where the deadline cut a try short, only the refusal before it says what the time went by with.
                raise response.error from before
            before = response.error
            call.again(started=response.started)
            _logger.debug("request %s: again in %.1f s: %s", call.request_id, pause, response.error)
            await asyncio.sleep(pause)
            if not call.remaining:  # the host stood still meanwhile
                raise response.error

    async def _try(self, call: Call) -> UpstreamResponse | Refusal:
        headers = [*self._headers, *call.headers]
        try:
            response = await self._upstream.open("POST", self._url, headers, call.body, first_byte_timeout=call.remaining)
            if response.status == 200:
                return response
            return read_refusal(response.status, response.headers, await _read(response, call))
        except UpstreamError as error:
            # A lost connection does not say whether the generation may be computed twice.
            unsent = error.stage is Stage.NOT_SENT
            return Refusal(error=call.lost(error), retryable=unsent, started=not unsent, retry_after=None)

    async def _whole(self, call: Call, response: UpstreamResponse) -> Answer:
        try:
            body = read_json(await _read(response, call))
        except UpstreamError as error:
            raise call.lost(error) from error
        return self._learn(read_answer(response.headers, body, call.request_id))

    def _learn(self, answer: Answer) -> Answer:
        """Remembers the run that this client's numbers are of."""
        self._seen_run = answer.run or self._seen_run
        return answer


class RolloutClient:
    """As AsyncRolloutClient, blocking. May be used by any number of threads, each with a request of its own."""

    def __init__(self, url: str, policy: str | None = None, run: str | None = None, token: str | None = None) -> None:
        """Raises InvalidRequest. Nothing is connected to yet."""
        self._client = AsyncRolloutClient(url, policy, run, token)
        self._loop = LoopThread()
        self._closed = False

    @overload
    def generate(self, *, stream: Literal[False] = False, **request: Unpack[Request]) -> Answer: ...

    @overload
    def generate(self, *, stream: Literal[True], **request: Unpack[Request]) -> BlockingStream: ...

    def generate(self, *, stream: bool = False, **request: Unpack[Request]) -> Answer | BlockingStream:
        """As AsyncRolloutClient.generate. An interrupt, Ctrl-C for one, cancels the request."""
        if stream:
            return BlockingStream(self._loop, self._loop.call(lambda: self._client.generate(stream=True, **request)))
        return self._loop.call(lambda: self._client.generate(**request))

    def close(self) -> None:
        """Closes every connection and ends the thread. May be called twice."""
        if not self._closed:
            self._closed = True
            self._loop.call(self._client.aclose)
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class BlockingStream:
    """As AnswerStream, blocking."""

    def __init__(self, loop: LoopThread, stream: AnswerStream) -> None:
        """Use `generate(stream=True)`."""
        self._loop, self._stream = loop, stream

    @property
    def answer(self) -> Answer | None:
        """Once the pieces are exhausted."""
        return self._stream.answer

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = self._loop.call(self._piece)
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Ends the stream. May be called twice."""
        self._loop.call(self._stream.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _piece(self) -> str | None:
        # A future cannot hold StopAsyncIteration.
        return await anext(self._stream, None)


async def _read(response: UpstreamResponse, call: Call) -> bytes:
    try:
        async with asyncio.timeout(call.remaining):
            return await response.read()
    except TimeoutError as error:
        raise call.late() from error
    finally:
        response.close()
