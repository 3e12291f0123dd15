"""One engine per run and kind, put back to version 0 before each test."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from stitch.engines.opening import open_engine
from stitch.engines.port import Engine, Json, PauseMode, RouteKind
from tests.support import provision
from tests.support.engines import EngineCalls, ReferenceProcess, reference_models, start_reference
from tests.support.sglang import SglangServer

SLOW_MS: Final = 3
"""Per token of the reference engine, so that a request lives long enough to be interrupted; SGLang is as slow by itself."""
PROMPT: Final = (72, 101, 108, 108, 111)


def fresh_id() -> str:
    """Never used before: two seconds after a stream has ended, SGLang aborts whatever has its id then."""
    return uuid.uuid4().hex


@dataclass(slots=True, kw_only=True)
class Live:
    """A streaming request in flight, its events collected as they come."""

    events: list[Json] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def seen(self) -> int:
        """Tokens that have arrived."""
        return len(self.events[-1]["output_ids"]) if self.events else 0

    async def until(self, tokens: int) -> None:
        """Waits for that many tokens; the request must still be running then."""
        await provision.eventually(lambda: self.seen >= tokens or self._over(), f"{tokens} tokens arrive")
        assert not self._over(), "the request was over before it could be interrupted"

    def _over(self) -> bool:
        return self.task is not None and self.task.done()

    async def result(self) -> Json:
        assert self.task is not None
        await self.task
        return self.events[-1]


@dataclass(slots=True, kw_only=True)
class Case:
    """One engine, its adapter, and the checkpoints of versions 0, 1, 2."""

    name: str
    engine: Engine
    calls: EngineCalls
    models: Sequence[Path]
    process: provision.Running

    def body(
        self,
        tokens: int,
        *,
        prompt: Sequence[int] = PROMPT,
        namespace: str | None = None,
        request_id: str | None = None,
        **fields: Any,
    ) -> Json:
        """A greedy /generate request of exactly that many tokens, as the adapter would send it."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        raw = {"input_ids": list(prompt), "sampling_params": params, **fields}
        return self.engine.prepare(RouteKind.GENERATE, raw, request_id=request_id or fresh_id(), cache_namespace=namespace)

    async def generate(self, tokens: int, **fields: Any) -> Json:
        answer: Json = await self.calls.post("/generate", self.body(tokens, **fields))
        return answer

    async def live(self, tokens: int, **fields: Any) -> Live:
        """Starts a streaming request and returns once its first tokens have come, while it still runs."""
        live = self.streamed(tokens, **fields)
        await live.until(5)
        return live

    def streamed(self, tokens: int, **fields: Any) -> Live:
        """Starts a streaming request, which may end before anybody looks."""
        live = Live()
        body = self.body(tokens, **fields)

        async def collect() -> None:
            async with contextlib.aclosing(self.calls.events("/generate", body)) as events:
                async for event in events:
                    live.events.append(event)

        live.task = asyncio.create_task(collect())
        return live

    async def load(self, version: int, *, flush_cache: bool = True) -> None:
        await self.engine.load(self.models[version], str(version), flush_cache=flush_cache)

    async def activate(self, version: int) -> None:
        """Pause, load, resume: no request survives it."""
        await self.engine.pause(PauseMode.ABORT)
        await self.load(version)
        await self.engine.resume()

    def spans(self, answer: Json) -> list[tuple[str, int, int]]:
        told = self.engine.spans(RouteKind.GENERATE, answer)
        assert told is not None, answer
        return [(span.label, span.start, span.end) for span in told]


@pytest.fixture(scope="session")
def reference_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ReferenceProcess, Sequence[Path]]]:
    folder = tmp_path_factory.mktemp("reference")
    models = reference_models(folder, (21, 22, 23))
    server = start_reference(models[0], output=folder / "engine.log")
    yield server, models
    server.process.stop()


@pytest.fixture(params=["reference", pytest.param("sglang", marks=pytest.mark.sglang)])
async def case(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    """A resumed engine that serves version 0 and has nothing else to do."""
    if request.param == "sglang":
        real: SglangServer = request.getfixturevalue("sglang_server")
        url, models, process = real.url, real.models, real.process
    else:
        server, models = request.getfixturevalue("reference_server")
        url, process = server.url, server.process
    engine, calls = open_engine(request.param, url), EngineCalls(url)
    try:
        case = Case(name=request.param, engine=engine, calls=calls, models=models, process=process)
        if request.param == "reference":
            await calls.post("/misbehave", {"slow_ms": SLOW_MS})
        await case.activate(0)
        yield case
        await engine.resume()
        await engine.abort(None)
        assert process.alive(), process.tail()
    finally:
        await calls.aclose()
        await engine.aclose()
