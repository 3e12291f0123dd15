"""A bell that wakes coroutines, of any event loop, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Bell:
    """Counts its rings, so that one between a look and the wait that follows is not missed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rings = 0
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    @property
    def rings(self) -> int:
        return self._rings

    async def wait(self, rings: int, timeout: float) -> None:
        """Returns once the count is beyond `rings`, or after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._rings != rings:
                return
            self._waiting[future] = loop
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            with self._lock:
                self._waiting.pop(future, None)

    def ring(self) -> None:
        with self._lock:
            self._rings += 1
            woken = list(self._waiting.items())
            self._waiting.clear()
        for future, loop in woken:
            with contextlib.suppress(RuntimeError):  # that loop was closed; nobody is left to wake
                loop.call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
