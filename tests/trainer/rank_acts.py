"""What the ranks of `test_ranks.py` do, as functions that another process can be told to call. Each opens one publisher."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stitch.core.errors import StitchError
from stitch.log.faulty import Fault as LogFault
from stitch.log.faulty import FaultyLog, script
from stitch.log.opening import open_log
from stitch.log.port import Stream
from stitch.store.faulty import ALWAYS, Fault, FaultyStore, Kind
from stitch.store.opening import open_store
from stitch.trainer.author import Publication
from stitch.trainer.comms import TrainerComms
from stitch.trainer.publisher import Publisher
from tests.trainer.places import PATIENCE, Place

SHORT = 2.0
"""A deadline that is meant to pass."""


def tensor(index: int, step: int) -> np.ndarray[Any, Any]:
    """Tensor `index` of a model of which each step changes a little."""
    data = np.random.default_rng(index).standard_normal(1000 + index).astype(np.float32)
    data[step % 7 :: 50] += np.float32(step * (index % 3))
    return data


def model(step: int, count: int = 12) -> dict[str, np.ndarray[Any, Any]]:
    return {f"layer.{index:02}": tensor(index, step) for index in range(count)}


def part(comms: TrainerComms, step: int) -> dict[str, np.ndarray[Any, Any]]:
    """This rank's tensors."""
    return {name: array for index, (name, array) in enumerate(model(step).items()) if index % comms.size == comms.rank}


@contextlib.contextmanager
def publisher(comms: TrainerComms, place: Place, **arguments: Any) -> Iterator[Publisher]:
    with place.publisher(comms=comms, **arguments) as opened:
        yield opened


def raised(act: Any, *arguments: Any, **named: Any) -> tuple[str, str]:
    """Class and words of the error that must come."""
    try:
        act(*arguments, **named)
    except StitchError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def three_versions(comms: TrainerComms, place: Place, memory_budget: int | None) -> list[Publication]:
    with publisher(comms, place, memory_budget=memory_budget) as pub:
        done = [pub.publish(part(comms, 0)), pub.publish(part(comms, 1)), pub.publish(iter(part(comms, 2).items()))]
        assert pub.next_number == 3
        assert pub.head == done[-1].ref
        return done


def in_the_background(comms: TrainerComms, place: Place) -> list[Publication]:
    live = {name: array.copy() for name, array in part(comms, 0).items()}
    with publisher(comms, place) as pub:
        futures = []
        for step in range(4):
            for name, array in part(comms, step).items():
                live[name][:] = array
            futures.append(pub.publish_async(live))
            assert sum(not future.done() for future in futures) <= 1
        return [future.result(PATIENCE) for future in futures]


def after_an_error(comms: TrainerComms, place: Place, what: str) -> tuple[tuple[str, str], Publication]:
    """Version 0, then a publish that fails at one rank, then version 1."""
    with publisher(comms, place) as pub:
        pub.publish(part(comms, 0))
        error = raised(pub.publish, _spoilt(comms, what), number=_number(comms, what))
        return error, pub.publish(part(comms, 1))


def _number(comms: TrainerComms, what: str) -> int | None:
    if what == "another number":
        return 5 if comms.rank == 2 else 6
    return -1 if what == "no number" and comms.rank == 3 else None


def _spoilt(comms: TrainerComms, what: str) -> Any:
    weights: dict[str, Any] = part(comms, 1)
    if what == "iterable" and comms.rank == 2:
        return _breaking(weights)
    if what == "given twice" and comms.rank == 3:
        weights["layer.00"] = tensor(0, 1)
    if what == "missing" and comms.rank == 1:
        del weights["layer.05"]
    if what == "no tensor" and comms.rank == 1:
        weights["layer.05"] = "text"
    return weights


def _breaking(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from list(weights.items())[:1]
    raise RuntimeError("the trainer's own fault")


def interrupted(comms: TrainerComms, place: Place) -> str:
    def stops() -> Iterator[tuple[str, Any]]:
        yield from part(comms, 0).items()
        if comms.rank == 1:
            raise KeyboardInterrupt

    with publisher(comms, place) as pub:
        try:
            pub.publish(stops())
        except BaseException as error:  # noqa: BLE001 # told to the test
            return f"{type(error).__name__}: {error}"
    return "nothing"


def store_away_at_one_rank(comms: TrainerComms, place: Place) -> tuple[tuple[str, str], Publication]:
    store = FaultyStore(open_store(place.store_url))
    with publisher(comms, place, store=store) as pub:
        pub.publish(part(comms, 0))
        if comms.rank == 1:
            store.add(Fault(call="put", kind=Kind.FAIL_BEFORE, times=ALWAYS))
        error = raised(pub.publish, part(comms, 1), timeout=SHORT)
        store.clear()
        return error, pub.publish(part(comms, 1))


def fenced(comms: TrainerComms, place: Place) -> tuple[str, str]:
    with publisher(comms, place) as pub:
        pub.publish(part(comms, 0))
        if comms.rank == 0:
            place.publisher().close()
        return raised(pub.publish, part(comms, 1))


def unknown_outcome(comms: TrainerComms, place: Place) -> tuple[tuple[str, str], list[Publication]]:
    """Rank 0's log loses what is appended, until it does not."""
    log = FaultyLog(open_log(place.log_url))
    with publisher(comms, place, log=log) as pub:
        pub.publish(part(comms, 0))
        log.plan(lambda stream, draft: LogFault.LOSE if stream is Stream.PUBLICATIONS else LogFault.NONE)
        error = raised(pub.publish, part(comms, 1), timeout=SHORT)
        log.plan(script())
        done = [pub.publish(part(comms, step)) for step in (1, 2)]
        if comms.rank == 0:
            pub._loop.call(log.aclose)
        return error, done


def open_refused(comms: TrainerComms, place: Place) -> tuple[str, str]:
    arguments: dict[str, Any] = {"base": "/nowhere"} if comms.rank == 2 else {}
    return raised(place.publisher, comms=comms, **arguments)


def directories(comms: TrainerComms, place: Place, folders: list[Path], **arguments: Any) -> list[Publication]:
    with publisher(comms, place, **arguments) as pub:
        return [pub.publish(folder) for folder in folders]


def directory_of_another_form(comms: TrainerComms, place: Place, folders: list[Path]) -> tuple[tuple[str, str], Publication]:
    with publisher(comms, place) as pub:
        pub.publish(folders[0])
        return raised(pub.publish, folders[1], kind="delta"), pub.publish(folders[1])


def another_directory(comms: TrainerComms, place: Place, folders: list[Path]) -> tuple[str, str]:
    with publisher(comms, place) as pub:
        return raised(pub.publish, folders[comms.rank == 3])


def dies(comms: TrainerComms, place: Place, rank: int) -> tuple[str, str]:
    """One rank is killed while the others wait for its part."""
    with publisher(comms, place) as pub:
        pub.publish(part(comms, 0))
        if comms.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(PATIENCE)  # until the signal is there
        first = raised(pub.publish, part(comms, 1))
        assert raised(pub.publish, part(comms, 1))[0] == "Unavailable"
        return first
