"""A thread with an event loop of its own, behind a blocking surface.

Callers may themselves run inside an event loop, of whatever library: theirs and this one never meet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar

from anyio.from_thread import start_blocking_portal

T = TypeVar("T")


class LoopThread:
    """The thread is a daemon, so that a surface that nobody closed does not keep its process from ending."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal("asyncio"))

    def start(self, act: Callable[[], Awaitable[T]]) -> Future[T]:
        """Runs the coroutine function in the loop; cancelling the future cancels it there."""
        return self._portal.start_task_soon(act)

    def call(self, act: Callable[[], Awaitable[T]]) -> T:
        """Waits for the result. An interrupt of the caller, Ctrl-C for one, cancels what runs in the loop."""
        return finish(self.start(act))

    def close(self) -> None:
        """Returns once the loop and its thread ended. May be called twice."""
        self._stack.close()


def finish(future: Future[T]) -> T:
    """The result of a future whose work is of no use to anybody but the caller."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
