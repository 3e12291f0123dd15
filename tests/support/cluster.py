"""A whole system on one machine, started through the command line as a user would: gateway, replicas, their engines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from stitch.cli.inspect import status_report
from tests.support import provision
from tests.support.provision import Running

POLICY: Final = "math"
RUN: Final = "r1"
CALL_TIMEOUT_S: Final = 60.0


class Cluster:
    """Processes over one log and one store. `stop` ends all of them."""

    def __init__(self, folder: Path, *, log: str | None = None, store: str | None = None) -> None:
        self.folder = folder
        self.log = log or f"sqlite://{folder / 'log.db'}"
        self.store = store or f"file://{folder / 'store'}"
        self.processes: dict[str, Running] = {}
        self.urls: dict[str, str] = {}
        self._starts = 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        for process in self.processes.values():
            process.stop(grace=5.0)

    def start(self, name: str, arguments: Sequence[str], env: dict[str, str] | None = None) -> str:
        """Starts `stitch ARGUMENTS --json` and returns the URL that it announces."""
        self._starts += 1
        output = self.folder / f"{name}-{self._starts}.out"
        command = [sys.executable, "-m", "stitch", *arguments]
        process = provision.start(command, output=output, name=name, env=env)
        self.processes[name] = process
        provision.wait_until(lambda: announced(output) is not None, f"{name} listens", process=process)
        url = announced(output)
        assert url is not None
        self.urls[name] = url
        return url

    def gateway(self, *options: str, name: str = "gateway") -> str:
        return self.start(name, ["gateway", "--json", "--port", "0", "--log", self.log, "--policy", POLICY, *options])

    def replica(self, name: str, *options: str, command: Sequence[str] = ()) -> str:
        words = ["replica", "--json", "--id", name, "--log", self.log, "--store", self.store, "--policy", POLICY]
        words += ["--workdir", str(self.folder / "work" / name), "--heartbeat", "0.5", "--reconcile", "1", *options]
        return self.start(name, [*words, "--", *command] if command else words)

    def wait_serving(self, name: str, version: str, timeout: float = provision.START_TIMEOUT_S) -> None:
        """Until the replica says that it serves the version, as `run/weight_v000001`."""

        def serves() -> bool:
            told = status(self.log)["replicas"]
            return any(r["replica"] == name and r["serving"] == version and r["phase"] == "serving" for r in told)

        provision.wait_until(serves, f"{name} serves {version}", timeout=timeout, process=self.processes.get(name))

    def wait_routed(self, count: int, gateway: str = "gateway") -> None:
        """Until the gateway's table has so many replicas in rotation."""

        def routed() -> bool:
            _, table = get(f"{self.urls[gateway]}/replicas")
            return sum(1 for r in table["replicas"] if r["phase"] in ("serving", "activating")) >= count

        provision.wait_until(routed, f"{count} replicas in the gateway's table", process=self.processes[gateway])


def announced(output: Path) -> str | None:
    """The URL of the line of JSON that a server prints once it listens."""
    for line in output.read_text(errors="replace").splitlines(keepends=True):
        if line.startswith('{"url"') and line.endswith("\n"):
            return str(json.loads(line)["url"])
    return None


def stitch(*arguments: str, check: bool = True, timeout: float = 120.0, env: dict[str, str] | None = None) -> Any:
    """Runs `stitch ARGUMENTS` to its end; the completed process."""
    done = subprocess.run(
        [sys.executable, "-m", "stitch", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **(env or {})},
    )
    if check:
        assert done.returncode == 0, f"stitch {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def status(log: str) -> dict[str, Any]:
    """What `stitch status --json` says."""
    return asyncio.run(status_report(log))


def get(url: str) -> tuple[int, Any]:
    return _call(urllib.request.Request(url))


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and decoded JSON of the answer, whatever the status."""
    data = json.dumps(body).encode()
    return _call(urllib.request.Request(url, data=data, headers={"content-type": "application/json", **(headers or {})}))


def _call(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")
