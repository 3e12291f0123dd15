"""What the port Engine promises, on the reference engine and on real SGLang."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Final

import pytest

from stitch.core.errors import InvalidRequest
from stitch.engines.opening import open_engine
from stitch.engines.port import EngineFailed, Json, LoadRefused, PauseMode, RouteKind
from tests.engines.conftest import PROMPT, Case, fresh_id
from tests.support import provision
from tests.support.engines import digest_of_files

pytestmark = pytest.mark.contract

LONG: Final = 300
"""Tokens of a request that is to be interrupted."""
HELD: Final = (PauseMode.RETRACT, PauseMode.IN_PLACE)


def output(answer: Json) -> list[int]:
    tokens: list[int] = answer["output_ids"]
    return tokens


def check_digests(case: Case, answer: Json) -> None:
    """Where the engine tells what was in its memory, the labels must name just that."""
    if case.name != "reference":
        return
    told = [(digest, start, end) for digest, start, end in answer["meta_info"]["weights_digests"]]
    truth = [(digest_of_files(case.models[int(label)]), start, end) for label, start, end in case.spans(answer)]
    assert told == truth


async def test_an_answer_tells_the_version_of_its_tokens(case: Case) -> None:
    answer = await case.generate(12)
    assert len(output(answer)) == 12
    assert case.spans(answer) == [("0", 0, 12)]
    assert case.engine.start_label(RouteKind.GENERATE, answer) == "0"
    assert not case.engine.aborted(RouteKind.GENERATE, answer)
    check_digests(case, answer)


async def test_versions_differ_and_come_back(case: Case) -> None:
    first = output(await case.generate(20))
    await case.activate(1)
    report = await case.engine.report()
    assert (report.model_path, report.label) == (str(case.models[1]), "1")
    second = await case.generate(20)
    assert case.spans(second) == [("1", 0, 20)]
    assert output(second) != first
    check_digests(case, second)
    await case.activate(0)
    assert output(await case.generate(20)) == first


async def test_log_probabilities_belong_to_the_tokens(case: Case) -> None:
    answer = await case.generate(8, return_logprob=True)
    rows = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in rows] == output(answer)
    assert all(-20 < logprob < 0 for logprob, _, _ in rows)


async def test_a_stream_tells_versions_in_its_last_event(case: Case) -> None:
    live = case.streamed(40)
    last = await live.result()
    assert output(last) == output(await case.generate(40))
    assert case.spans(last) == [("0", 0, 40)]
    if len(live.events[0]["output_ids"]) == 1:
        assert case.engine.start_label(RouteKind.GENERATE, live.events[0]) == "0"
    assert case.engine.spans(RouteKind.GENERATE, live.events[0]) is None
    check_digests(case, last)


BODIES: Final[dict[RouteKind, tuple[str, Json]]] = {
    RouteKind.GENERATE: ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}),
    RouteKind.COMPLETIONS: ("/v1/completions", {"model": "m", "prompt": "hello", "max_tokens": 6, "ignore_eos": True}),
    RouteKind.CHAT: (
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "ignore_eos": True},
    ),
}


@pytest.mark.parametrize("kind", list(RouteKind))
async def test_each_form_of_answer_is_understood(case: Case, kind: RouteKind) -> None:
    path, body = BODIES[kind]
    assert case.engine.generation_routes[path] is kind
    identity = fresh_id()
    constrained = {**body, "weight_version": {"min_version": 0}}
    sent = case.engine.prepare(kind, constrained, request_id=identity, cache_namespace="r/0")
    answer = await case.calls.post(path, sent)
    spans = case.engine.spans(kind, answer)
    assert case.engine.tells_versions(kind, stream=False)
    assert spans is not None
    assert [(span.label, span.start, span.end) for span in spans] == [("0", 0, 6)]
    assert case.engine.start_label(kind, answer) == "0"
    assert not case.engine.aborted(kind, answer)
    assert identity in (answer.get("id"), answer.get("meta_info", {}).get("id"))


@pytest.mark.parametrize("kind", list(RouteKind))
async def test_each_form_of_stream_tells_what_the_adapter_says_it_tells(case: Case, kind: RouteKind) -> None:
    path, body = BODIES[kind]
    sent = case.engine.prepare(kind, body, request_id=fresh_id(), cache_namespace=None)
    events = [event async for event in case.calls.events(path, sent)]
    told = case.engine.spans(kind, events[-1])
    assert (told is not None) == case.engine.tells_versions(kind, stream=True)
    if told is not None:
        assert [(span.label, span.start, span.end) for span in told] == [("0", 0, 6)]


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_paused_engine_is_alive_but_not_ready(case: Case, mode: PauseMode) -> None:
    assert await case.engine.ready()
    await case.engine.pause(mode)
    assert not await case.engine.ready()
    assert await case.engine.alive()
    assert (await case.engine.report()).paused in (True, None)
    await case.engine.resume()
    assert await case.engine.ready()
    assert len(output(await case.generate(3))) == 3


async def test_pausing_with_abort_ends_requests_with_what_they_have(case: Case) -> None:
    whole = output(await case.generate(LONG))
    live = await case.live(LONG)
    await case.engine.pause(PauseMode.ABORT)
    last = await live.result()
    tokens = output(last)
    assert case.engine.aborted(RouteKind.GENERATE, last)
    assert 0 < len(tokens) < LONG
    assert tokens == whole[: len(tokens)]
    assert case.spans(last) == [("0", 0, len(tokens))]


@pytest.mark.parametrize("mode", HELD)
async def test_a_held_request_goes_on_as_if_nothing_had_been(case: Case, mode: PauseMode) -> None:
    live = await case.live(LONG)
    await case.engine.pause(mode)
    await case.engine.resume()
    last = await live.result()
    assert len(output(last)) == LONG
    assert case.spans(last) == [("0", 0, LONG)]
    assert not case.engine.aborted(RouteKind.GENERATE, last)


@pytest.mark.parametrize("mode", HELD)
async def test_an_update_switches_a_held_request_at_one_token(case: Case, mode: PauseMode) -> None:
    before = output(await case.generate(LONG))
    live = await case.live(LONG)
    await case.engine.pause(mode)
    await case.load(1, flush_cache=mode is PauseMode.RETRACT)
    report = await case.engine.report()
    assert (report.model_path, report.label) == (str(case.models[1]), "1")
    await case.engine.resume()
    last = await live.result()
    tokens = output(last)

    (first, second) = case.spans(last)
    switch = first[2]
    assert first == ("0", 0, switch)
    assert second == ("1", switch, LONG)
    check_digests(case, last)
    assert tokens[:switch] == before[:switch]
    assert tokens[switch:] != before[switch:]
    if mode is PauseMode.RETRACT or case.name == "reference":
        # The new version alone, given the same prefix, goes on in the same way: not one token more was the old one's. Compared as
        # far as one computation in bf16 is sure to choose like another that batches the prefix otherwise.
        await case.activate(1)
        sure = LONG if case.name == "reference" else 4
        tail = output(await case.generate(LONG - switch, prompt=(*PROMPT, *tokens[:switch])))
        assert tokens[switch : switch + sure] == tail[:sure]


async def test_a_request_that_comes_during_a_pause_waits_for_its_end(case: Case) -> None:
    await case.engine.pause(PauseMode.RETRACT)
    waiting = asyncio.create_task(case.generate(10))
    await case.load(1)
    assert not waiting.done()
    await case.engine.resume()
    answer = await waiting
    assert case.spans(answer) == [("1", 0, 10)]
    check_digests(case, answer)


async def test_aborting_one_request_spares_the_others(case: Case) -> None:
    cut_id = fresh_id()
    one = await case.live(LONG, request_id=cut_id)
    other = await case.live(LONG)
    await case.engine.abort(cut_id)
    cut = await one.result()
    assert case.engine.aborted(RouteKind.GENERATE, cut)
    assert len(output(cut)) < LONG
    whole = await other.result()
    assert not case.engine.aborted(RouteKind.GENERATE, whole)
    assert len(output(whole)) == LONG


async def test_aborting_all_ends_all_and_an_unknown_id_is_no_error(case: Case) -> None:
    lives = [await case.live(LONG) for _ in range(2)]
    await case.engine.abort("nobody")
    await case.engine.abort(None)
    for live in lives:
        last = await live.result()
        assert case.engine.aborted(RouteKind.GENERATE, last)
    assert len(output(await case.generate(3))) == 3


@pytest.mark.parametrize("kind", [RouteKind.COMPLETIONS, RouteKind.CHAT])
async def test_an_aborted_answer_says_so_in_the_openai_forms(case: Case, kind: RouteKind) -> None:
    path, body = BODIES[kind]
    identity = fresh_id()
    sent = case.engine.prepare(kind, {**body, "max_tokens": LONG}, request_id=identity, cache_namespace=None)
    answer = asyncio.create_task(case.calls.post(path, sent))
    await provision.eventually(lambda: _running(case), "the request runs")
    await case.engine.abort(identity)
    assert case.engine.aborted(kind, await answer)


async def _running(case: Case) -> bool:
    return bool(await case.engine.in_flight())


async def test_requests_in_flight_are_counted(case: Case) -> None:
    async def none() -> bool:
        return await case.engine.in_flight() == 0

    await provision.eventually(none, "nothing is in flight")
    live = await case.live(LONG)
    await provision.eventually(lambda: _running(case), "one is in flight")
    await case.engine.abort(None)
    await live.result()
    await provision.eventually(none, "nothing is in flight any more")


async def test_a_missing_directory_is_refused_and_the_old_weights_serve_on(case: Case, tmp_path: Path) -> None:
    before = output(await case.generate(12))
    await case.engine.pause(PauseMode.ABORT)
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(LoadRefused):
            await case.engine.load(path, "7", flush_cache=True)
    report = await case.engine.report()
    assert (report.model_path, report.label) == (str(case.models[0]), "0")
    await case.engine.resume()
    answer = await case.generate(12)
    assert output(answer) == before
    assert case.spans(answer) == [("0", 0, 12)]
    check_digests(case, answer)
    await case.activate(1)  # a refusal leaves the engine able to load what is good


async def test_flushing_the_cache_of_held_requests_is_an_error(case: Case) -> None:
    """SGLang has exchanged the weights by then and vouches for nothing; the reference engine refuses before."""
    live = await case.live(LONG)
    await case.engine.pause(PauseMode.IN_PLACE)
    with pytest.raises(LoadRefused if case.name == "reference" else EngineFailed):
        await case.load(1, flush_cache=True)
    await case.engine.resume()
    last = await live.result()
    assert len(output(last)) == LONG
    if case.name == "reference":
        assert case.spans(last) == [("0", 0, LONG)]
        check_digests(case, last)


async def test_a_label_alone_changes_without_aborting_anyone(case: Case) -> None:
    before = output(await case.generate(LONG))
    live = await case.live(LONG)
    await case.engine.pause(PauseMode.IN_PLACE)
    await case.engine.set_label("41")
    assert (await case.engine.report()).label == "41"
    await case.engine.resume()
    last = await live.result()
    assert output(last) == before
    assert [label for label, _, _ in case.spans(last)] == ["0", "41"]


@pytest.mark.parametrize("kind", [RouteKind.GENERATE, RouteKind.COMPLETIONS])
async def test_a_cache_namespace_keeps_old_prefixes_away(case: Case, kind: RouteKind) -> None:
    """A prefix that version 0 left in the cache must not serve version 1 under a namespace of its own."""
    prompt = [*range(40, 120)]
    path = "/generate" if kind is RouteKind.GENERATE else "/v1/completions"

    async def ask(namespace: str) -> Any:
        limits: Json = {"temperature": 0, "ignore_eos": True}
        if kind is RouteKind.GENERATE:
            raw: Json = {"input_ids": prompt, "sampling_params": {**limits, "max_new_tokens": 8}}
        else:
            raw = {"model": "m", "prompt": prompt, **limits, "max_tokens": 8}
        sent = case.engine.prepare(kind, raw, request_id=fresh_id(), cache_namespace=namespace)
        answer = await case.calls.post(path, sent)
        return output(answer) if kind is RouteKind.GENERATE else answer["choices"][0]["text"]

    await case.activate(1)
    truth = await ask("r/1")
    await case.activate(0)
    old = await ask("r/0")
    assert old != truth
    await case.engine.pause(PauseMode.RETRACT)
    await case.load(1, flush_cache=False)
    await case.engine.resume()
    assert await ask("r/1") == truth


async def test_tokens_outside_of_the_vocabulary_never_reach_the_engine(case: Case) -> None:
    for token in (-1, 10**6):
        with pytest.raises(InvalidRequest):
            case.body(3, prompt=(1, 2, token))
    assert len(output(await case.generate(3))) == 3


@pytest.mark.parametrize("name", ["reference", "sglang"])
async def test_an_engine_that_is_gone_is_reported_as_such(name: str, tmp_path: Path) -> None:
    engine = open_engine(name, f"http://127.0.0.1:{provision.free_port()}")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.aclose)
        assert not await engine.ready()
        assert not await engine.alive()
        for call in (
            engine.report(),
            engine.pause(PauseMode.RETRACT),
            engine.resume(),
            engine.load(tmp_path, "1", flush_cache=True),
            engine.set_label("1"),
            engine.abort(None),
            engine.in_flight(),
        ):
            with pytest.raises(EngineFailed):
                await call
