"""The port Pool: replicas behind a gateway, as many as asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from stitch.core.ids import ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """A replica that the pool started. `exit_code` is None while it runs; a negative one names the signal that ended it."""

    replica: ReplicaId
    url: str | None
    exit_code: int | None


class Pool(ABC):
    """Starts and stops replicas. A replica that ends is not a member's end: it is started anew by `scale`, under another id."""

    @abstractmethod
    async def scale(self, replicas: int) -> None:
        """Starts or drains replicas until so many run. Returns once the new ones were started, not once they serve."""

    @abstractmethod
    def members(self) -> Sequence[PoolMember]:
        """All replicas that were started, also those that ended."""

    @abstractmethod
    async def kill(self, replica: ReplicaId) -> None:
        """Ends one at once, without a word to anyone: as a machine that is lost."""

    @abstractmethod
    async def aclose(self) -> None:
        """Ends all. Nothing that the pool started is left afterwards."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()
