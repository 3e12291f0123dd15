"""Child processes that cannot outlive their parent, whatever ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from stitch.core.errors import Unavailable

PARENT_LOOK_SECONDS: Final = 0.5
"""Between two looks at whether the parent still lives."""
KILL_SECONDS: Final = 10.0
"""Bound on the kernel reaping a killed process."""
_PR_SET_PDEATHSIG: Final = 1
_TAIL_BYTES: Final = 2000


def end_with_parent(parent_pid: int) -> None:
    """Called in a child: its whole process group is killed when the process `parent_pid` ends.

    The kernel is asked for SIGTERM at once where it offers that; a thread watches as well, for other systems and for a parent that
    was gone before the kernel was asked.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch, args=(parent_pid,), name="parent-watch", daemon=True).start()


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(PARENT_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(KILL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(0), signal.SIGKILL)


class Child:
    """A process in a group of its own that says on its first line of output, as JSON, that it is ready."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self.log = name, log
        self._process = process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> Self:
        """Starts the command. What it prints to stderr goes to the file `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env=None if env is None else {**os.environ, **env},
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def ready(self, timeout: float) -> dict[str, Any]:
        """The first line of output. Raises Unavailable with the end of the log where the process ends or `timeout` passes first."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = b""
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise Unavailable(f"{self.name} did not start within {timeout:g} s: {self.tail() or 'it said nothing'}")
        return told

    async def wait(self) -> int:
        """Its exit code."""
        return await self._process.wait()

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL to the group after `grace` seconds."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Not terminate(): it looks whether the process has ended, and takes its exit code from under asyncio.
                os.kill(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL to the group; returns once the process was reaped."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        async with asyncio.timeout(KILL_SECONDS):
            await self._process.wait()

    def tail(self) -> str:
        """The end of what it printed to stderr."""
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return ""
