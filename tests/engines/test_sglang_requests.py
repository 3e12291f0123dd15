"""What is sent to SGLang, and what is read from its answers: pure functions."""

from __future__ import annotations

from typing import Any

import pytest

from stitch.core.errors import InvalidRequest
from stitch.engines.opening import open_engine
from stitch.engines.port import Engine, Json, LabelSpan, RouteKind
from stitch.engines.sglang import SglangEngine

pytestmark = pytest.mark.unit

G, C, H = RouteKind.GENERATE, RouteKind.COMPLETIONS, RouteKind.CHAT


@pytest.fixture
def engine() -> Engine:
    return SglangEngine("http://127.0.0.1:1", vocabulary=512)


def prepare(engine: Engine, kind: RouteKind, body: Json, namespace: str | None = "r/7") -> Json:
    return engine.prepare(kind, body, request_id="id", cache_namespace=namespace)


def test_the_body_is_copied_with_id_and_namespace_and_without_constraints(engine: Engine) -> None:
    body: Json = {"text": "a", "weight_version": {"min_version": 3}, "rid": "theirs", "sampling_params": {"top_k": 1}}
    before = dict(body)
    assert prepare(engine, G, body) == {"text": "a", "sampling_params": {"top_k": 1}, "rid": "id", "extra_key": "r/7"}
    assert body == before


def test_a_clients_own_cache_key_stays_apart_within_the_namespace(engine: Engine) -> None:
    keys = {
        prepare(engine, kind, {**body, "extra_key": own}, namespace).get("extra_key")
        for kind, body in ((G, {"text": "a"}), (C, {"prompt": "a"}), (H, {"messages": []}))
        for own in (None, "x", "y")
        for namespace in ("r/7", "r/8", None)
    }
    assert keys == {"r/7", "r/8", None, "r/7|x", "r/7|y", "r/8|x", "r/8|y", "x", "y"}
    assert prepare(engine, C, {"prompt": "a", "cache_salt": "s"})["cache_salt"] == "s"


def test_a_list_of_one_prompt_is_that_prompt(engine: Engine) -> None:
    assert prepare(engine, C, {"prompt": ["a"]})["prompt"] == "a"
    assert prepare(engine, C, {"prompt": [[1, 2]]})["prompt"] == [1, 2]
    assert prepare(engine, C, {"prompt": [1, 2]})["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (G, {"input_ids": [1, 512]}, "input_ids"),
        (G, {"input_ids": [-1]}, "input_ids"),
        (G, {"input_ids": [1.0]}, "input_ids"),
        (G, {"input_ids": [True]}, "input_ids"),
        (G, {"input_ids": []}, "input_ids"),
        (G, {"input_ids": [[1], [2]]}, "input_ids"),
        (G, {"input_ids": {"0": 1}}, "input_ids"),
        (G, {"text": ["a", "b"]}, "text"),
        (G, {"text": "a", "sampling_params": [{}]}, "sampling_params"),
        (G, {"text": "a", "sampling_params": {"n": 2}}, "n"),
        (G, {"text": "a", "sampling_params": {"beam_width": 4}}, "beam_width"),
        (G, {"text": "a", "sampling_params": {"stop_token_ids": [512]}}, "stop_token_ids"),
        (G, {"text": "a", "top_logprobs_num": 513}, "top_logprobs_num"),
        (G, {"text": "a", "top_logprobs_num": [1]}, "top_logprobs_num"),
        (G, {"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        (G, {"text": "a", "token_ids_logprob": [600]}, "token_ids_logprob"),
        (G, {"text": "a", "extra_key": ["x"]}, "extra_key"),
        (G, {"input_embeds": [[0.5]]}, "input_embeds"),
        (G, {"text": "a", "http_worker_ipc": "x"}, "http_worker_ipc"),
        (G, {"text": "a", "session_params": {"id": "x"}}, "session_params"),
        (C, {"prompt": [1, 512]}, "prompt"),
        (C, {"prompt": ["a", "b"]}, "prompt"),
        (C, {"prompt": [[1], [2]]}, "prompt"),
        (C, {"prompt": [[512]]}, "prompt"),
        (C, {"prompt": 5}, "prompt"),
        (C, {"prompt": "a", "n": 2}, "n"),
        (C, {"prompt": "a", "best_of": 2}, "best_of"),
        (C, {"prompt": "a", "logprobs": 100_000}, "logprobs"),
        (C, {"prompt": "a", "stop_token_ids": [-5]}, "stop_token_ids"),
        (H, {"messages": [], "input_ids": [512]}, "input_ids"),
        (H, {"messages": [], "top_logprobs": 100_000}, "top_logprobs"),
        (H, {"messages": [], "n": 2}, "n"),
    ],
)
def test_what_the_engine_does_not_survive_is_refused_by_name(engine: Engine, kind: RouteKind, body: Json, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        prepare(engine, kind, body)
    assert refusal.value.field == field
    assert field in str(refusal.value)


def test_ordinary_requests_pass(engine: Engine) -> None:
    bodies: list[tuple[RouteKind, Json]] = [
        (G, {"input_ids": [0, 511], "return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": -1}),
        (G, {"text": "a", "sampling_params": {"n": 1, "stop_token_ids": [3]}, "stream": True}),
        (C, {"model": "m", "prompt": "a", "logprobs": 5, "n": 1}),
        (C, {"model": "m"}),  # the engine's own refusal says it best
        (H, {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3}),
    ]
    for kind, body in bodies:
        assert prepare(engine, kind, body, None) == {**body, "rid": "id"}


def test_token_ids_wait_until_the_vocabulary_is_known() -> None:
    engine = open_engine("sglang", "http://127.0.0.1:1")
    assert prepare(engine, G, {"text": "a"})["text"] == "a"
    with pytest.raises(InvalidRequest, match="vocabulary"):
        prepare(engine, G, {"input_ids": [1]})


ROWS = [{"version": "3", "start": 0, "end": 4}, {"version": "4", "start": 4, "end": 9}]


@pytest.mark.parametrize("kind", list(RouteKind))
def test_spans_are_read_from_each_form(engine: Engine, kind: RouteKind) -> None:
    holder = "meta_info" if kind is G else "metadata"
    answer = {holder: {"weight_version": "4", "weight_versions": ROWS}}
    assert engine.spans(kind, answer) == (LabelSpan(label="3", start=0, end=4), LabelSpan(label="4", start=4, end=9))
    assert engine.start_label(kind, answer) == "3"


@pytest.mark.parametrize(
    "rows",
    [None, [], "x", [1], [{"version": 3, "start": 0, "end": 1}], [{"version": "3", "start": 1, "end": 2}], [ROWS[1], ROWS[0]]],
)
def test_spans_that_make_no_sense_are_none(engine: Engine, rows: Any) -> None:
    assert engine.spans(G, {"meta_info": {"weight_versions": rows}}) is None


def test_an_answer_without_versions_tells_none(engine: Engine) -> None:
    for answer in ({}, {"meta_info": None}, {"metadata": []}, {"error": {"message": "x"}}):
        for kind in RouteKind:
            assert engine.spans(kind, answer) is None
            assert engine.start_label(kind, answer) is None
            assert not engine.aborted(kind, answer)


def test_an_event_of_several_tokens_does_not_tell_the_first_ones_label(engine: Engine) -> None:
    def event(tokens: int) -> Json:
        return {"meta_info": {"weight_version": "8", "completion_tokens": tokens}}

    assert engine.start_label(G, event(1)) == "8"
    assert engine.start_label(G, event(3)) is None


def test_opening_by_name() -> None:
    assert open_engine("reference", "http://h:1/").url == "http://h:1"
    assert open_engine("sglang", "http://h:1").name == "sglang"
    for name, url in (("vllm9", "http://h:1"), ("sglang", "h:1"), ("sglang", "ftp://h"), ("sglang", "http://")):
        with pytest.raises(InvalidRequest):
            open_engine(name, url)
