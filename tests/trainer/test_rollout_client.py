"""The rollout clients against real HTTP: retries under one deadline, errors by their names, streams, cancellation."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

import stitch
from stitch.core.admission import Bounds
from stitch.core.errors import InvalidRequest, Rejected, StitchError, Unavailable, VersionGone, WeightVersionNotReady
from stitch.core.ids import PolicyId, RunId, VersionNumber, VersionRef
from stitch.http import answers
from stitch.http import headers as names
from stitch.http.answers import Answer, json_answer
from stitch.http.request import parse_headers
from stitch.http.server import Receive, Send, serve
from stitch.trainer import rollout_request
from stitch.trainer.rollout_client import AsyncRolloutClient, RolloutClient
from tests.support.provision import free_port
from tests.trainer.scripted_gateway import Request, ScriptedGateway, Turn, good, hang, stream

pytestmark = pytest.mark.integration

PATIENCE = 60.0
LATE = 3.0
"""Until what hangs is given up. A host that stands still for a second is not late."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of the client's own choice are short here."""
    monkeypatch.setattr(rollout_request, "RETRY_SECONDS", (0.01, 0.05))


@asynccontextmanager
async def gateway(*turns: Turn) -> AsyncIterator[tuple[str, ScriptedGateway]]:
    scripted = ScriptedGateway(deque(turns))
    async with serve(scripted, grace=1) as url:
        yield url, scripted


def not_ready(retry_after: float = 1.0) -> Answer:
    least = Bounds(run=RunId("r1"), least=VersionNumber(9))
    return answers.not_ready(policy=PolicyId("p"), required=least, serving=None, tip=None, retry_after=retry_after)


class Clock:
    """What the deadline of a call is told by, so that no busy host can bring it near."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def refusing(self, answer: Answer, *, takes: float) -> Turn:
        """A turn after which it is so much later."""

        async def turn(request: Request, receive: Receive, send: Send) -> None:
            self.now += takes
            await answer({"type": "http"}, receive, send)

        return turn


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    told = Clock()
    monkeypatch.setattr(rollout_request, "time", told)
    return told


def soon(answer: Answer) -> Answer:
    """Without Retry-After, whose least value is a second."""
    return replace(answer, headers=tuple(pair for pair in answer.headers if pair[0] != b"retry-after"))


async def test_an_answer_tells_its_versions() -> None:
    async with gateway(good()) as (url, seen), AsyncRolloutClient(url, policy="p", run="r1", token="secret") as client:
        answer = await client.generate(prompt="in", sampling_params={"temperature": 0}, extra={"return_logprob": True})
    assert (answer.text, answer.output_ids) == ("out", (1, 2, 3))
    assert (answer.version_start, answer.version_end) == (3, 4)
    assert answer.spans == ((3, 0, 2), (4, 2, 3))
    assert (answer.policy, answer.run, answer.replica, answer.request_id) == ("p", "r1", "replica-0", "the-request")
    assert answer.ref == VersionRef(policy=PolicyId("p"), run=RunId("r1"), number=VersionNumber(4))
    assert answer.raw["meta_info"]["weight_version_start"] == 3
    (request,) = seen.requests
    assert request.path == "/generate"
    assert request.body == {"text": "in", "sampling_params": {"temperature": 0}, "return_logprob": True}
    assert request.header("authorization") == "Bearer secret"
    assert request.header("content-type") == "application/json"


async def test_what_is_asked_for_is_what_a_gateway_reads() -> None:
    async with gateway(good()) as (url, seen), AsyncRolloutClient(url, policy="p", run="r1") as client:
        await client.generate(input_ids=[5, 6], channel="stable", min_version=2, max_lag=3, wait=1.5, session="s 1")
        await client.generate(prompt="in", exact_version="r1/weight_v000007")
        await client.generate(prompt="in", exact_version=VersionRef(policy=PolicyId("p"), run=RunId("r1"), number=VersionNumber(7)))
    spec = parse_headers(seen.requests[0].headers)
    assert (spec.policy, spec.channel, spec.wait, spec.session) == ("p", "stable", 1.5, "s 1")
    assert spec.constraint == stitch.Constraint(run=RunId("r1"), min_version=VersionNumber(2), max_lag=3)
    assert spec.request_id
    assert seen.requests[0].body == {"input_ids": [5, 6], "sampling_params": {}}
    for request in seen.requests[1:]:
        exact = parse_headers(request.headers).constraint
        assert exact == stitch.Constraint(run=RunId("r1"), exact_version=VersionNumber(7))


async def test_numbers_go_with_the_run_that_they_came_from() -> None:
    async with gateway(good(), good(), good(run="r2"), good()) as (url, seen), AsyncRolloutClient(url) as client:
        await client.generate(prompt="in", min_version=1)
        await client.generate(prompt="in", min_version=1)
        await client.generate(prompt="in")
        await client.generate(prompt="in", min_version=1)
    assert [request.header(names.RUN) for request in seen.requests] == [None, "r1", None, "r2"]


async def test_refusals_that_cost_nothing_are_retried_under_one_request_id() -> None:
    turns = [
        soon(not_ready()),
        soon(answers.busy("full")),
        soon(answers.unavailable("no replica", generation_started=False)),
        good(),
    ]
    async with gateway(*turns) as (url, seen), AsyncRolloutClient(url) as client:
        assert (await client.generate(prompt="in")).text == "out"
    assert len(seen.requests) == 4
    assert len({request.header(names.REQUEST_ID) for request in seen.requests}) == 1


async def test_a_generation_that_may_have_begun_is_retried_as_another_one() -> None:
    begun = soon(answers.unavailable("the engine died", generation_started=True))
    async with (
        gateway(begun, answers.timed_out("slow", generation_started=True), good()) as (url, seen),
        AsyncRolloutClient(url) as client,
    ):
        await client.generate(prompt="in")
    first, second, third = (request.header(names.REQUEST_ID) for request in seen.requests)
    assert (second, third) == (f"{first}:1", f"{first}:2")


@pytest.mark.parametrize(
    "answer",
    [
        json_answer(503, {"error": {"message": "unsure", "retryable": False}}),
        Answer(status=502, body=b"<html>"),
        Answer(status=504, body=b""),
    ],
)
async def test_what_does_not_say_retryable_is_not_sent_again(answer: Answer) -> None:
    async with gateway(answer) as (url, seen), AsyncRolloutClient(url) as client:
        with pytest.raises(Unavailable):
            await client.generate(prompt="in")
    assert len(seen.requests) == 1


async def test_retry_after_is_honoured() -> None:
    loop = asyncio.get_running_loop()
    async with gateway(not_ready(1.0), good()) as (url, _), AsyncRolloutClient(url) as client:
        started = loop.time()
        await client.generate(prompt="in")
        assert loop.time() - started >= 1.0


@pytest.mark.parametrize(
    ("answer", "error", "takes", "tries"),
    [
        (not_ready(700), WeightVersionNotReady, 400, 1),
        (soon(not_ready()), WeightVersionNotReady, 400, 3),
        (answers.busy("full"), Unavailable, 999.5, 1),
        (soon(answers.unavailable("none", generation_started=False)), Unavailable, 400, 3),
    ],
)
async def test_at_the_deadline_the_last_refusal_is_the_error(
    clock: Clock, answer: Answer, error: type[StitchError], takes: float, tries: int
) -> None:
    async with gateway(clock.refusing(answer, takes=takes)) as (url, seen), AsyncRolloutClient(url) as client:
        with pytest.raises(error) as raised:
            await client.generate(prompt="in", timeout=1000)
    assert len(seen.requests) == tries
    if isinstance(raised.value, WeightVersionNotReady) and answer.header("Retry-After"):
        assert raised.value.retry_after == 700.0


async def test_a_retry_that_could_not_be_answered_in_time_is_not_sent(clock: Clock) -> None:
    """The refusal before it says more than that the deadline cut it short."""
    turn = clock.refusing(soon(not_ready()), takes=1000 - 1.05 * rollout_request.RETRY_SECONDS[0])
    async with gateway(turn) as (url, seen), AsyncRolloutClient(url) as client:
        with pytest.raises(WeightVersionNotReady):
            await client.generate(prompt="in", timeout=1000)
    assert len(seen.requests) == 1


async def test_nothing_is_sent_once_the_deadline_is_over(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_request, "RETRY_SECONDS", (0.3, 0.3))

    async def refuse(request: Request, receive: Receive, send: Send) -> None:
        await soon(not_ready())({"type": "http"}, receive, send)
        asyncio.get_running_loop().call_later(0.1, setattr, clock, "now", 2000.0)  # within the client's pause

    async with gateway(refuse) as (url, seen), AsyncRolloutClient(url) as client:
        with pytest.raises(WeightVersionNotReady):
            await client.generate(prompt="in", timeout=1000)
    assert len(seen.requests) == 1


async def test_what_the_deadline_cuts_short_tells_the_refusal_before_it(clock: Clock) -> None:
    refusing = clock.refusing(soon(not_ready()), takes=1000 - LATE)
    async with gateway(refusing, hang) as (url, seen), AsyncRolloutClient(url) as client:
        with pytest.raises(Unavailable, match="generation may have begun") as raised:
            await client.generate(prompt="in", timeout=1000)
    assert isinstance(raised.value.__cause__, WeightVersionNotReady)
    assert len(seen.requests) == 2


async def test_a_wait_ends_before_the_deadline_so_that_the_refusal_arrives() -> None:
    async with gateway(not_ready(100)) as (url, seen), AsyncRolloutClient(url) as client:
        with pytest.raises(WeightVersionNotReady):
            await client.generate(prompt="in", wait=100, timeout=PATIENCE)
    wait = parse_headers(seen.requests[0].headers).wait
    assert wait is not None
    assert wait <= 0.9 * PATIENCE


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (answers.gone("retired", policy=PolicyId("p")), VersionGone),
        (answers.unauthorized(), Rejected),
        (answers.forbidden("POST", "/generate"), Rejected),
        (answers.not_found("/generate"), Rejected),
        (answers.failed(), StitchError),
        (json_answer(200, {"text": "no versions"}), StitchError),
        (json_answer(200, []), StitchError),
        (Answer(status=200, body=b"<html>"), StitchError),
    ],
)
async def test_definite_answers_are_errors_by_name(answer: Answer, error: type[StitchError]) -> None:
    async with gateway(answer) as (url, seen), AsyncRolloutClient(url) as client:
        with pytest.raises(error) as raised:
            await client.generate(prompt="in")
    assert type(raised.value) is error
    assert len(seen.requests) == 1


async def test_a_malformed_request_names_its_field() -> None:
    refused = answers.invalid_request(InvalidRequest("min_version: no", field="min_version"))
    async with gateway(refused) as (url, _), AsyncRolloutClient(url) as client:
        with pytest.raises(InvalidRequest) as raised:
            await client.generate(prompt="in", min_version="r1/nonsense")
    assert raised.value.field == "min_version"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "input_ids": [1]}, "prompt"),
        ({"prompt": "a", "channel": "NO"}, "channel"),
        ({"prompt": "a", "session": "a\r\nX-Evil: 1"}, "session"),
        ({"prompt": "a", "sampling_params": {"x": object()}}, "sampling_params"),
    ],
)
async def test_malformed_arguments_are_named_before_anything_is_sent(arguments: dict[str, Any], field: str) -> None:
    async with AsyncRolloutClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.generate(**arguments)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"), [({"url": "gateway:80"}, "url"), ({"policy": "NO"}, "policy"), ({"token": "a b"}, "token")]
)
def test_malformed_clients_are_refused(arguments: dict[str, Any], field: str) -> None:
    before = threading.active_count()
    with pytest.raises(InvalidRequest) as refused:
        RolloutClient(**{"url": "http://127.0.0.1:1", **arguments})
    assert refused.value.field == field
    assert threading.active_count() == before


async def test_a_gateway_that_starts_late_is_waited_for() -> None:
    port = free_port()
    async with AsyncRolloutClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(Unavailable, match="nothing was sent"):
            await client.generate(prompt="in", timeout=LATE)
        waiting = asyncio.create_task(client.generate(prompt="in", timeout=PATIENCE))
        async with serve(ScriptedGateway(deque([good()])), port=port, grace=1):
            assert (await waiting).text == "out"


async def test_an_answer_that_is_late_is_given_up_and_its_connection_closed() -> None:
    async with gateway(hang) as (url, seen), AsyncRolloutClient(url) as client:
        with pytest.raises(Unavailable, match="generation may have begun"):
            await client.generate(prompt="in", timeout=LATE)
        await asyncio.wait_for(seen.gone.wait(), PATIENCE)
    assert len(seen.requests) == 1


async def test_cancelling_closes_the_connection() -> None:
    async with gateway(hang) as (url, seen), AsyncRolloutClient(url) as client:
        task = asyncio.create_task(client.generate(prompt="in"))
        while not seen.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(seen.gone.wait(), PATIENCE)


# --- streams -----------------------------------------------------------------------------------------------------------------


async def test_a_stream_gives_pieces_and_then_the_answer() -> None:
    async with gateway(stream("he", "", "llo")) as (url, seen), AsyncRolloutClient(url) as client:
        async with await client.generate(prompt="in", stream=True) as pieces:
            assert [piece async for piece in pieces] == ["he", "llo"]
            assert [piece async for piece in pieces] == []
        answer = pieces.answer
        assert answer is not None
        assert (answer.text, answer.version_start, answer.version_end, answer.replica) == ("hello", 3, 4, "replica-0")
        assert answer.spans == ((3, 0, 2), (4, 2, 3))
    assert seen.requests[0].body["stream"] is True


async def test_a_stream_comes_piece_by_piece() -> None:
    hold = asyncio.Event()
    async with gateway(stream("a", "b", hold=hold)) as (url, _), AsyncRolloutClient(url) as client:
        pieces = await client.generate(prompt="in", stream=True)
        assert await anext(pieces) == "a"
        hold.set()
        assert await anext(pieces) == "b"
        assert await anext(pieces, None) is None


async def test_a_stream_is_retried_before_it_begins() -> None:
    async with gateway(soon(not_ready()), stream("a")) as (url, _), AsyncRolloutClient(url) as client:
        pieces = await client.generate(prompt="in", stream=True)
        assert [piece async for piece in pieces] == ["a"]


@pytest.mark.parametrize(("end", "message"), [("cut", "may have begun"), ("error", "engine went away"), ("hang", "deadline")])
async def test_a_stream_that_breaks_off_is_no_answer(end: str, message: str) -> None:
    async with gateway(stream("a", end=end)) as (url, _), AsyncRolloutClient(url) as client:
        pieces = await client.generate(prompt="in", stream=True, timeout=LATE)
        assert await anext(pieces) == "a"
        with pytest.raises(Unavailable, match=message):
            await anext(pieces)
        assert pieces.answer is None


async def test_leaving_a_stream_closes_the_connection() -> None:
    async with gateway(stream("a", end="hang")) as (url, seen), AsyncRolloutClient(url) as client:
        async with await client.generate(prompt="in", stream=True) as pieces:
            assert await anext(pieces) == "a"
        await asyncio.wait_for(seen.gone.wait(), PATIENCE)


# --- blocking ------------------------------------------------------------------------------------------------------------------


async def test_the_blocking_client_does_the_same_from_many_threads() -> None:
    before = set(threading.enumerate())

    def use(url: str) -> None:
        with RolloutClient(url, policy="p") as client:
            with ThreadPoolExecutor(8) as pool:
                given = list(pool.map(lambda _: client.generate(prompt="in", timeout=PATIENCE).text, range(16)))
            assert given == ["out"] * 16

    async with gateway(good()) as (url, _):
        await asyncio.to_thread(use, url)
    leaked = [t for t in set(threading.enumerate()) - before if "portal" in t.name]
    assert leaked == []


async def test_the_blocking_client_streams() -> None:
    def use(url: str) -> None:
        with RolloutClient(url) as client:
            with client.generate(prompt="in", stream=True) as pieces:
                assert list(pieces) == ["he", "llo"]
                assert pieces.answer is not None
                assert pieces.answer.version_end == 4
            with pytest.raises(WeightVersionNotReady):
                client.generate(prompt="in", timeout=PATIENCE)
        client.close()

    async with gateway(stream("he", "llo"), not_ready(100)) as (url, _):
        await asyncio.to_thread(use, url)


async def test_the_token_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "s3cr3t-t0k3n"
    turns = soon(answers.busy("full")), answers.unauthorized()
    async with gateway(*turns) as (url, _), AsyncRolloutClient(url, token=secret) as client:
        with pytest.raises(Rejected) as refused:
            await client.generate(prompt="in")
    assert secret not in f"{refused.value!r}{client!r}"
    assert secret not in caplog.text
