"""Ranks that are threads of one process: what a `Team` does, without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from stitch.core.errors import Unavailable

T = TypeVar("T")
WAIT_S: Final = 20.0


class Meeting:
    """Where the ranks exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.said: Any = None

    def ranks(self) -> list[ThreadComms]:
        return [ThreadComms(self, rank) for rank in range(self.size)]


class ThreadComms:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, meeting.size

    def broadcast(self, value: T | None) -> T:
        if self.rank == 0:
            self._meeting.said = value
        self._wait()
        said: T = self._meeting.said
        self._wait()
        return said

    def gather(self, value: T) -> list[T] | None:
        self._meeting.slots[self.rank] = value
        self._wait()
        values = list(self._meeting.slots) if self.rank == 0 else None
        self._wait()
        return values

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait(WAIT_S)
        except threading.BrokenBarrierError:
            raise Unavailable("a rank did not come") from None


def at_all(size: int, act: Callable[[ThreadComms], T]) -> list[T | BaseException]:
    """What the call comes to at each rank, its error where it fails."""

    def one(comms: ThreadComms) -> T | BaseException:
        try:
            return act(comms)
        except BaseException as error:  # noqa: BLE001 # judged by the test
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, Meeting(size).ranks()))
