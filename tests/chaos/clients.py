"""Clients that ask for everything in every form, and keep what they were told for a judgement at the end."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from stitch.http.sse import SseParser
from tests.support.cluster import POLICY

ROUTES: Final = ("/generate", "/v1/completions", "/v1/chat/completions")
EXPECTED: Final = frozenset({200, 409, 410, 429, 503, 504})
"""All that a well-formed request may be told while things break."""
CALL_SECONDS: Final = 60.0
BREATH_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One whole answer: what was asked, and what it says. Times in milliseconds of the wall clock, as the log's are."""

    asked: dict[str, Any]
    sent_ms: float
    run: str
    start: int
    end: int
    tip: str | None
    spans: tuple[tuple[int, int, int], ...]
    digests: tuple[tuple[str, int, int], ...]


class Crowd:
    """Clients in a thread of their own. `gateways` tells where to ask at the moment, `numbers` what to ask for."""

    def __init__(self, count: int, seed: int, gateways: Callable[[], list[str]], numbers: Callable[[], tuple[str, int]]) -> None:
        self.answers: list[Told] = []
        self.statuses: Counter[int] = Counter()
        self.broken: Counter[str] = Counter()
        """Exchanges that ended without an answer, by the kind of end."""
        self.wrong: list[str] = []
        """What no fault excuses."""
        self._count, self._seed, self._gateways, self._numbers = count, seed, gateways, numbers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask_all()), name="clients")

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Returns when every exchange has ended. May be called twice."""
        self._stop.set()
        self._thread.join()

    async def _ask_all(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_SECONDS)) as http:
            draws = [random.Random(f"{self._seed}-{n}") for n in range(self._count)]
            await asyncio.gather(*(self._ask_until_stopped(http, draw) for draw in draws))

    async def _ask_until_stopped(self, http: aiohttp.ClientSession, draw: random.Random) -> None:
        while not self._stop.is_set():
            try:
                await self._ask(http, draw)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self.broken[type(error).__name__] += 1
            await asyncio.sleep(BREATH_SECONDS)

    async def _ask(self, http: aiohttp.ClientSession, draw: random.Random) -> None:
        route, body, headers, asked = self._request(draw)
        sent = time.time() * 1000
        gateway = draw.choice(self._gateways())
        async with http.post(gateway + route, json=body, headers=headers) as response:
            status = response.status
            self.statuses[status] += 1
            if status not in EXPECTED:
                self.wrong.append(f"{status} to {asked}: {(await response.text())[:300]}")
                return
            if status != 200:
                await response.read()
                return
            told = await _last_event(response) if body.get("stream") else json.loads(await response.read())
            if told is None or "error" in told:
                self.broken["stream"] += 1
                return
            self._keep(told, response, route, asked, sent)

    def _keep(self, told: Any, response: aiohttp.ClientResponse, route: str, asked: dict[str, Any], sent: float) -> None:
        try:
            holder = told["meta_info"] if route == "/generate" else told
            truth = (holder if route == "/generate" else told["metadata"])["weights_digests"]
            answer = Told(
                asked=asked,
                sent_ms=sent,
                run=response.headers["X-Stitch-Run"],
                start=int(response.headers["X-Stitch-Version-Start"]),
                end=holder["weight_version_end"],
                tip=response.headers.get("X-Stitch-Tip"),
                spans=tuple((int(s["version"]), s["start"], s["end"]) for s in holder["weight_versions"]),
                digests=tuple((digest, start, end) for digest, start, end in truth),
            )
            assert holder["weight_version_start"] == answer.start
        except (KeyError, AssertionError) as error:
            self.wrong.append(f"{error!r} in the answer to {asked}: {str(told)[:600]}")
            return
        self.answers.append(answer)

    def _request(self, draw: random.Random) -> tuple[str, dict[str, Any], dict[str, str], dict[str, Any]]:
        """Route, body, headers, and what that asks for."""
        route, tokens = draw.choice(ROUTES), draw.randrange(1, 60)
        body: dict[str, Any] = {"stream": draw.random() < 0.5}
        if route == "/generate":
            body |= {"text": "hello", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        elif route == "/v1/completions":
            body |= {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
        else:
            body |= {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "ignore_eos": True}
        run, number = self._numbers()
        number = max(0, number + draw.randrange(-4, 3))
        asked: dict[str, Any] = draw.choice(
            [
                {},
                {"run": run},
                {"min_version": number},
                {"run": run, "min_version": number},
                {"exact_version": number},
                {"run": run, "exact_version": number},
                {"max_lag": draw.randrange(4)},
            ]
        )
        headers: dict[str, str] = {}
        if route != "/generate" and "exact_version" in asked and draw.random() < 0.5:
            body["model"] = f"{POLICY}@{asked['exact_version']}"
            if "run" in asked:
                headers["X-Stitch-Run"] = asked["run"]
        elif "max_lag" not in asked and draw.random() < 0.5:
            body["weight_version"] = dict(asked)
        else:
            headers |= {f"X-Stitch-{name.replace('_', '-')}": str(value) for name, value in asked.items()}
        if draw.random() < 0.5:
            headers["X-Stitch-Wait"] = str(draw.choice([0.5, 2, 5]))
        if draw.random() < 0.3:
            headers["X-Stitch-Session"] = f"s{draw.randrange(12)}"
        return route, body, headers, asked


async def _last_event(response: aiohttp.ClientResponse) -> Any:
    """The last data event of a stream that came to its end; None where it broke off without a word."""
    parser, last, ended = SseParser(), None, False
    async for chunk in response.content.iter_any():
        for each in parser.feed(chunk):
            ended = ended or each.done
            if each.data is not None and not each.done:
                last = json.loads(each.data)
    return last if ended or (last is not None and "error" in last) else None
