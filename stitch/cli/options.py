"""Options that many commands share, and running their coroutines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import click

TOKEN_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
STDERR: Final = 2
_SHOW_CURSOR: Final = b"\x1b[?25h"
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def log_option(required: bool = True) -> Callable[[F], F]:
    return click.option(
        "--log",
        "log_url",
        envvar="STITCH_LOG",
        required=required,
        metavar="URL",
        help="sqlite:///PATH, kafka://HOST:PORT/NAMESPACE or memory:// [env: STITCH_LOG]",
    )


def store_option(required: bool = True) -> Callable[[F], F]:
    return click.option(
        "--store",
        "store_url",
        envvar="STITCH_STORE",
        required=required,
        metavar="URL",
        help="file:///PATH or s3://BUCKET/PREFIX?endpoint=URL&region=R [env: STITCH_STORE]",
    )


def policy_option(required: bool = True) -> Callable[[F], F]:
    return click.option(
        "--policy", envvar="STITCH_POLICY", required=required, metavar="NAME", help="The line of models. [env: STITCH_POLICY]"
    )


def channel_option() -> Callable[[F], F]:
    return click.option(
        "--channel", envvar="STITCH_CHANNEL", default="latest", show_default=True, metavar="NAME", help="[env: STITCH_CHANNEL]"
    )


def token_option() -> Callable[[F], F]:
    return click.option(
        "--token-file",
        type=TOKEN_FILE,
        help="File with the bearer token. [env: STITCH_TOKEN holds the token itself]",
    )


def json_option() -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def parent_option() -> Callable[[F], F]:
    return click.option("--parent-pid", type=int, hidden=True, help="End when this process ends.")


def read_token(token_file: Path | None) -> str | None:
    """The token of the file, else of STITCH_TOKEN, else None."""
    return read_token_file(token_file) if token_file is not None else os.environ.get("STITCH_TOKEN") or None


def read_token_file(token_file: Path) -> str:
    """The file's only line."""
    token = token_file.read_text(encoding="utf-8").strip()
    if not token:
        raise click.BadParameter(f"{token_file} is empty", param_hint="token file")
    return token


def end_at_once(number: int) -> None:
    """Ends the process as the signal does where nobody handles it. A bar hides the cursor, and has no time left to show it."""
    os.write(STDERR, _SHOW_CURSOR if os.isatty(STDERR) else b"")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def run(work: Coroutine[Any, Any, T], *, patience: int = 1) -> T:
    """Runs a command's coroutine. The first `patience` SIGINT or SIGTERM cancel it, and it may tidy up; then KeyboardInterrupt is
    raised. One more ends the process at once, whatever it waits for."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_until_signal(work, patience))


async def _until_signal(work: Coroutine[Any, Any, T], patience: int) -> T:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    signals = 0

    def stop(number: int) -> None:
        nonlocal signals
        signals += 1
        if signals > patience:
            end_at_once(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if signals:
            raise KeyboardInterrupt from None
        raise


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
