"""The waiting room: requests held until a version or a free place comes, bounded in number, served in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Generic, TypeVar

from stitch.core.errors import StitchError


class Lack(StrEnum):
    """What a request waits for."""

    VERSION = "version"
    """No replica that may be tried serves what it asks for."""
    ROOM = "room"
    """Those that do are full."""


class RoomFull(StitchError):
    """As many wait as may."""


class RoomClosed(StitchError):
    """The gateway stops."""


T = TypeVar("T")
Try = Callable[[], T | Lack]
"""Takes a place at once, or tells what is lacking."""


class _Waiter(Generic[T]):
    __slots__ = ("attempt", "future", "lack")

    def __init__(self, attempt: Try[T], lack: Lack) -> None:
        self.attempt, self.lack = attempt, lack
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()


class WaitingRoom(Generic[T]):
    """Waiters are tried in the order in which they came. A freed place goes to the first that can use it, before any newcomer."""

    def __init__(self, limit: int) -> None:
        self.limit: Final = limit
        self._waiters: dict[int, _Waiter[T]] = {}
        self._next = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, attempt: Try[T], lack: Lack, timeout: float, *, undo: Callable[[T], None]) -> T | None:
        """What `attempt` took, or None after `timeout` seconds.

        `undo` gives back what was taken for a waiter that was cancelled meanwhile. Raises RoomFull and RoomClosed.
        """
        if self._closed:
            raise RoomClosed("the gateway stops")
        if len(self._waiters) >= self.limit:
            raise RoomFull(f"{self.limit} requests wait already")
        self._next += 1
        ticket, waiter = self._next, _Waiter(attempt, lack)
        self._waiters[ticket] = waiter
        try:
            async with asyncio.timeout(timeout):
                return await waiter.future
        except TimeoutError:
            return waiter.future.result() if _taken(waiter.future) else None
        except asyncio.CancelledError:
            if _taken(waiter.future):
                undo(waiter.future.result())
            raise
        finally:
            self._waiters.pop(ticket, None)

    def freed(self) -> None:
        """A place was given back: the first who lacks one gets it."""
        for waiter in self._waiters.values():
            if waiter.lack is Lack.ROOM and self._serve(waiter):
                return

    def changed(self) -> None:
        """Replicas or versions changed: all try again, in order."""
        for waiter in self._waiters.values():
            self._serve(waiter)

    def close(self) -> None:
        """Sends all away with RoomClosed, newcomers too."""
        self._closed = True
        for waiter in self._waiters.values():
            if not waiter.future.done():
                waiter.future.set_exception(RoomClosed("the gateway stops"))

    def _serve(self, waiter: _Waiter[T]) -> bool:
        """Whether the waiter took something now. One that is done already leaves by itself."""
        if waiter.future.done():
            return False
        outcome = waiter.attempt()
        if isinstance(outcome, Lack):
            waiter.lack = outcome
            return False
        waiter.future.set_result(outcome)
        return True


def _taken(future: asyncio.Future[T]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
