"""What a user meets at the gateway of a whole system: answers with versions, and refusals that say what to do."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from stitch.trainer.publisher import Publisher
from stitch.trainer.rollout_client import RolloutClient
from tests.support.cluster import POLICY, RUN, Cluster, get, post
from tests.support.engines import digest_of_files, reference_models

pytestmark = pytest.mark.integration

ASK: dict[str, Any] = {"text": "2+2=", "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
README = Path(__file__).parents[2] / "README.md"


def _ask(system: Cluster, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
    return post(f"{system.urls['gateway']}/generate", {**ASK, **body}, headers)


def test_an_answer_names_the_version_whose_weights_computed_it(system: Cluster) -> None:
    status, answer = _ask(system)
    meta = answer["meta_info"]
    assert status == 200
    assert (meta["weight_version_start"], meta["weight_version_end"]) == (1, 1)
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 6}]
    assert meta["weights_digests"] == [[digest_of_files(system.folder / "policy-2"), 0, 6]]


def test_the_documented_body_of_a_version_that_is_not_ready(system: Cluster) -> None:
    status, answer = _ask(system, weight_version={"min_version": 9})
    assert status == 409
    error = answer["error"]
    assert error["type"] == "WeightVersionNotReady"
    assert error["retryable"] is True
    assert error["policy"] == POLICY
    assert error["message"]
    assert "9" in str(error["required"])
    assert error["tip"] == f"{RUN}/weight_v000001"
    assert (answer["type"], answer["target_version"], answer["applied"]) == ("WeightVersionNotReady", 9, 1)


def test_not_ready_says_when_to_ask_again(system: Cluster) -> None:
    done = subprocess.run(
        ["curl", "-si", f"{system.urls['gateway']}/generate", "-H", "X-Stitch-Min-Version: 9", "-d", json.dumps(ASK)],
        capture_output=True,
        text=True,
        check=True,
    )
    head = done.stdout.lower()
    assert " 409 " in head.splitlines()[0]
    assert re.search(r"^retry-after: [1-9]\d*", head, re.MULTILINE)


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        ({"min_version": "x"}, "min_version"),
        ({"min_version": -1}, "min_version"),
        ({"exact_version": True}, "exact_version"),
        ({"min_version": 1, "run": "Not A Run"}, "run"),
        ({"least": 1}, "weight_version"),
        (7, "weight_version"),
    ],
)
def test_a_malformed_constraint_is_refused_by_its_field(system: Cluster, constraint: Any, field: str) -> None:
    status, answer = _ask(system, weight_version=constraint)
    assert status == 400
    assert field in answer["error"]["field"]
    assert answer["error"]["retryable"] is False


def test_headers_and_body_that_disagree_are_refused(system: Cluster) -> None:
    status, answer = _ask(system, {"X-Stitch-Min-Version": "1"}, weight_version={"min_version": 0})
    assert status == 400
    assert "min_version" in answer["error"]["field"]


def test_routes_that_would_bypass_admission_are_refused(system: Cluster) -> None:
    for name in ("replica-a", "gateway"):
        status, _ = post(f"{system.urls[name]}/update_weights_from_disk", {"model_path": "/", "weight_version": "9"})
        assert status in (403, 404)
    assert post(f"{system.urls['replica-a']}/pause_generation", {})[0] == 403


def test_the_openai_client_works_streaming_and_not(system: Cluster) -> None:
    with openai.OpenAI(base_url=f"{system.urls['gateway']}/v1", api_key="none", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == [POLICY, f"{POLICY}@latest"]
        done = client.completions.create(model=POLICY, prompt="2+2=", max_tokens=5, temperature=0)
        assert done.model_extra is not None
        assert done.model_extra["weight_version_start"] == 1
        chat = client.chat.completions.create(
            model=f"{POLICY}@1", messages=[{"role": "user", "content": "2+2="}], max_tokens=5, temperature=0
        )
        assert chat.choices[0].message.content
        assert chat.model_extra is not None
        assert chat.model_extra["weight_version_end"] == 1
        stream = client.completions.create(model=POLICY, prompt="2+2=", max_tokens=5, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == done.choices[0].text
        chunks = client.chat.completions.create(
            model=POLICY, messages=[{"role": "user", "content": "2+2="}], max_tokens=5, temperature=0, stream=True
        )
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == chat.choices[0].message.content
        with pytest.raises(openai.ConflictError):
            client.completions.create(model="another", prompt="x")


def _curl_lines() -> list[str]:
    return [line[2:] for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("$ curl ")]


def test_the_readme_has_curl_lines() -> None:
    assert len(_curl_lines()) >= 7


@pytest.mark.parametrize("line", _curl_lines(), ids=range(len(_curl_lines())))
def test_the_curl_lines_of_the_readme_work_as_printed(system: Cluster, line: str) -> None:
    if "Exact-Version: 0" in line:
        line = line.replace("Exact-Version: 0", "Exact-Version: 1")  # this system is at its second version already
    line = line.replace("localhost:8000", system.urls["gateway"].removeprefix("http://"))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    assert "error" not in answer, answer


def test_what_the_gateway_says_of_policies_and_replicas(system: Cluster) -> None:
    _, policies = get(f"{system.urls['gateway']}/policies")
    (policy,) = policies["policies"]
    assert (policy["policy"], policy["run"], policy["tip"]) == (POLICY, RUN, f"{RUN}/weight_v000001")
    _, table = get(f"{system.urls['gateway']}/replicas")
    assert {r["replica"] for r in table["replicas"]} == {"replica-a", "replica-b"}
    assert {r["phase"] for r in table["replicas"]} == {"serving"}
    assert get(f"{system.urls['gateway']}/readyz")[0] == 200
    assert get(f"{system.urls['gateway']}/livez")[0] == 200


def test_a_request_waits_for_a_version_and_is_answered_by_it(system: Cluster, tmp_path: Path) -> None:
    """The last of this module, since it moves the tip."""
    (model,) = reference_models(tmp_path, (3,))
    with (
        Publisher.open(policy=POLICY, run=RUN, log=system.log, store=system.store) as publisher,
        RolloutClient(system.urls["gateway"], policy=POLICY, run=RUN) as client,
    ):
        expected = publisher.next_number
        asked = subprocess.Popen(
            [
                "curl",
                "-s",
                f"{system.urls['gateway']}/generate",
                *("-H", f"X-Stitch-Min-Version: {expected}", "-H", "X-Stitch-Wait: 60"),
                *("-d", json.dumps(ASK)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        done = publisher.publish(model)
        answer = json.loads(asked.communicate(timeout=60)[0])
        assert answer["meta_info"]["weight_version_start"] == expected
        assert answer["meta_info"]["weights_digests"][0][0] == done.weights_digest
        later = client.generate(prompt="2+2=", sampling_params={"max_new_tokens": 4}, min_version=expected, wait=60)
        assert later.version_start == expected


def test_an_abandoned_exact_version_is_gone(system: Cluster, tmp_path: Path) -> None:
    """Moves the tip as well: a trainer goes back to version 1 and publishes another 3."""
    with Publisher.open(policy=POLICY, run=RUN, log=system.log, store=system.store) as publisher:
        abandoned = publisher.next_number - 1
    (model,) = reference_models(tmp_path, (4,))
    with Publisher.open(policy=POLICY, run=RUN, log=system.log, store=system.store, boot_version=1) as publisher:
        publisher.publish(model)
        deadline = time.monotonic() + 60
        while (found := _ask(system, weight_version={"exact_version": abandoned}))[0] != 410:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
    assert found[1]["error"]["retryable"] is False
    assert "abandoned" in found[1]["error"]["message"]
