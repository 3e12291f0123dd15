"""Server-sent events: cut from a stream of bytes and put back, with all bytes that nobody rewrites untouched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from stitch.core.errors import InvalidRequest

MAX_EVENT: Final = 64 * 1024 * 1024
"""Bound on one event, in bytes: log-probabilities of a long answer come in one."""
DONE: Final = b"[DONE]"
"""The data by which OpenAI's streams end."""

# Possessive, so that the two bytes of one CRLF are never read as two line ends.
_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE = re.compile(rb"\r\n|\n|\r")
_OVERLAP: Final = 3
"""An end of event may begin so many bytes before what is new."""


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event, as its bytes came, the blank line that ends it included."""

    raw: bytes

    @property
    def data(self) -> bytes | None:
        """The lines of `data` joined by LF; None where there is none, as in a comment."""
        found = [line[5:].removeprefix(b" ") for line in _LINE.split(self.raw) if line.startswith(b"data:")]
        return b"\n".join(found) if found else None

    @property
    def done(self) -> bool:
        """Whether it is OpenAI's last."""
        return self.data == DONE

    def with_data(self, data: bytes) -> SseEvent:
        """The event with other data, its further fields as they were."""
        others = [line for line in _LINE.split(self.raw) if line and not line.startswith(b"data:")]
        lines = [*others, *(b"data: " + line for line in data.split(b"\n"))]
        return SseEvent(b"\n".join(lines) + b"\n\n")


class SseParser:
    """Feed it chunks as they come; concatenating `raw` of what it gives, and `rest`, gives the chunks again."""

    __slots__ = ("_buffer", "_limit", "_seen")

    def __init__(self, limit: int = MAX_EVENT) -> None:
        self._buffer = bytearray()
        self._seen = 0
        self._limit = limit

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that the chunk completes. Raises InvalidRequest where one grows past the limit."""
        buffer = self._buffer
        buffer += chunk
        events, start = [], 0
        at = max(0, self._seen - _OVERLAP)
        while (end := _END.search(buffer, at)) is not None:
            if end.end() == len(buffer) and buffer[-1:] == b"\r":
                break  # the LF of this CR may be still to come
            events.append(SseEvent(bytes(buffer[start : end.end()])))
            start = at = end.end()
        del buffer[:start]
        self._seen = len(buffer)
        if len(buffer) > self._limit:
            raise InvalidRequest(f"stream: an event of more than {self._limit} bytes", field="stream")
        return events

    def rest(self) -> bytes:
        """What is left when the stream ended: a last event without its blank line, or nothing."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._seen = 0
        return rest


def event(data: bytes, *, name: str | None = None, id: str | None = None) -> bytes:
    """The bytes of a new event. `data` may have several lines."""
    head = ([f"id: {id}".encode()] if id is not None else []) + ([f"event: {name}".encode()] if name is not None else [])
    return b"\n".join([*head, *(b"data: " + line for line in data.split(b"\n"))]) + b"\n\n"
