"""What a request asks for: every form that is accepted, and every one that is not, by the field it names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.core.admission import Constraint
from stitch.core.errors import InvalidRequest
from stitch.core.ids import RunId, VersionNumber
from stitch.engines.port import RouteKind
from stitch.http.request import MAX_WAIT_SECONDS, RequestSpec, merge, parse_body, parse_headers

pytestmark = pytest.mark.unit

FIELDS = {
    "policy",
    "channel",
    "run",
    "min_version",
    "exact_version",
    "max_lag",
    "wait",
    "session",
    "request_id",
    "model",
    "weight_version",
}
NAMES = ["policy", "channel", "run", "min-version", "exact-version", "max-lag", "wait", "session", "request-id"]


def told(error: InvalidRequest) -> None:
    assert error.field in FIELDS


def headers(**given: str) -> list[tuple[bytes, bytes]]:
    return [(f"x-stitch-{name.replace('_', '-')}".encode(), value.encode("latin-1")) for name, value in given.items()]


def body(**fields: Any) -> RequestSpec:
    return parse_body(RouteKind.GENERATE, {"weight_version": fields})


def test_all_headers() -> None:
    spec = parse_headers(
        headers(
            policy="p",
            channel="canary",
            run="r1",
            min_version="3",
            exact_version="r1/weight_v000007",
            max_lag="2",
            wait="1.5",
            session="s 1",
            request_id="q-1",
        )
    )
    assert spec == RequestSpec(
        policy="p",
        channel="canary",
        constraint=Constraint(run=RunId("r1"), min_version=VersionNumber(3), exact_version=VersionNumber(7), max_lag=2),
        wait=1.5,
        session="s 1",
        request_id="q-1",
    )


def test_nothing_asked_for() -> None:
    assert parse_headers([(b"content-type", b"application/json"), (b"x-other", b"\xff")]) == RequestSpec()
    assert parse_body(RouteKind.GENERATE, {"text": "x"}) == RequestSpec()
    assert body(min_version=None, exact_version=None) == RequestSpec()
    assert parse_body(RouteKind.CHAT, {"weight_version": None, "model": None}) == RequestSpec()


@pytest.mark.parametrize(
    ("pairs", "session"),
    [
        ([(b"x-session-id", b"a")], "a"),
        ([(b"x-smg-routing-key", b"b")], "b"),
        ([(b"x-smg-routing-key", b"b"), (b"x-session-id", b"a")], "a"),
        ([(b"x-smg-routing-key", b"b"), (b"x-stitch-session", b"c"), (b"x-session-id", b"a")], "c"),
    ],
)
def test_session_names(pairs: list[tuple[bytes, bytes]], session: str) -> None:
    assert parse_headers(pairs).session == session


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("min_version", "-1", "min_version"),
        ("min_version", "+1", "min_version"),
        ("min_version", "1.0", "min_version"),
        ("min_version", "", "min_version"),
        ("min_version", "null", "min_version"),
        ("min_version", "true", "min_version"),
        ("min_version", "9007199254740992", "min_version"),
        ("min_version", "9" * 400, "min_version"),
        ("min_version", "\xb2", "min_version"),
        ("exact_version", "weight_v000007", "exact_version"),
        ("exact_version", "R!/weight_v000007", "exact_version"),
        ("exact_version", "r/weight_v" + "9" * 30, "exact_version"),
        ("run", "No Name", "run"),
        ("max_lag", "-1", "max_lag"),
        ("max_lag", "1e3", "max_lag"),
        ("wait", "nan", "wait"),
        ("wait", "inf", "wait"),
        ("wait", "-1", "wait"),
        ("wait", "1e9", "wait"),
        ("wait", str(MAX_WAIT_SECONDS + 1), "wait"),
        ("wait", "1_0", "wait"),
        ("policy", "../etc", "policy"),
        ("channel", "41", "channel"),
        ("session", "x" * 257, "session"),
        ("session", "a\tb", "session"),
        ("request_id", "a b", "request_id"),
        ("request_id", "x" * 129, "request_id"),
    ],
)
def test_malformed_header_names_its_field(name: str, value: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_headers(headers(**{name: value}))
    assert refused.value.field == field
    assert field in str(refused.value)


def test_same_header_twice() -> None:
    twice = headers(min_version="3") + headers(min_version="3")
    assert parse_headers(twice).constraint.min_version == 3
    with pytest.raises(InvalidRequest) as refused:
        parse_headers(headers(min_version="3") + headers(min_version="4"))
    assert refused.value.field == "min_version"


@pytest.mark.parametrize("value", [True, -1, 1.0, 2**53, 10**400, "7", "v7", [], {}, float("nan"), "r1/weight_v-1"])
@pytest.mark.parametrize("field", ["min_version", "exact_version"])
def test_malformed_version_in_body(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body(**{field: value})
    assert refused.value.field == field


def test_version_text_in_body_fixes_the_run() -> None:
    assert body(min_version="r1/weight_v000007").constraint == Constraint(run=RunId("r1"), min_version=VersionNumber(7))
    assert body(min_version="r1/weight_v7", exact_version=8, run="r1").constraint.exact_version == 8
    with pytest.raises(InvalidRequest) as refused:
        body(min_version="r1/weight_v000007", run="r2")
    assert refused.value.field == "min_version"
    with pytest.raises(InvalidRequest):
        body(min_version="r1/weight_v000007", exact_version="r2/weight_v000008")


@pytest.mark.parametrize(
    ("weight_version", "field"),
    [
        (7, "weight_version"),
        ("7", "weight_version"),
        ([1], "weight_version"),
        ({"min_versoin": 1}, "weight_version"),
        ({"run": 1}, "run"),
    ],
)
def test_malformed_weight_version(weight_version: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(RouteKind.GENERATE, {"weight_version": weight_version})
    assert refused.value.field == field


def test_exact_below_min() -> None:
    with pytest.raises(InvalidRequest) as refused:
        body(min_version=8, exact_version=7)
    assert refused.value.field == "exact_version"
    with pytest.raises(InvalidRequest):
        merge(parse_headers(headers(min_version="8")), body(exact_version=7))


def test_model_names_policy_channel_or_version() -> None:
    assert parse_body(RouteKind.CHAT, {"model": "p"}).policy == "p"
    on_channel = parse_body(RouteKind.COMPLETIONS, {"model": "p@canary"})
    assert (on_channel.policy, on_channel.channel) == ("p", "canary")
    exact = parse_body(RouteKind.CHAT, {"model": "p@41"})
    assert (exact.policy, exact.channel, exact.constraint) == ("p", None, Constraint(exact_version=VersionNumber(41)))
    full = parse_body(RouteKind.CHAT, {"model": "p@r1/weight_v000041"})
    assert full.constraint == Constraint(run=RunId("r1"), exact_version=VersionNumber(41))
    assert parse_body(RouteKind.GENERATE, {"model": 7}) == RequestSpec()


@pytest.mark.parametrize("model", [7, True, "", "@", "p@", "@41", "Qwen/Qwen3", "p@a@b", "p@99999999999999999999"])
def test_malformed_model(model: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(RouteKind.CHAT, {"model": model})
    assert refused.value.field == "model"


def test_model_and_weight_version_contradict() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(RouteKind.CHAT, {"model": "p@41", "weight_version": {"exact_version": 40}})
    assert refused.value.field == "model"


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        ({"min_version": "3"}, {"min_version": 4}, "min_version"),
        ({"exact_version": "3"}, {"exact_version": 4}, "exact_version"),
        ({"run": "r1"}, {"run": "r2"}, "run"),
        ({"min_version": "r1/weight_v3"}, {"run": "r2"}, "run"),
    ],
)
def test_headers_and_body_contradict(first: dict[str, str], second: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        merge(parse_headers(headers(**first)), body(**second))
    assert refused.value.field == field


def test_merge_keeps_both() -> None:
    merged = merge(parse_headers(headers(min_version="3", wait="2", policy="p")), body(min_version=3, exact_version=5, run="r1"))
    assert merged == RequestSpec(
        policy="p", wait=2.0, constraint=Constraint(run=RunId("r1"), min_version=VersionNumber(3), exact_version=VersionNumber(5))
    )


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=40) | st.from_regex(rb"[0-9a-z/._-]{0,30}", fullmatch=True))))
def test_any_headers_give_a_spec_or_name_the_field(pairs: list[tuple[str, bytes]]) -> None:
    try:
        spec = parse_headers([(f"x-stitch-{name}".encode(), value) for name, value in pairs])
    except InvalidRequest as error:
        told(error)
    else:
        assert spec.wait is None or 0 <= spec.wait <= MAX_WAIT_SECONDS


KEYS = st.sampled_from(["min_version", "exact_version", "run", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["p", "p@7", "r/weight_v7"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)


@given(st.sampled_from(list(RouteKind)), st.dictionaries(st.sampled_from(["weight_version", "model", "text"]), JSON))
def test_any_body_gives_a_spec_or_names_the_field(kind: RouteKind, fields: dict[str, Any]) -> None:
    try:
        spec = parse_body(kind, json.loads(json.dumps(fields)))
    except InvalidRequest as error:
        told(error)
    else:
        assert spec.policy is None or kind is not RouteKind.GENERATE


@given(JSON, JSON, st.text(max_size=20), st.text(max_size=20))
def test_any_merge_ends_in_a_spec_or_names_the_field(least: Any, exact: Any, header: str, model: str) -> None:
    try:
        first = parse_headers([(b"x-stitch-min-version", header.encode()), (b"x-stitch-exact-version", b"7")])
        second = parse_body(RouteKind.CHAT, {"model": model, "weight_version": {"min_version": least, "exact_version": exact}})
        merged = merge(first, second)
    except InvalidRequest as error:
        told(error)
    else:
        assert merged.constraint.exact_version == 7
