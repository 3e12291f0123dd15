"""An answer as it is generated."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from stitch.core.errors import StitchError
from stitch.http import headers as names
from stitch.http.sse import SseEvent, SseParser
from stitch.http.upstream import Stage, UpstreamError, UpstreamResponse
from stitch.trainer.rollout_answer import Answer, read_answer, read_json, refusal_of
from stitch.trainer.rollout_request import Call

BROKEN_OFF: Final = 503
"""What an error in the midst of a stream is taken for: its status was sent long ago."""


class AnswerStream:
    """Pieces of text as they are generated. `answer` is there once they are exhausted.

    Leave it by `async with`, or `aclose` it, where it is not read to its end: that closes the connection.
    """

    def __init__(self, call: Call, response: UpstreamResponse, learn: Callable[[Answer], Answer]) -> None:
        """Use `generate(stream=True)`."""
        self._call, self._response, self._learn = call, response, learn
        self._chunks: AsyncIterator[bytes] = response.chunks()
        self._parser = SseParser()
        self._events: deque[SseEvent] = deque()
        self._last: Mapping[str, Any] | None = None
        self._text = ""
        self._first: str | None = None
        self.request_id: Final = response.header(names.REQUEST_ID) or call.request_id
        self.answer: Answer | None = None

    async def begin(self) -> Self:
        """Waits for the first piece, so that what fails before it is raised by `generate`."""
        self._first = await self._next()
        return self

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        piece, self._first = self._first, None
        if piece is None and self.answer is None:
            piece = await self._next()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Ends the stream. May be called twice."""
        self._response.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _next(self) -> str | None:
        """The next piece that is not empty; None at the end, with `answer` set. Any failure closes the connection."""
        try:
            async with asyncio.timeout(self._call.remaining):
                piece = await self._piece()
        except TimeoutError as error:
            self._response.close()
            raise self._call.late() from error
        except UpstreamError as error:
            self._response.close()
            raise self._call.lost(error) from error
        except BaseException:
            self._response.close()
            raise
        if piece is None:
            self._response.close()
            if self._last is None:
                raise StitchError(f"request {self.request_id}: the stream held no event")
            self.answer = self._learn(read_answer(self._response.headers, self._last, self.request_id))
        return piece

    async def _piece(self) -> str | None:
        while (event := await self._event()) is not None:
            if piece := self._take(event):
                return piece
        return None

    async def _event(self) -> Mapping[str, Any] | None:
        """The next event with data; None for the one that ends the stream."""
        while True:
            while self._events:
                event = self._events.popleft()
                if event.done:
                    return None
                if event.data is not None:
                    return read_json(event.data)
            chunk = await anext(self._chunks, None)
            if chunk is None:
                raise UpstreamError("the stream ended before its last event", stage=Stage.MIDWAY)
            self._events.extend(self._parser.feed(chunk))

    def _take(self, event: Mapping[str, Any]) -> str:
        """What the event adds: each repeats the text so far."""
        error = event.get("error")
        if isinstance(error, Mapping):
            raise refusal_of(BROKEN_OFF, error).error
        self._last = event
        text = str(event.get("text") or "")
        piece, self._text = text[len(self._text) :], text
        return piece
