"""One attempt at something that may have to wait: its deadline, its pauses, and what it tells of its progress."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from stitch.core.errors import Unavailable

BACKOFF_SECONDS: Final = (0.1, 5.0)
"""First and longest pause after a log or store failed."""

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Step(StrEnum):
    """What an attempt has just done. At each of them a trainer may die, and nothing accepted is lost."""

    WAITING = "waiting"
    """A log or a store is away; `Progress.waiting` says why."""
    ENCODING = "encoding"
    """One more tensor is done."""
    ENCODED = "encoded"
    """The files lie on the local disk, and may be on their way; nothing refers to them."""
    UPLOADING = "uploading"
    """One more object is durable."""
    UPLOADED = "uploaded"
    """All objects are."""
    DESCRIBED = "described"
    """So is the manifest."""
    APPENDED = "appended"
    """The decision was sent, and not read back."""
    ACCEPTED = "accepted"
    """It was read back and counts; pointers are behind."""
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Bytes are those of the tensors while they are encoded, then those of the files to upload. A total of 0 is not known."""

    step: Step
    bytes_done: int = 0
    bytes_total: int = 0
    tensors_done: int = 0
    tensors_total: int = 0
    waiting: str | None = None


Listener = Callable[[Progress], None]
"""Called from the publisher's own thread, and while tensors are encoded from the caller's: it must be quick. What it raises ends
the attempt."""


def silent(progress: Progress) -> None:
    """Listens to nothing."""


class Attempt:
    """`timeout` in seconds, counted from now on the monotonic clock."""

    def __init__(self, timeout: float, listener: Listener = silent) -> None:
        self.timeout: Final = timeout
        self._until = time.monotonic() + timeout
        self._listener = listener
        self._waits = 0

    @property
    def remaining(self) -> float:
        """Seconds to the deadline, never negative."""
        return max(0.0, self._until - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.remaining == 0.0

    def report(
        self, step: Step, *, bytes_done: int = 0, bytes_total: int = 0, tensors_done: int = 0, tensors_total: int = 0
    ) -> None:
        _logger.debug("%s", step)
        self._listener(
            Progress(
                step=step,
                bytes_done=bytes_done,
                bytes_total=bytes_total,
                tensors_done=tensors_done,
                tensors_total=tensors_total,
            )
        )

    def report_waiting(self, why: str) -> None:
        """Once as a warning in the log of the process, then less loudly."""
        self._waits += 1
        _logger.log(logging.WARNING if self._waits == 1 else logging.INFO, "waiting, %.0f s left: %s", self.remaining, why)
        self._listener(Progress(step=Step.WAITING, waiting=why))

    async def until_available(self, act: Callable[[], Awaitable[T]]) -> T:
        """The result of `act`, called until it no longer raises Unavailable. At the deadline the last Unavailable is raised."""
        waits = pauses(*BACKOFF_SECONDS)
        while True:
            try:
                return await self.bounded(act)
            except Unavailable as error:
                if self.expired:
                    raise
                self.report_waiting(str(error))
                await asyncio.sleep(min(self.remaining, next(waits)))

    async def bounded(self, act: Callable[[], Awaitable[T]]) -> T:
        """The result of `act`. Unavailable at the deadline."""
        bound = asyncio.timeout(self.remaining)
        try:
            async with bound:
                return await act()
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise Unavailable(f"no answer before the deadline of {self.timeout:g} s") from error


def pauses(first: float, longest: float) -> Iterator[float]:
    """Pauses that double up to a bound, each shortened at random by up to a half."""
    pause = first
    while True:
        yield pause * random.uniform(0.5, 1.0)  # noqa: S311 # jitter, no secret
        pause = min(2 * pause, longest)
