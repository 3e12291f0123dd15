"""Work spread over a bounded number of threads: hashing, decoding and copying let go of the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import Final, TypeVar

T = TypeVar("T")
Check = Callable[[], None]
"""Called between pieces of work; raises to stop."""

MAX_THREADS: Final = 8
"""Of one call: they fill a machine's memory bandwidth, and leave the other cores to the engine."""
CHECK_EVERY_S: Final = 0.2
"""Between two looks at whether to stop, while threads work."""
AHEAD: Final = 2
"""Tasks handed out per thread: the next one is always at hand, and few have to be called back."""


def default_threads() -> int:
    """One per core that this process may use, up to MAX_THREADS."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def run_all(tasks: Iterable[Callable[[], T]], threads: int, check: Check) -> list[T]:
    """What the tasks return, in no particular order.

    `check` is called in the caller's thread. Where it or a task raises, no further task begins, running ones are waited for, and
    the error is raised. With one thread, or one task, all runs in the caller's.
    """
    tasks = iter(tasks)
    first = list(islice(tasks, AHEAD))
    if threads <= 1 or len(first) <= 1:
        return [_checked(task, check) for task in chain(first, tasks)]
    results: list[T] = []
    running: set[Future[T]] = set()
    with ThreadPoolExecutor(threads, thread_name_prefix="stitch-weights") as pool:
        try:
            for task in chain(first, tasks):
                running.add(pool.submit(task))
                while len(running) >= AHEAD * threads:
                    running = _collect(running, results, check)
            while running:
                running = _collect(running, results, check)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return results


def _checked(task: Callable[[], T], check: Check) -> T:
    check()
    return task()


def _collect(running: set[Future[T]], results: list[T], check: Check) -> set[Future[T]]:
    finished, rest = wait(running, CHECK_EVERY_S, FIRST_COMPLETED)
    check()
    results.extend(future.result() for future in finished)
    return rest
