"""Runs the reference engine as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import uvicorn

from stitch.core.errors import StitchError, Unavailable
from stitch.engines.reference import checkpoint
from stitch.engines.reference.app import reference_app
from stitch.engines.reference.engine import ReferenceEngine, weights_of
from stitch.engines.reference.model import ModelConfig, init, to_bf16

SHUTDOWN_S: Final = 1
"""Whole seconds that open requests get to end after SIGTERM; a supervisor waits longer than that before it kills."""
PARENT_LOOK_S: Final = 0.5
"""Between two looks at whether the parent still lives."""
LOOP_FAILED: Final = 70
"""Exit status when the generation loop broke: a terminal failure, the process is to be replaced."""


def init_checkpoint(path: Path, seed: int, config: ModelConfig | None = None) -> None:
    """Writes a random base checkpoint directory (config.json, model.safetensors). The same seed gives the same bytes."""
    config = config or ModelConfig()
    checkpoint.save(path, to_bf16(init(config, seed)))


def run_reference_engine(
    model: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    misbehave_allowed: bool = False,
    label: str = "0",
    parent_pid: int | None = None,
) -> int:
    """Serves a checkpoint directory until SIGTERM or SIGINT, and returns an exit status.

    Port 0 takes a free one. As soon as it listens, one line of JSON with the `url` goes to stdout. With `parent_pid`
    the process ends when that process does. Raises StitchError where the checkpoint cannot be loaded or the port not be had.
    """
    engine = ReferenceEngine(weights_of(model, checkpoint.load(model)), label)
    app = reference_app(engine, misbehave_allowed=misbehave_allowed)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host} port {port}: {error}") from error
    # The protocol is named, as create_server does not: only then asyncio switches Nagle's delay off.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=bound.detach()) as listener:
        shown = f"[{host}]" if family is socket.AF_INET6 else host
        ready = json.dumps({"url": f"http://{shown}:{listener.getsockname()[1]}", "model": str(model), "label": label})
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=SHUTDOWN_S, ws="none"
        )
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            return runner.run(_serve(_Server(config), listener, engine, ready, parent_pid))


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`: uvicorn would raise them again once it is done, and the process would end by one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    server: uvicorn.Server, listener: socket.socket, engine: ReferenceEngine, ready: str, parent_pid: int | None
) -> int:
    loop = asyncio.create_task(engine.run(), name="generation")
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    tasks: set[asyncio.Task[Any]] = {loop, serving}
    if parent_pid is not None:
        tasks.add(asyncio.create_task(_until_orphaned(parent_pid), name="parent"))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks.add(asyncio.create_task(stop.wait(), name="signals"))
    print(ready, flush=True)  # the socket listens already: a connection made now waits for the server
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    broken = loop.done()
    engine.abort(None)
    server.should_exit = True
    await serving
    for each in tasks - {serving}:
        each.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            print(f"reference engine: {result!r}", file=sys.stderr, flush=True)
    return LOOP_FAILED if broken else 0


async def _until_orphaned(parent_pid: int) -> None:
    """Returns once that process has ended, also where nobody has asked for its exit code yet."""
    while _lives(parent_pid):  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(PARENT_LOOK_S)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True  # a system without /proc: there an ended process shows only once it was reaped
    return state not in ("Z", "X")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m stitch.engines.reference`: the same without the command line of Stitch."""
    parser = argparse.ArgumentParser(prog="stitch engine reference", description=run_reference_engine.__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint directory to serve")
    parser.add_argument("--init", type=Path, metavar="DIR", help="write a random base checkpoint there and end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--label", default="0", help="the weight version to begin with")
    parser.add_argument("--misbehave-allowed", action="store_true", help="offer faults on demand at /misbehave")
    parser.add_argument("--parent-pid", type=int, help="end when this process ends")
    chosen = parser.parse_args(arguments)
    if (chosen.model is None) == (chosen.init is None):
        parser.error("give either --model or --init")
    try:
        if chosen.init is not None:
            init_checkpoint(chosen.init, chosen.seed)
            return 0
        return run_reference_engine(
            chosen.model,
            chosen.host,
            chosen.port,
            misbehave_allowed=chosen.misbehave_allowed,
            label=chosen.label,
            parent_pid=chosen.parent_pid,
        )
    except StitchError as error:
        print(f"reference engine: {error}", file=sys.stderr)
        return error.exit_code
