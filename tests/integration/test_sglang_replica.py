"""A replica beside real SGLang: it follows versions while it answers, and no answer names a version that did not compute it.

The truth is the engine's own greedy output, taken from each model alone before the replica joins: three random models give three
different continuations of a prompt. An answer's first span must be a prefix of the truth of the version that it names. Where an
answer spans two versions, the newer one, given the older one's tokens, must go on by the very token that the answer has next.

With --kv-scope version no prefix outlives its version, so that what an engine computes depends on nothing but the weights. By
default a session's prefixes survive loads, and no other session finds older ones than those of the version at which it began.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stitch.engines.opening import open_engine
from stitch.engines.port import PauseMode
from stitch.trainer.publisher import Publisher
from stitch.trainer.rollout_answer import Answer
from stitch.trainer.rollout_client import RolloutClient
from tests.support import provision
from tests.support.cluster import POLICY, RUN, Cluster, stitch
from tests.support.sglang import SglangServer

Prompt = tuple[int, ...]

pytestmark = [pytest.mark.integration, pytest.mark.sglang]

PROMPTS = ((65, 301, 77, 402), (210, 33, 187, 90, 411), (5 * 17, 9 * 31, 120))
"""As token ids, which any of the models' 512 tokens may be."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
VERSIONS = 7
"""The three models in turn, over and over."""
STEP_SECONDS = 120.0
"""Bound on a version being served by everyone, on a busy machine."""


@pytest.fixture(scope="module")
def truth(sglang_server: SglangServer) -> dict[tuple[int, Prompt], list[int]]:
    """(model, prompt) -> the greedy tokens of that model, asked of the engine while nothing else runs."""
    return asyncio.run(_truth(sglang_server))


async def _truth(server: SglangServer) -> dict[tuple[int, Prompt], list[int]]:
    found = {}
    engine = open_engine("sglang", server.url)
    try:
        for number, model in enumerate(server.models):
            await engine.pause(PauseMode.ABORT)
            await engine.load(model, str(number), flush_cache=True)
            await engine.resume()
            for prompt in PROMPTS:
                found[number, prompt] = await asyncio.to_thread(_tokens, server.url, prompt)
    finally:
        await engine.aclose()
    return found


def _tokens(url: str, prompt: Prompt) -> list[int]:
    body = json.dumps({"input_ids": prompt, "sampling_params": GREEDY}).encode()
    request = urllib.request.Request(f"{url}/generate", data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=STEP_SECONDS) as answer:
        tokens: list[int] = json.loads(answer.read())["output_ids"]
    return tokens


class _Askers:
    """Asks the prompts over and over, four at a time, until stopped."""

    def __init__(self, gateway: str) -> None:
        self.client = RolloutClient(gateway, policy=POLICY, run=RUN)
        self.answers: list[tuple[Prompt, Answer]] = []
        self._stop = False
        self._threads = ThreadPoolExecutor(4)
        self._running: list[Future[None]] = []

    def __enter__(self) -> _Askers:
        self._running = [self._threads.submit(self._ask, PROMPTS[n % len(PROMPTS)]) for n in range(4)]
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        self._threads.shutdown()
        self.client.close()
        for each in self._running:
            each.result()

    def ask(self, prompt: Prompt, *, exact_version: int, tokens: int = GREEDY["max_new_tokens"]) -> Answer:
        """One answer by that version alone."""
        sampling = {**GREEDY, "max_new_tokens": tokens}
        return self.client.generate(
            input_ids=prompt, sampling_params=sampling, exact_version=exact_version, wait=60, timeout=STEP_SECONDS
        )

    def crossing(self, number: int) -> list[tuple[Prompt, Answer]]:
        """The answers so far that an older version began and this one ended."""
        return [(p, a) for p, a in list(self.answers) if len(a.spans) > 1 and a.version_end == number]

    def _ask(self, prompt: Prompt) -> None:
        while not self._stop:
            answer = self.client.generate(input_ids=prompt, sampling_params=GREEDY, wait=60, timeout=STEP_SECONDS)
            self.answers.append((prompt, answer))

    def answered(self, number: int) -> bool:
        """Whether there is an answer that this version computed alone."""
        return any(answer.version_start == answer.version_end == number for _, answer in self.answers)


def _output(answer: Answer) -> list[int]:
    return list(answer.output_ids or ())


def test_it_follows_three_versions_and_every_answer_is_of_the_version_that_it_names(
    sglang_server: SglangServer, truth: dict[tuple[int, Prompt], list[int]], tmp_path: Path
) -> None:
    assert len({tuple(tokens) for tokens in truth.values()}) == len(truth), "the models must differ for the test to tell them apart"
    models, crossings = sglang_server.models, 0
    with (
        Cluster(tmp_path) as cluster,
        Publisher.open(policy=POLICY, run=RUN, log=cluster.log, store=cluster.store, base=models[0]) as publisher,
    ):
        gateway = cluster.gateway()
        cluster.replica("on-sglang", "--engine", "sglang", "--engine-url", sglang_server.url, "--kv-scope", "version")
        cluster.wait_serving("on-sglang", f"{RUN}/weight_v000000", STEP_SECONDS)
        cluster.wait_routed(1)
        with _Askers(gateway) as askers:
            for number in range(VERSIONS):
                if number:
                    publisher.publish(models[number % len(models)])
                cluster.wait_serving("on-sglang", f"{RUN}/weight_v{number:06d}", STEP_SECONDS)
                exact = askers.ask(PROMPTS[0], exact_version=number)
                assert _output(exact) == truth[number % len(models), PROMPTS[0]]
                for prompt, answer in askers.crossing(number):
                    _, start, _ = answer.spans[-1]
                    forced = askers.ask((*prompt, *_output(answer)[:start]), exact_version=number, tokens=1)
                    assert _output(forced) == _output(answer)[start : start + 1], (prompt, answer.spans)
                    crossings += 1
                provision.wait_until(partial(askers.answered, number), f"an answer by version {number} alone", timeout=STEP_SECONDS)
        answers = askers.answers
    assert crossings > 0, "no request lived across an activation"
    for prompt, answer in answers:
        version, start, end = answer.spans[0]
        assert start == 0
        assert answer.spans[-1][2] == len(_output(answer))
        assert _output(answer)[:end] == truth[version % len(models), prompt][:end], (prompt, answer.spans)


def test_a_stream_says_which_version_began_and_which_ended_it(
    sglang_server: SglangServer, truth: dict[tuple[int, Prompt], list[int]], tmp_path: Path
) -> None:
    with Cluster(tmp_path) as cluster:
        with Publisher.open(
            policy=POLICY, run=RUN, log=cluster.log, store=cluster.store, base=sglang_server.models[1]
        ) as publisher:
            gateway = cluster.gateway()
            cluster.replica("on-sglang", "--engine", "sglang", "--engine-url", sglang_server.url)
            cluster.wait_serving("on-sglang", str(publisher.head), STEP_SECONDS)
            cluster.wait_routed(1)
        with RolloutClient(gateway, policy=POLICY, run=RUN) as client:
            stream = client.generate(input_ids=PROMPTS[1], sampling_params=GREEDY, stream=True, timeout=STEP_SECONDS)
            assert len(list(stream)) > 1
            assert stream.answer is not None
            assert list(stream.answer.spans) == [(0, 0, GREEDY["max_new_tokens"])]
            assert _output(stream.answer) == truth[1, PROMPTS[1]]


class _Sessions:
    """Asks one replica, greedily, each time as part of a session or of none."""

    def __init__(self, url: str) -> None:
        self.client = RolloutClient(url, policy=POLICY, run=RUN)

    def ask(self, prompt: Prompt, session: str | None, *, alone: bool = False) -> Answer:
        """`alone`: in a namespace of the cache that nobody else has, so that only the present weights count."""
        return self.client.generate(
            input_ids=prompt,
            sampling_params=GREEDY,
            session=session,
            timeout=STEP_SECONDS,
            extra={"extra_key": uuid.uuid4().hex} if alone else None,
        )

    def across(self, prompt: Prompt, session: str, change: Callable[[], None]) -> Answer:
        """An answer that one version began and another one ended, for which `change` is called while several are computed."""
        changed = threading.Event()

        def ask() -> list[Answer]:
            answers = []
            while not changed.is_set():
                answers.append(self.ask(prompt, session))
            return answers

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask) for _ in range(4)]
            try:
                change()
            finally:
                changed.set()
        crossing = [answer for each in asking for answer in each.result() if len(answer.spans) > 1]
        assert crossing, "no request lived across the change"
        return crossing[0]


def _found(answer: Answer) -> int:
    """How many tokens of the prompt were in the cache."""
    cached: int = answer.raw["meta_info"]["cached_tokens"]
    return cached


def test_a_session_keeps_its_prefixes_and_no_other_finds_older_ones(
    sglang_server: SglangServer, truth: dict[tuple[int, Prompt], list[int]], tmp_path: Path
) -> None:
    """I10, with a cache that no load drops: forth to a newer version, back to the older one, and forth again."""
    models, prompt, other = sglang_server.models, PROMPTS[0], PROMPTS[1]
    with Cluster(tmp_path) as cluster:
        with Publisher.open(policy=POLICY, run=RUN, log=cluster.log, store=cluster.store, base=models[0]) as publisher:
            publisher.publish(models[1])

        def move(number: int) -> None:
            stitch("channel", "move", "held", str(number), "--log", cluster.log, "--policy", POLICY)
            if "on-sglang" in cluster.processes:
                cluster.wait_serving("on-sglang", f"{RUN}/weight_v{number:06d}", STEP_SECONDS)

        move(0)
        url = cluster.replica("on-sglang", "--engine", "sglang", "--engine-url", sglang_server.url, "--channel", "held")
        cluster.wait_serving("on-sglang", f"{RUN}/weight_v000000", STEP_SECONDS)
        asked = _Sessions(url)
        with asked.client:
            assert _output(asked.ask(prompt, "old")) == truth[0, prompt]
            move(1)
            new = asked.ask(prompt, "new")
            assert (_output(new), _found(new)) == (truth[1, prompt], 0)
            assert _output(asked.ask(prompt, None)) == truth[1, prompt]
            assert _found(asked.ask(prompt, "old")) > 0, "its own prefix did not survive the load"

            crossing = asked.across(other, "new", lambda: move(0))
            assert [version for version, _, _ in crossing.spans] == [1, 0]
            assert _output(asked.ask(prompt, "back")) == truth[0, prompt]
            move(1)
            # What the older version computed of this answer lies in the cache; whoever is of the newer one must not find it.
            whole = (*other, *_output(crossing))
            alone = _output(asked.ask(whole, None, alone=True))
            for session in ("new", "newer", None):
                assert _output(asked.ask(whole, session)) == alone, session
