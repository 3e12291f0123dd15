"""What commands that move bytes show while they work, and how they are stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from stitch.cli.options import STDERR, end_at_once
from stitch.operators.watched import Watched
from stitch.weights.staging import StagingCancelled

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yields whether to stop. The first SIGINT or SIGTERM asks the work to end in good order, which StagingCancelled tells here
    and KeyboardInterrupt tells above; a second one ends the process at once."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            end_at_once(number)
        stopped = True
        os.write(STDERR, b"\nstopping once the transfers in hand are done; again to stop at once\n")  # print might meet itself

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stopped
    except StagingCancelled:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def scratch_option() -> Callable[[F], F]:
    return click.option(
        "--scratch",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Where versions are brought (default: the system's temporary folder).",
    )


class Bar:
    """One line on the terminal: what is being done, and how far it is. Silent where nobody looks at it."""

    def __init__(self, console: Console, look: Callable[[], tuple[int, int | None]], *, silent: bool) -> None:
        """`look` tells bytes done, and of how many (None: not known)."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
        )
        self._progress = _Looking(*columns, console=console, transient=True, disable=silent or not console.is_terminal)
        self._progress.before_drawing = self._refresh
        self._look = look
        self._task = self._progress.add_task("looking", total=None)

    def tell(self, what: str) -> None:
        self._progress.update(self._task, description=escape(what))

    def _refresh(self) -> None:
        done, total = self._look()
        self._progress.tasks[self._task].total = total  # `update` takes None for "as it was"
        self._progress.update(self._task, completed=done)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


class _Looking(Progress):
    """Asks how far the work is whenever it draws, so that the work need not tell."""

    before_drawing: Callable[[], None] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.before_drawing is not None:
            self.before_drawing()
        yield from super().get_renderables()


@contextmanager
def told_bar(*columns: ProgressColumn, silent: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the standard error for work that tells itself what it does and how far it is (a total of 0: not known)."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*columns, console=console, transient=True, disable=silent or not console.is_terminal) as bar:
        task = bar.add_task("reading the log", total=None)
        yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total or None)


def bar_of(store: Watched, *, silent: bool) -> Bar:
    """A bar of the downloads of a store, on the standard error."""

    def look() -> tuple[int, int | None]:
        amount = store.amount
        return amount.done, amount.total or None

    return Bar(Console(stderr=True), look, silent=silent)
