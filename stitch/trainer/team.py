"""The ranks of a trainer in step: what one of them cannot do, none has done, and no rank waits for one that failed.

An error never keeps a rank from a collective: it travels through it. So a rank that fails still takes part in the round, and all
of them raise what came of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

from stitch.core.errors import InvalidRequest, StitchError, Unavailable
from stitch.trainer.comms import TrainerComms
from stitch.trainer.portal import LoopThread

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as it travels: its class, so that every rank can be caught alike, and its words."""

    kind: type[StitchError]
    message: str
    field: str | None = None

    def error(self) -> StitchError:
        error = self.kind(self.message)
        if isinstance(error, InvalidRequest):
            error.field = self.field
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """What came of a rank's own work: a value, or what was raised."""

    value: T | None = None
    error: BaseException | None = None

    def get(self) -> T:
        """The value, or the error raised."""
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value


def outcome_of(act: Callable[[], T]) -> Outcome[T]:
    """What the call comes to; whatever it raises, even an interrupt, is told to the other ranks before it is raised."""
    try:
        return Outcome(value=act())
    except BaseException as error:  # noqa: BLE001 # raised by `decided`, once the others know
        return Outcome(error=error)


class Team:
    """One rank's part. Of a single process nothing is asked and nothing is changed: errors are raised as they came."""

    def __init__(self, comms: TrainerComms) -> None:
        self._comms = comms
        self.rank: Final = comms.rank
        self.size: Final = comms.size
        self._in_step = True

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    async def decide(
        self, mine: Outcome[T], decide: Callable[[list[T]], Awaitable[U]], *, lost: type[StitchError] = Unavailable
    ) -> U:
        """One round: every rank brings an outcome, rank 0 makes one result of all, and every rank returns or raises it.

        `decide` is called at rank 0 alone, with the values in the order of ranks, where no rank failed. Raises `lost` where
        another rank is gone; then the ranks are out of step for good, and later rounds raise Unavailable.
        """
        if self.size == 1:
            return await decide([mine.get()])
        if not self._in_step:
            raise Unavailable("the ranks are out of step since an earlier failure; close the publisher and open it again")
        self._in_step = False  # until this round came to its end
        sent = mine.value if mine.error is None else _failure(self.rank, mine.error)
        gathered = await _told(self._comms.gather, sent, self.rank, lost)
        result: U | Failure | None = None
        cause = mine.error
        if gathered is not None:
            result, decided = await _decided(gathered, decide)
            cause = cause or decided
        said = await _told(self._comms.broadcast, result, 0, lost)
        self._in_step = True
        if isinstance(said, Failure):
            raise said.error() from cause
        return cast("U", said)


async def _told(collective: Callable[[Any], V], value: object, rank: int, lost: type[StitchError]) -> V:
    """What the collective gives. A value that may not be sent goes as the failure that this is."""
    try:
        try:
            return await asyncio.to_thread(collective, value)
        except InvalidRequest as error:
            return await asyncio.to_thread(collective, _failure(rank, error))
    except Unavailable as error:
        raise lost(str(error)) from error


async def _decided(
    gathered: Iterable[T | Failure | None], decide: Callable[[list[T]], Awaitable[U]]
) -> tuple[U | Failure, BaseException | None]:
    """Rank 0's result, or the failure of the first rank that failed, and what was raised here."""
    values: list[T] = []
    for value in gathered:
        if isinstance(value, Failure):
            return value, None
        assert value is not None
        values.append(value)
    try:
        return await decide(values), None
    except Exception as error:  # noqa: BLE001 # told to the others, and raised by them and here
        return _failure(None, error), error


def _failure(rank: int | None, error: BaseException) -> Failure:
    """`rank`: whose own it is; None for what rank 0 decided for all."""
    where = "" if rank is None else f"rank {rank}: "
    if isinstance(error, StitchError):
        return Failure(kind=type(error), message=f"{where}{error}", field=getattr(error, "field", None))
    return Failure(kind=StitchError, message=f"{where or 'rank 0: '}{type(error).__name__}: {error}")


def decided(loop: LoopThread, team: Team, mine: Outcome[T], decide: Callable[[list[T]], Awaitable[U]]) -> U:
    """`Team.decide`, for a thread outside the loop. What interrupted this rank is raised as it came, and never in the loop."""
    if team.size == 1:
        mine.get()
    told = mine
    if not isinstance(mine.error, Exception | None):
        told = Outcome(error=StitchError(f"interrupted: {mine.error!r}"))
    try:
        return loop.call(lambda: team.decide(told, decide))
    except StitchError:
        if told is not mine:
            mine.get()
        raise
