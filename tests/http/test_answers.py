"""The contract of refusals: statuses, headers and bodies that clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stitch.core.admission import Bounds
from stitch.core.errors import Fenced, InvalidRequest, StitchError, Unavailable, VersionGone, WeightVersionNotReady
from stitch.core.events import RunVersion
from stitch.core.ids import PolicyId, RunId, VersionNumber
from stitch.http import answers
from stitch.http.answers import Answer

pytestmark = pytest.mark.unit

P, R = PolicyId("p"), RunId("r1")


def version(number: int) -> RunVersion:
    return RunVersion(run=R, number=VersionNumber(number))


def body(answer: Answer) -> dict[str, Any]:
    assert answer.header("content-type") == "application/json"
    return json.loads(answer.body)


def test_not_ready_has_the_documented_body() -> None:
    answer = answers.not_ready(
        policy=P,
        required=Bounds(run=R, least=VersionNumber(9)),
        serving=version(7),
        tip=version(8),
        request_id="q",
        retry_after=0.2,
    )
    assert answer.status == 409
    assert answer.header("Retry-After") == "1"
    assert answer.header("X-Stitch-Request-Id") == "q"
    told = body(answer)
    assert told["error"] == {
        "type": "WeightVersionNotReady",
        "message": "version 9 or newer of run r1 is asked for; serving r1/weight_v000007, "
        "and the newest known is r1/weight_v000008",
        "retryable": True,
        "policy": "p",
        "required": {"run": "r1", "min_version": 9, "exact_version": None},
        "serving": "r1/weight_v000007",
        "tip": "r1/weight_v000008",
        "request_id": "q",
    }
    assert (told["type"], told["target_version"], told["applied"]) == ("WeightVersionNotReady", 9, 7)
    assert told["message"] == told["error"]["message"]


def test_not_ready_before_any_claim() -> None:
    told = body(answers.not_ready(policy=None, required=Bounds(), serving=None, tip=None))
    assert told["error"]["tip"] is None
    assert told["error"]["serving"] is None
    assert told["applied"] is None


def test_exact_is_told_as_exact() -> None:
    bounds = Bounds(run=R, least=VersionNumber(9), greatest=VersionNumber(9))
    told = body(answers.not_ready(policy=P, required=bounds, serving=None, tip=None))
    assert told["error"]["required"] == {"run": "r1", "min_version": None, "exact_version": 9}


@pytest.mark.parametrize("started", [True, False])
def test_unavailable_says_whether_generation_started(started: bool) -> None:
    answer = answers.unavailable("gone", generation_started=started, request_id="q")
    assert answer.status == 503
    assert answer.header("X-Stitch-Generation-Started") == str(started).lower()
    assert answer.header("Retry-After") == "1"
    error = body(answer)["error"]
    assert (error["generation_started"], error["retryable"], error["request_id"]) == (started, True, "q")


@pytest.mark.parametrize(
    ("error", "status", "kind", "retryable"),
    [
        (InvalidRequest("wait: no", field="wait"), 400, "InvalidRequest", False),
        (WeightVersionNotReady("no", retry_after=2.5), 409, "WeightVersionNotReady", True),
        (VersionGone("retired"), 410, "VersionGone", False),
        (Unavailable("away"), 503, "Unavailable", True),
        (Fenced("no"), 409, "Fenced", False),
        (StitchError("secret"), 500, "InternalError", False),
    ],
)
def test_of_error(error: StitchError, status: int, kind: str, retryable: bool) -> None:
    answer = answers.of_error(error, request_id="q")
    told = body(answer)["error"]
    assert (answer.status, told["type"], told["retryable"]) == (status, kind, retryable)
    assert "secret" not in answer.body.decode()


@pytest.mark.parametrize(
    ("answer", "status", "part"),
    [
        (answers.invalid_request(InvalidRequest("m", field="min_version")), 400, {"field": "min_version"}),
        (answers.unauthorized(), 401, {}),
        (answers.forbidden("POST", "/pause"), 403, {}),
        (answers.not_found("/x"), 404, {}),
        (answers.wrong_method("POST"), 405, {}),
        (answers.gone("retired", policy=P), 410, {"reason": "retired", "policy": "p"}),
        (answers.too_large(10), 413, {"field": "body"}),
        (answers.busy("full"), 429, {}),
        (answers.failed(), 500, {}),
        (answers.timed_out("late", generation_started=True), 504, {"generation_started": True}),
    ],
)
def test_every_answer_has_the_form(answer: Answer, status: int, part: dict[str, Any]) -> None:
    error = body(answer)["error"]
    assert answer.status == status
    assert {"type", "message", "retryable"} <= error.keys()
    assert part.items() <= error.items()
    assert error["retryable"] is (status in (429, 504))
    assert (answer.header("Retry-After") is not None) is (status == 429)
