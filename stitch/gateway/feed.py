"""`/events`: what the two streams tell, to whoever listens, as server-sent events.

Each listener has a queue of its own with a bound. One that falls behind loses the oldest and is told how many; nobody waits for it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from stitch.core.events import Event, ReplicaState, Transition
from stitch.core.lineage import Position
from stitch.http.sse import event as sse_event
from stitch.log.events import stream_of

MAX_QUEUED: Final = 1000
"""Events held for one listener."""
MAX_LISTENERS: Final = 64
KEEP_ALIVE_SECONDS: Final = 15.0
"""A comment is sent after so much silence, so that proxies keep the connection and a listener that left is noticed."""


class Feed:
    """Hands every event but heartbeats to all listeners. `take` is a follower's listener."""

    def __init__(self, *, max_queued: int = MAX_QUEUED, max_listeners: int = MAX_LISTENERS) -> None:
        self._max_queued, self._max_listeners = max_queued, max_listeners
        self._queues: set[_Queue] = set()
        self._closed = False

    @property
    def listeners(self) -> int:
        """How many listen."""
        return len(self._queues)

    @property
    def full(self) -> bool:
        """Whether no more may listen."""
        return len(self._queues) >= self._max_listeners

    def take(self, event: Event, at: Position) -> None:
        """One record that a follower has folded."""
        if not self._queues or (isinstance(event, ReplicaState) and event.transition is Transition.HEARTBEAT):
            return
        encoded = _encoded(event, at)
        for queue in self._queues:
            queue.put(encoded)

    def close(self) -> None:
        """Ends every listener's stream."""
        self._closed = True
        for queue in self._queues:
            queue.bell.set()

    async def listen(self) -> AsyncIterator[bytes]:
        """Encoded events from now on, until the feed closes."""
        queue = _Queue(self._max_queued)
        self._queues.add(queue)
        try:
            yield b": listening\n\n"
            while not self._closed:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        await queue.bell.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if (held := queue.empty()) != b"":
                    yield held
        finally:
            self._queues.discard(queue)


class _Queue:
    def __init__(self, limit: int) -> None:
        self.bell = asyncio.Event()
        self._held: deque[bytes] = deque(maxlen=limit)
        self._lost = 0

    def put(self, encoded: bytes) -> None:
        self._lost += len(self._held) == self._held.maxlen
        self._held.append(encoded)
        self.bell.set()

    def empty(self) -> bytes:
        self.bell.clear()
        lost = sse_event(json.dumps({"lost": self._lost}).encode(), name="lost") if self._lost else b""
        held = lost + b"".join(self._held)
        self._held.clear()
        self._lost = 0
        return held


def _encoded(event: Event, at: Position) -> bytes:
    stream = stream_of(event)
    data = {"stream": stream.value, "offset": at.offset, "time_ms": at.time_ms, "event": asdict(event, dict_factory=_plain)}
    return sse_event(json.dumps(data).encode(), name=type(event).__name__, id=f"{stream.value}/{at.offset}")


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in pairs}
