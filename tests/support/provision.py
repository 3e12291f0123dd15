"""Small helpers for tests that start real servers: a cache folder, free ports, file locks, processes that always end.

Every process gets a group of its own and is stopped by that group's id, at the latest when the interpreter ends. Where
the system offers `setpriv`, the kernel also kills it should the test run itself be killed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import pytest

POLL_S: Final = 0.02
"""Between two looks at a condition: short beside every server's start, cheap on a shared machine."""
START_TIMEOUT_S: Final = 60.0
"""For a server to answer; the slowest takes a tenth of it on an idle machine."""
STOP_GRACE_S: Final = 10.0
"""From SIGTERM to SIGKILL."""
KILLED_S: Final = 10.0
"""For the kernel to reap a killed process."""
LOG_TAIL_BYTES: Final = 4_000


def cache_folder() -> Path:
    """Where servers are installed once for all runs (`$XDG_CACHE_HOME/stitch-test`, by default under ~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / "stitch-test"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Exclusive among processes; waits. The kernel lets go when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def install_once(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's folder `name`, filled by `build(folder)` in whichever run comes first; never seen half-built."""
    target = cache_folder() / name
    with file_lock(cache_folder() / f"{name}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=cache_folder()) as scratch:
                work = Path(scratch) / "new"
                work.mkdir()
                build(work)
                work.rename(target)
    return target


def required(server: str) -> bool:
    """Whether STITCH_REQUIRE (a comma list) demands this server, so that its absence is a failure."""
    return server in {part.strip() for part in os.environ.get("STITCH_REQUIRE", "").split(",")}


def unavailable(server: str, reason: str) -> NoReturn:
    """Skips the test with the reason, or fails it where STITCH_REQUIRE names the server."""
    if required(server):
        pytest.fail(f"{server} is required (STITCH_REQUIRE) but cannot be had: {reason}", pytrace=False)
    pytest.skip(f"{server} cannot be had: {reason}")


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def free_port() -> int:
    return free_ports(1)[0]


def port_answers(port: int) -> bool:
    """Whether something accepts connections on the loopback port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process in a group of its own. `output` is the file that takes what it prints."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """To the whole group; nothing where its leader has ended, whose number may be another's by now."""
        if self.alive():
            self._signal_group(number)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def pause(self) -> None:
        """Returns once every thread of the process stands still: a signal alone leaves them a moment more."""
        self.send(signal.SIGSTOP)
        wait_until(self._stopped, f"{self.name} stands still", timeout=STOP_GRACE_S)

    def _stopped(self) -> bool:
        states = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                states.append(task.read_text(errors="replace").rpartition(")")[2].split()[0])
        return all(state in ("T", "t", "Z", "X") for state in states)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        if _running.pop(self.pid, None) is not None:
            self._signal_group(signal.SIGKILL)  # the leader, or what it left behind in its group
            self.process.wait(KILLED_S)

    def stop(self, grace: float = STOP_GRACE_S) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds; waits. May be called twice, and on a paused process."""
        if self.alive():
            self.send(signal.SIGTERM)
            self.resume()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        self.kill()

    def tail(self) -> str:
        """The end of what it printed, for messages."""
        return self.output.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if self.output.exists() else ""


_running: dict[int, Running] = {}


def stop_all() -> None:
    """Stops whatever a test forgot; runs by itself when the interpreter ends."""
    for each in list(_running.values()):
        each.stop(grace=1.0)


atexit.register(stop_all)


def start(
    command: Sequence[str | Path],
    *,
    output: Path,
    name: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Running:
    """Starts a process whose output goes to the file `output`; `env` is added to this process's own.

    Call it from the main thread: the kernel ties the child to the life of the thread that started it.
    """
    words = [str(word) for word in command]
    setpriv = shutil.which("setpriv")
    if setpriv is not None:
        words = [setpriv, "--pdeathsig", "KILL", "--", *words]
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as sink:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Running(name=name or Path(str(command[0])).name, process=process, output=output)
    _running[running.pid] = running
    return running


def wait_until(
    condition: Callable[[], bool], what: str, *, timeout: float = START_TIMEOUT_S, process: Running | None = None
) -> None:
    """Polls until true; fails with `what` at the time-out, or as soon as `process` ends."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process is not None and not process.alive():
            raise AssertionError(f"{process.name} ended before {what}:\n{process.tail()}")
        if time.monotonic() > deadline:
            tail = f":\n{process.tail()}" if process is not None else ""
            raise AssertionError(f"not within {timeout} s: {what}{tail}")
        time.sleep(POLL_S)


async def eventually(condition: Callable[[], bool | Awaitable[bool]], what: str, *, timeout: float = START_TIMEOUT_S) -> None:
    """As `wait_until`, on the event loop; the condition may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        if isinstance(result, Awaitable):
            result = await result
        if result:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        await asyncio.sleep(POLL_S)
