"""A replica beside real SGLang: it follows versions while it answers, and no answer names a version that did not compute it.

The truth is the engine's own greedy output, taken from each version alone before the replica joins: three random models give three
different continuations of a prompt. An answer's first span must be a prefix of the truth of the version that it names.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stitch.engines.opening import open_engine
from stitch.engines.port import PauseMode
from stitch.trainer.publisher import Publisher
from stitch.trainer.rollout_answer import Answer
from stitch.trainer.rollout_client import RolloutClient
from tests.support.cluster import POLICY, RUN, Cluster
from tests.support.sglang import SglangServer

pytestmark = [pytest.mark.integration, pytest.mark.sglang]

PROMPTS = ("the quick brown fox", "weights move from trainer", "over the lazy dog; 7")
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
STEP_SECONDS = 120.0
"""Bound on a version being served by everyone, on a busy machine."""


@pytest.fixture(scope="module")
def truth(sglang_server: SglangServer) -> dict[tuple[int, str], list[int]]:
    """(version, prompt) -> the greedy tokens of that version's model, asked of the engine while nothing else runs."""
    return asyncio.run(_truth(sglang_server))


async def _truth(server: SglangServer) -> dict[tuple[int, str], list[int]]:
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


def _tokens(url: str, prompt: str) -> list[int]:
    body = json.dumps({"text": prompt, "sampling_params": GREEDY}).encode()
    request = urllib.request.Request(f"{url}/generate", data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=STEP_SECONDS) as answer:
        tokens: list[int] = json.loads(answer.read())["output_ids"]
    return tokens


class _Askers:
    """Asks the prompts over and over, four at a time, until stopped."""

    def __init__(self, gateway: str) -> None:
        self.client = RolloutClient(gateway, policy=POLICY, run=RUN)
        self.answers: list[tuple[str, Answer]] = []
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

    def _ask(self, prompt: str) -> None:
        while not self._stop:
            answer = self.client.generate(prompt=prompt, sampling_params=GREEDY, wait=60, timeout=STEP_SECONDS)
            self.answers.append((prompt, answer))

    def answered(self, number: int) -> Iterator[Answer]:
        """The answers that one version computed alone."""
        return (answer for _, answer in self.answers if answer.version_start == answer.version_end == number)


def _first_tokens(answer: Answer) -> list[int]:
    _, start, end = answer.spans[0]
    return list(answer.output_ids or ())[start:end]


def test_it_follows_three_versions_and_every_answer_is_of_the_version_that_it_names(
    sglang_server: SglangServer, truth: dict[tuple[int, str], list[int]], tmp_path: Path
) -> None:
    assert len({tuple(tokens) for tokens in truth.values()}) == len(truth), "the models must differ for the test to tell them apart"
    models = sglang_server.models
    with (
        Cluster(tmp_path) as cluster,
        Publisher.open(policy=POLICY, run=RUN, log=cluster.log, store=cluster.store, base=models[0]) as publisher,
    ):
        gateway = cluster.gateway()
        cluster.replica("on-sglang", "--engine", "sglang", "--engine-url", sglang_server.url)
        cluster.wait_serving("on-sglang", f"{RUN}/weight_v000000", STEP_SECONDS)
        cluster.wait_routed(1)
        with _Askers(gateway) as askers:
            for number in (0, 1, 2):
                if number:
                    publisher.publish(models[number])
                cluster.wait_serving("on-sglang", f"{RUN}/weight_v{number:06d}", STEP_SECONDS)
                exact = askers.client.generate(
                    prompt=PROMPTS[0], sampling_params=GREEDY, exact_version=number, wait=60, timeout=STEP_SECONDS
                )
                assert list(exact.output_ids or ()) == truth[number, PROMPTS[0]]
        answers = askers.answers
    assert len(answers) >= 6
    for prompt, answer in answers:
        assert answer.spans[-1][2] == len(answer.output_ids or ())
        first = _first_tokens(answer)
        assert first == truth[answer.version_start, prompt][: len(first)], (prompt, answer.spans)
    for number in (0, 1, 2):
        assert any(True for _ in askers.answered(number)), f"no answer by version {number} alone"


def test_a_stream_says_which_version_began_and_which_ended_it(
    sglang_server: SglangServer, truth: dict[tuple[int, str], list[int]], tmp_path: Path
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
            stream = client.generate(prompt=PROMPTS[1], sampling_params=GREEDY, stream=True, timeout=STEP_SECONDS)
            assert len(list(stream)) > 1
            assert stream.answer is not None
            assert stream.answer.spans == [(0, 0, GREEDY["max_new_tokens"])]
            assert list(stream.answer.output_ids or ()) == truth[1, PROMPTS[1]]
