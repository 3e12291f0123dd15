"""Engines for tests: the reference engine as a process, checkpoints for it, and a small HTTP client of the generation routes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from stitch.engines.reference import checkpoint
from stitch.engines.reference.model import ModelConfig, init, to_bf16
from stitch.weights.digest import specs, weights_digest
from stitch.weights.safetensors import open_checkpoint
from tests.support import provision

CALL_TIMEOUT_S: Final = 120.0
"""For one answer of an engine on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceProcess:
    """A reference engine in a process of its own; stop it with `process.stop()`."""

    url: str
    process: provision.Running


def reference_models(folder: Path, seeds: Sequence[int]) -> tuple[Path, ...]:
    """A checkpoint directory of the reference policy per seed: as many versions of one policy."""
    directories = tuple(folder / f"policy-{seed}" for seed in seeds)
    for directory, seed in zip(directories, seeds, strict=True):
        checkpoint.save(directory, to_bf16(init(ModelConfig(), seed)))
    return directories


def start_reference(model: Path, *, output: Path, label: str = "0", misbehave: bool = True) -> ReferenceProcess:
    """Starts an engine on a free port and waits until it listens. Call it from the main thread."""
    command: list[str | Path] = [sys.executable, "-m", "stitch.engines.reference", "--model", model, "--label", label]
    command += ["--parent-pid", str(os.getpid())]
    if misbehave:
        command.append("--misbehave-allowed")
    process = provision.start(command, output=output, name="reference engine")
    provision.wait_until(lambda: _announced(output) is not None, "the reference engine listens", process=process)
    url = _announced(output)
    assert url is not None
    return ReferenceProcess(url=url, process=process)


def _announced(output: Path) -> str | None:
    """The URL in the line of JSON that the engine prints once it listens."""
    for line in output.read_text(errors="replace").splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            return str(json.loads(line)["url"])
    return None


def digest_of_files(directory: Path) -> str:
    """The weights digest of a checkpoint directory, from its bytes alone."""
    opened = open_checkpoint(directory)
    try:
        return weights_digest(specs(opened.tensors()))
    finally:
        opened.close()


class EngineCalls:
    """Calls of the routes that generate; statuses other than 200 raise AssertionError with the answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S))

    async def aclose(self) -> None:
        await self._session.close()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of the answer, or None where it has no body."""
        async with self._session.post(self.url + path, json=dict(body)) as response:
            raw = await response.read()
            assert response.status == 200, f"{path}: {response.status} {raw[:1000]!r}"
            return json.loads(raw) if raw else None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The data events of a stream, without the mark of its end."""
        async with self._session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, f"{path}: {response.status} {await response.text()}"
            async for line in response.content:
                text = line.decode().strip()
                if text.startswith("data: ") and text != "data: [DONE]":
                    yield json.loads(text.removeprefix("data: "))
