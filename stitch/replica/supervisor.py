"""An engine that the replica starts itself: a command with the model and a free port filled in, ended with the replica.

The command runs under a keeper (see there), so that no process of it outlives the agent, however the agent ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.replica import keeper
from stitch.replica.config import MODEL_FIELD, PORT_FIELD, REFERENCE

NOT_HANDED_ON: Final = frozenset({"STITCH_TOKEN"})
"""Variables that the engine has no use for."""
LOOPBACK: Final = "127.0.0.1"
UNLABELLED: Final = "unlabelled"
"""The label of an engine that has yet to be told what it serves; no version's."""
END_SECONDS: Final = keeper.GRACE_SECONDS + 5.0
"""How long the keeper may take to end everything before it is killed itself."""

_REFERENCE_COMMAND: Final = (
    sys.executable,
    "-m",
    "stitch.engines.reference",
    "--model",
    MODEL_FIELD,
    "--host",
    LOOPBACK,
    "--port",
    PORT_FIELD,
    "--label",
    UNLABELLED,
)


def command_of(engine: str, command: Sequence[str]) -> tuple[str, ...]:
    """The command template: the one given, or the one that is known for the engine. Raises InvalidRequest."""
    if command:
        return tuple(command)
    if engine != REFERENCE:
        raise InvalidRequest(f"engine: how to start {engine} is not known; give a command", field="command")
    return _REFERENCE_COMMAND


class Supervisor:
    """One engine process. `start` once, `stop` whatever happened."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def could_not_start(self) -> bool:
        """Whether the command itself was at fault: no such program, or none that may be run."""
        return self._process is not None and self._process.returncode == keeper.NOT_STARTED

    async def start(self, model: Path) -> str:
        """Starts the command on the checkpoint directory; returns the base URL at which it will answer."""
        port = free_port()
        filled = [part.replace(MODEL_FIELD, str(model)).replace(PORT_FIELD, str(port)) for part in self._command]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            keeper.__name__,
            "--",
            *filled,
            stdin=asyncio.subprocess.PIPE,
            stdout=_stderr(),
            env={name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON},
            start_new_session=True,
        )
        return f"http://{LOOPBACK}:{port}"

    async def ended(self) -> str:
        """Waits for the end of the process; says how it ended."""
        assert self._process is not None
        status = await self._process.wait()
        return f"the engine ended with status {status} ({shlex.join(self._command[:3])} …)"

    async def stop(self) -> None:
        """Ends the engine and every process of it. May be called twice, and before `start`."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def free_port() -> int:
    """A port that is free now. The engine takes it a moment later, which no other program is likely to come between."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _stderr() -> int:
    """What the engine prints belongs to our log; our stdout is for what the command line promises."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError):  # replaced by something that is no file, as test runners do
        return asyncio.subprocess.DEVNULL
