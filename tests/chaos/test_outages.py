"""What everything runs on goes away for a while, or for good: the gateway, the store, the log. Rollouts go on."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from stitch.core.errors import LogDiverged, Unavailable
from stitch.core.events import Transition
from stitch.engines.reference.model import init, to_bf16
from stitch.engines.reference.serve import init_checkpoint
from stitch.trainer.publisher import Publisher
from stitch.trainer.rollout_client import RolloutClient
from tests.chaos import judging
from tests.replica.world import SMALL
from tests.support import provision
from tests.support.cluster import POLICY, RUN, Cluster, get, post, stitch

pytestmark = [pytest.mark.chaos, pytest.mark.integration]

ASK = {"text": "hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
STEP_SECONDS = 60.0
LOCKED_SECONDS = 10.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as running:
        yield running


@contextmanager
def publisher(cluster: Cluster, **options: Any) -> Iterator[Publisher]:
    base = cluster.folder / "base"
    if not base.exists():
        init_checkpoint(base, seed=1, config=SMALL)
    given = {"policy": POLICY, "run": RUN, "log": cluster.log, "store": cluster.store, "base": base, **options}
    with Publisher.open(**given) as opened:
        yield opened


def weights(seed: int) -> Any:
    return to_bf16(init(SMALL, seed))


def serving(cluster: Cluster, count: int = 2) -> None:
    """So many replicas serve version 0 behind a gateway."""
    cluster.gateway()
    for number in range(count):
        cluster.replica(f"replica-{number}")
    for number in range(count):
        cluster.wait_serving(f"replica-{number}", f"{RUN}/weight_v000000")
    cluster.wait_routed(count)


def test_a_request_outlives_the_gateway_that_it_waits_at(cluster: Cluster) -> None:
    """Stopped, it sends the waiting away, and they ask its next life, under the same request id. Killed, it can say nothing: who
    waited is told that nobody knows whether generation began, and asks again only by its own decision."""
    port = str(provision.free_port())
    with publisher(cluster) as trainer:
        url = cluster.gateway("--port", port)
        cluster.replica("replica-0")
        cluster.wait_routed(1)
        with RolloutClient(url, policy=POLICY, run=RUN) as client, ThreadPoolExecutor(4) as threads:
            asked = [
                threads.submit(client.generate, prompt="hello", min_version=1, wait=STEP_SECONDS, timeout=2 * STEP_SECONDS)
                for _ in range(4)
            ]
            provision.wait_until(lambda: _waiting(url) == 4, "all wait at the gateway")
            cluster.processes["gateway"].stop()
            assert not any(each.done() for each in asked)
            assert cluster.gateway("--port", port) == url
            provision.wait_until(lambda: _waiting(url) == 4, "all wait at its next life")
            done = trainer.publish(weights(2))
            answers = [each.result(STEP_SECONDS) for each in asked]
            late = threads.submit(client.generate, prompt="hello", min_version=2, wait=STEP_SECONDS, timeout=2 * STEP_SECONDS)
            provision.wait_until(lambda: _waiting(url) == 1, "another one waits")
            cluster.processes["gateway"].kill()
            with pytest.raises(Unavailable, match=r"lost|gone|broke"):
                late.result(STEP_SECONDS)
    assert {answer.version_start for answer in answers} == {done.ref.number}
    assert len({answer.request_id for answer in answers}) == 4


def _waiting(url: str) -> int:
    import urllib.request

    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=STEP_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0
    return int(next(float(line.split()[-1]) for line in lines if line.startswith("stitch_gateway_waiting")))


class _Asking:
    """Asks all the time in a thread, and notes every answer that is no 200."""

    def __init__(self, url: str) -> None:
        self.answered, self.refused = 0, list[Any]()
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> _Asking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stop.wait(0.02):
            status, answer = post(f"{self._url}/generate", ASK)
            self.answered += status == 200
            if status != 200:
                self.refused.append((status, answer))


def test_a_store_that_goes_away_strands_no_replica(cluster: Cluster) -> None:
    """Scenario 18: nobody wakes a replica, and what it was to fetch is not there for a while."""
    store, away = cluster.folder / "store", cluster.folder / "away"
    with publisher(cluster) as trainer:
        serving(cluster)
        with _Asking(cluster.urls["gateway"]) as asking:
            for name in ("replica-0", "replica-1"):
                cluster.processes[name].pause()
            trainer.publish(weights(2))
            store.rename(away)
            for name in ("replica-0", "replica-1"):
                cluster.processes[name].resume()
            provision.wait_until(lambda: _failed_to_stage(cluster) == {"replica-0", "replica-1"}, "both failed to stage")
            before = asking.answered
            provision.wait_until(lambda: asking.answered > before + 5, "the old version is served")
            if store.exists():
                shutil.rmtree(store)
            away.rename(store)
            for name in ("replica-0", "replica-1"):
                cluster.wait_serving(name, f"{RUN}/weight_v000001")
    assert asking.refused == []


def _failed_to_stage(cluster: Cluster) -> set[str]:
    return {state.replica for state, _ in judging.activations(cluster.log) if state.transition is Transition.STAGE_FAILED}


def test_a_log_that_takes_nothing_for_ten_seconds_stops_no_rollout(cluster: Cluster) -> None:
    """Longer than leases last: no table collapses, and the publication that waited is accepted."""
    with publisher(cluster) as trainer:
        serving(cluster)
        gateway = cluster.urls["gateway"]
        with _Asking(gateway) as asking, ThreadPoolExecutor(1) as threads:
            with closing(sqlite3.connect(cluster.folder / "log.db", isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                publishing = threads.submit(trainer.publish, weights(2))
                due = time.monotonic() + LOCKED_SECONDS
                provision.wait_until(lambda: time.monotonic() >= due, "the lock is held", timeout=2 * LOCKED_SECONDS)
                assert not publishing.done()
                assert {r["phase"] for r in get(f"{gateway}/replicas")[1]["replicas"]} == {"serving"}
                other.execute("ROLLBACK")
            done = publishing.result(STEP_SECONDS)
            for name in ("replica-0", "replica-1"):
                cluster.wait_serving(name, f"{RUN}/weight_v{done.ref.number:06d}")
            before = asking.answered
            provision.wait_until(lambda: asking.answered > before + 5, "it is asked on")
    assert asking.refused == []
    assert asking.answered > 20


def test_a_log_that_is_made_anew_freezes_all_who_read_the_old_one(cluster: Cluster) -> None:
    """Nobody mixes two histories: not even a pointer of the new log is followed, though its sequence is greater. Rollouts go on,
    and everyone says what is wrong."""
    with publisher(cluster) as trainer:
        serving(cluster)
        gateway = cluster.urls["gateway"]
        for left in cluster.folder.glob("log.db*"):
            left.unlink()
        stitch("topics", "create", "--log", cluster.log)
        provision.wait_until(lambda: get(f"{gateway}/readyz")[0] == 503, "the gateway says so")
        with pytest.raises(LogDiverged):
            trainer.publish(weights(2), timeout=20)
    with publisher(cluster) as other:
        for seed in range(3, 6):
            newest = other.publish(weights(seed))
    cluster.replica("newcomer")
    cluster.wait_serving("newcomer", str(newest.ref))  # by when the others have read the pointer more than once
    replicas = [cluster.urls[name] for name in ("replica-0", "replica-1")]
    provision.wait_until(lambda: all(_says_so(url) for url in replicas), "the replicas say so")
    for url in (gateway, *replicas):
        status, answer = post(f"{url}/generate", ASK)
        assert status == 200, answer
        assert answer["meta_info"]["weight_version_start"] == 0


def _says_so(url: str) -> bool:
    log = get(f"{url}/server_info")[1]["log"]
    return all("removed or replaced" in (log[name] or "") for name in ("publications", "pointer"))
