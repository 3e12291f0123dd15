from __future__ import annotations

from typing import Any

import pytest

from stitch.core.admission import Bounds
from stitch.core.errors import InvalidRequest
from stitch.core.ids import RunId, VersionNumber
from stitch.engines.opening import open_engine
from stitch.engines.port import Json, RouteKind
from stitch.replica.config import KvScope
from stitch.replica.sessions import Namespaces
from stitch.replica.versions import Attribution, Untruthful, attribute, finished, of_label, splice
from tests.replica.world import ref

pytestmark = pytest.mark.unit

ENGINE = open_engine("reference", "http://127.0.0.1:1")
ANY = Bounds()


def answer(*spans: tuple[str, int, int], tokens: int | None = None) -> Json:
    meta: Json = {"weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans]}
    if tokens is not None:
        meta["completion_tokens"] = tokens
    return {"text": "", "meta_info": meta}


def told(given: Json, *lived: int, bounds: Bounds = ANY, tells: bool = True) -> Attribution:
    return attribute(ENGINE, RouteKind.GENERATE, given, tells=tells, lived=[ref(n) for n in lived], bounds=bounds)


def test_spans_become_versions_of_the_request_s_run() -> None:
    found = told(answer(("4", 0, 3), ("5", 3, 9)), 4, 5)
    assert (found.start, found.end) == (ref(4), ref(5))
    assert [(s.number, s.start, s.end) for s in found.spans] == [(4, 0, 3), (5, 3, 9)]
    body = answer(("4", 0, 3), ("5", 3, 9))
    splice(RouteKind.GENERATE, body, found)
    assert (body["meta_info"]["weight_version_start"], body["meta_info"]["weight_version_end"]) == (4, 5)
    chat: Json = {}
    splice(RouteKind.CHAT, chat, found)
    assert chat["weight_versions"] == [{"version": "4", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 9}]


@pytest.mark.parametrize("label", ["6", "04", "unconfirmed", ""])
def test_a_label_that_the_request_cannot_have_met_is_not_believed(label: str) -> None:
    with pytest.raises(Untruthful):
        told(answer((label, 0, 3)), 4, 5)
    with pytest.raises(Untruthful):
        of_label(label, [ref(4), ref(5)])


def test_spans_that_break_the_constraint_are_no_answer() -> None:
    least = Bounds(run=RunId("r1"), least=VersionNumber(5))
    assert told(answer(("5", 0, 3)), 4, 5, bounds=least).start == ref(5)
    with pytest.raises(Untruthful, match="5 or newer"):
        told(answer(("4", 0, 3), ("5", 3, 9)), 4, 5, bounds=least)
    with pytest.raises(Untruthful):
        told(answer(("5", 0, 3)), 5, bounds=Bounds(run=RunId("r2")))


def test_where_the_engine_tells_nothing_only_one_version_can_have_been_met() -> None:
    silent = answer(tokens=7)
    assert [(s.number, s.start, s.end) for s in told(silent, 4).spans] == [(4, 0, 7)]
    assert told(answer(("9", 0, 7), tokens=7), 4, tells=False).start == ref(4)
    uncounted = told(answer(), 4)
    assert (uncounted.start, uncounted.spans) == (ref(4), ())
    with pytest.raises(Untruthful):
        told(silent, 4, 5)


@pytest.mark.parametrize(
    ("kind", "event", "last"),
    [
        (RouteKind.GENERATE, {"meta_info": {"finish_reason": None}}, False),
        (RouteKind.GENERATE, {"meta_info": {"finish_reason": {"type": "stop"}}}, True),
        (RouteKind.CHAT, {"choices": [{"finish_reason": None}]}, False),
        (RouteKind.CHAT, {"choices": [{"finish_reason": "length"}]}, True),
        (RouteKind.COMPLETIONS, {"choices": [], "usage": {}}, True),
        (RouteKind.COMPLETIONS, {"object": "error"}, False),
    ],
)
def test_which_event_ends_the_output(kind: RouteKind, event: Any, last: bool) -> None:
    assert finished(kind, event) is last


def test_a_session_keeps_the_namespace_of_the_version_at_which_it_began() -> None:
    spaces = Namespaces(KvScope.SESSION, limit=2)
    assert spaces.of("a", ref(3), era=0) == "r1/3"
    assert spaces.of("a", ref(9), era=0) == "r1/3"
    assert spaces.of(None, ref(9), era=0) == "r1/9"
    assert spaces.of("b", ref(9), era=0) == "r1/9"
    assert spaces.of("a", ref(9), era=0) == "r1/3"
    assert spaces.of("c", ref(9), era=0) == "r1/9"
    assert spaces.of("b", ref(10), era=0) == "r1/10", "forgotten: it begins anew"


def test_after_a_step_back_nothing_from_before_is_found_again() -> None:
    """I10: what lived across the step put prefixes of the older version where those of the newer one are looked for."""
    spaces = Namespaces(KvScope.SESSION)
    before = spaces.of("a", ref(5), era=0)
    assert spaces.of("b", ref(3), era=1) not in {before, spaces.of("b", ref(3), era=0)}
    assert spaces.of("a", ref(6), era=1) == "r1/6/1", "idle while the older version served: it begins anew all the same"
    assert spaces.of(None, ref(5), era=1) != before
    assert spaces.of("a", ref(0, "r2"), era=2) == "r2/0/2", "no session goes on in another run"
    assert spaces.of("late", ref(5), era=0) == before, "admitted before, asked after"
    assert spaces.of("late", ref(7), era=2) == "r1/7/2"


def test_other_scopes() -> None:
    by_version, shared = Namespaces(KvScope.VERSION), Namespaces(KvScope.NONE)
    assert [by_version.of("a", ref(n), era=0) for n in (3, 4)] == ["r1/3", "r1/4"]
    assert shared.of("a", ref(3), era=1) is None


def test_the_engine_joins_the_namespace_to_the_client_s_own_key() -> None:
    body = {"text": "x", "extra_key": "mine"}
    sent = ENGINE.prepare(
        RouteKind.GENERATE, body, request_id="i", cache_namespace=Namespaces(KvScope.VERSION).of(None, ref(3), era=0)
    )
    assert sent["extra_key"] == "r1/3|mine"
    with pytest.raises(InvalidRequest):
        ENGINE.prepare(RouteKind.GENERATE, {"text": "x", "extra_key": 3}, request_id="i", cache_namespace=None)
