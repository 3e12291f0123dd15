"""How the ranks of one trainer speak to each other while they publish together.

Stitch asks for two operations only. Any collective library can give them; `TorchComms` does so over `torch.distributed`, which is
never imported by us: whoever runs many ranks has done so.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

from stitch.core.errors import InvalidRequest, Unavailable

COLLECTIVE_SECONDS: Final = 2 * 60 * 60.0
"""For one collective. Rank 0 may wait half an hour for a log that is away, and the others for it: twice that, twice over."""
MAX_MESSAGE_BYTES: Final = 512 * 1024 * 1024
"""Of what one rank sends: the descriptions of a million tensors take some 200 MB."""

T = TypeVar("T")


class TrainerComms(Protocol):
    """Every rank makes the same calls in the same order, one at a time, from whatever thread.

    Raises Unavailable where another rank is gone or does not answer in time, and InvalidRequest, before anything was sent, for a
    value that it will not send.
    """

    @property
    def rank(self) -> int:
        """This process among them, from 0. Rank 0 alone speaks to the log."""

    @property
    def size(self) -> int:
        """How many they are."""

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, at every rank. What the others give is not looked at."""

    def gather(self, value: T) -> list[T] | None:
        """The values of all ranks in their order, at rank 0; None at the others."""


class SingleProcess:
    """A trainer that holds all of its weights in one process."""

    rank: Final = 0
    size: Final = 1

    def broadcast(self, value: T | None) -> T:
        assert value is not None
        return value

    def gather(self, value: T) -> list[T] | None:
        return [value]


class TorchComms:
    """Over a process group of `torch.distributed`, which must be initialised. Every rank makes its own, at the same point.

    By default a gloo group of its own over all ranks: so that nothing of ours can come between the trainer's own collectives,
    and a publisher that waits for its log is not taken for a rank that hangs. A `group` that is given is used as it is; one of
    another backend than gloo may end the process at its own time-out.
    """

    def __init__(self, group: Any = None, *, timeout: float = COLLECTIVE_SECONDS) -> None:
        """`timeout` is that of each collective of the group made here, in seconds. Raises InvalidRequest where torch.distributed
        is not initialised."""
        self._dist = _torch_distributed()
        self._group = group if group is not None else self._dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.rank: Final = int(self._dist.get_rank(self._group))
        self.size: Final = int(self._dist.get_world_size(self._group))
        if self.rank < 0:
            raise InvalidRequest("comms: this process is not in the group that was given", field="comms")
        self._first = int(self._dist.get_global_rank(self._group, 0))

    def broadcast(self, value: T | None) -> T:
        box: list[Any] = [_bounded(value) if self.rank == 0 else None]
        self._call("broadcast", lambda: self._dist.broadcast_object_list(box, src=self._first, group=self._group))
        result: T = box[0]
        return result

    def gather(self, value: T) -> list[T] | None:
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        mine = _bounded(value)
        self._call("gather", lambda: self._dist.gather_object(mine, values, dst=self._first, group=self._group))
        return values

    def _call(self, what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except (RuntimeError, OSError) as error:  # what torch raises for a lost peer and for a time-out
            raise Unavailable(
                f"comms: {what} of rank {self.rank} of {self.size} failed, another rank seems gone: {error}"
            ) from error


def _torch_distributed() -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise InvalidRequest("comms: torch.distributed is not initialised; call init_process_group first", field="comms")
    return torch.distributed


def _bounded(value: T) -> T:
    """The value, if it may be sent."""
    size = len(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    if size > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"comms: a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are sent", field="comms")
    return value
