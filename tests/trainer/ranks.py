"""Processes that are the ranks of one trainer, over gloo on 127.0.0.1: each runs what it is given, and tells what came of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

ANSWERS_WITHIN: Final = 90.0
"""A rank that hangs is what these tests are about; machines are busy."""
GROUP_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A result, or the class and the words of what was raised."""

    value: Any = None
    raised: str | None = None
    message: str = ""


Act = Callable[..., Any]
"""Called as `act(comms, *arguments)`; a function of a module, so that another process finds it."""


class Ranks:
    """`size` processes with one gloo group, used by one call after the other."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def run(self, act: Act, *arguments: Any, dead: int | None = None) -> list[Told]:
        """What came of the call at every rank, in their order; one that dies of it tells nothing."""
        for pipe in self._pipes:
            pipe.send((act, arguments))
        return [_answer(pipe) for rank, pipe in enumerate(self._pipes) if rank != dead]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(ANSWERS_WITHIN)
        for pipe in self._pipes:
            pipe.close()


@contextlib.contextmanager
def started(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def _answer(pipe: Connection) -> Told:
    if not pipe.poll(ANSWERS_WITHIN):
        raise AssertionError(f"a rank did not answer within {ANSWERS_WITHIN:g} s: it hangs")
    told = pipe.recv()
    assert isinstance(told, Told)
    return told


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch.distributed as dist

    from stitch.trainer.comms import TorchComms

    limit = timedelta(seconds=GROUP_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    comms = TorchComms(timeout=GROUP_SECONDS)
    with contextlib.suppress(EOFError):  # the test is over
        while True:
            act, arguments = pipe.recv()
            try:
                told = Told(value=act(comms, *arguments))
            except BaseException as error:  # noqa: BLE001 # judged by the test
                told = Told(raised=type(error).__name__, message=str(error))
            pipe.send(told)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
