"""`python -m stitch.replica.keeper -- COMMAND`: runs a command, and ends it with all its children when stdin closes.

An engine is many processes, and an agent may be killed at any moment without a word. The keeper stands between the two: the agent
holds the other end of its stdin, which the kernel closes however the agent ends. It exits with the command's own status.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

GRACE_SECONDS: Final = 5.0
"""Between SIGTERM and SIGKILL: an engine that takes longer to end has nothing left to save."""
LOOK_SECONDS: Final = 0.05
USAGE: Final = 2
NOT_STARTED: Final = 127
"""As shells have it: no such program."""
SIGNALLED: Final = 128
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def main(arguments: Sequence[str]) -> int:
    """Runs what follows `--`. Returns its exit status, 128 + n where signal n ended it."""
    if not arguments or arguments[0] != "--" or len(arguments) < 2:
        print("usage: python -m stitch.replica.keeper -- COMMAND [ARGUMENT…]", file=sys.stderr)
        return USAGE
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # children that lose their parent become ours, so that they can be found and ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent, which then closes our stdin
    try:
        child = subprocess.Popen(  # noqa: S603 # the operator's own command
            arguments[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_keeper
        )
    except OSError as error:
        print(f"engine: cannot start {arguments[1]}: {error}", file=sys.stderr)
        return NOT_STARTED
    while child.poll() is None and not _closed(LOOK_SECONDS):
        pass
    status = _end(child)
    return status if status >= 0 else SIGNALLED - status


def _closed(timeout: float) -> bool:
    """Whether the other end of stdin is gone."""
    ready, _, _ = select.select([0], [], [], timeout)
    return bool(ready) and not os.read(0, 1024)


def _end(child: subprocess.Popen[bytes]) -> int:
    """Ends the command's process group and whatever else it left; returns the command's status."""
    _signal_all(child.pid, signal.SIGTERM)
    due = time.monotonic() + GRACE_SECONDS
    while (child.poll() is None or _children()) and time.monotonic() < due:
        _reap(child.pid)
        time.sleep(LOOK_SECONDS)
    while child.poll() is None or _children():
        _signal_all(child.pid, signal.SIGKILL)
        _reap(child.pid)
        time.sleep(LOOK_SECONDS)
    assert child.returncode is not None
    return child.returncode


def _signal_all(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for pid in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap(command: int) -> None:
    """Collects children that were adopted; the command itself is left to its Popen."""
    for pid in _children():
        if pid != command:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    """Process ids of our direct children, adopted ones included."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return []  # a system without /proc: the process group alone is ended
    return [int(pid) for pid in listed.split()]


def _die_with_keeper() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
