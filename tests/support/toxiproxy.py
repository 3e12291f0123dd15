"""Toxiproxy for tests: TCP proxies whose wire a test cuts, slows or resets. Built by Go into the cache once."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.support import provision

MODULE: Final = "github.com/Shopify/toxiproxy/v2/cmd/server@v2.12.0"
BUILD_TIMEOUT_S: Final = 600.0
"""Half a minute on an idle machine, with all its modules to fetch."""
CONTROL_TIMEOUT_S: Final = 10.0


class CannotProvide(Exception):
    """No toxiproxy here; the text says why."""


def binary() -> Path:
    """Raises CannotProvide."""
    target = provision.cache_folder() / "bin" / "toxiproxy"
    with provision.file_lock(provision.cache_folder() / "toxiproxy.lock"):
        if not target.exists():
            _build(target)
    return target


def _build(target: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise CannotProvide("no go to build toxiproxy with")
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        try:
            done = subprocess.run(
                [go, "install", MODULE],
                env={**os.environ, "GOBIN": scratch},
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CannotProvide(f"go did not build toxiproxy within {BUILD_TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            raise CannotProvide(f"go could not build toxiproxy: {done.stderr[-1000:]}")
        (Path(scratch) / "server").rename(target)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The proxies of one test environment, which are treated alike: what is done, is done to each."""

    control: int
    names: Sequence[str]

    def cut(self) -> None:
        """Closes every connection and accepts none."""
        for name in self.names:
            self._call("POST", f"/proxies/{name}", {"enabled": False})

    def poison(self, kind: str, stream: str, **attributes: int) -> None:
        """Adds a toxic. `stream`: upstream (client to server) or downstream."""
        for name in self.names:
            body = {"name": f"{kind}-{stream}", "type": kind, "stream": stream, "attributes": attributes}
            self._call("POST", f"/proxies/{name}/toxics", body)

    def mend(self) -> None:
        """Removes every toxic and cut. What the proxies hold back is passed on."""
        self._call("POST", "/reset", None)

    def add(self, name: str, *, listen: int, upstream: int) -> None:
        self._call("POST", "/proxies", {"name": name, "listen": f"127.0.0.1:{listen}", "upstream": f"127.0.0.1:{upstream}"})

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.control, timeout=CONTROL_TIMEOUT_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        finally:
            connection.close()
        assert answer.status < 300, f"toxiproxy: {method} {path}: {answer.status} {text}"


@contextmanager
def toxiproxy(folder: Path, ports: dict[int, int]) -> Iterator[Wire]:
    """Proxies on loopback: listening port -> port of the server behind it. Raises CannotProvide."""
    program = binary()
    control = provision.free_port()
    running = provision.start(
        [program, "-host", "127.0.0.1", "-port", str(control)], output=folder / "toxiproxy.log", name="toxiproxy"
    )
    try:
        provision.wait_until(lambda: provision.port_answers(control), "toxiproxy answers", process=running)
        wire = Wire(control=control, names=[f"p{listen}" for listen in ports])
        for listen, upstream in ports.items():
            wire.add(f"p{listen}", listen=listen, upstream=upstream)
        yield wire
    finally:
        running.stop()
