"""A soak: everything at once, everything breaks, and at the end every invariant is held against the log.

STITCH_CHAOS_SECONDS makes it longer, STITCH_CHAOS_SEED another one. The seed decides what is asked, published and broken, and
roughly when; the machine decides the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stitch
from stitch.engines.reference.model import init, to_bf16
from stitch.trainer.publisher import Publisher
from tests.chaos import judging
from tests.chaos.clients import Crowd
from tests.replica.world import SMALL, misbehaving
from tests.support import provision
from tests.support.cluster import POLICY, Cluster, get, status
from tests.support.processes import processes_with

pytestmark = [pytest.mark.chaos, pytest.mark.integration]

SECONDS = float(os.environ.get("STITCH_CHAOS_SECONDS", "30"))
SEED = int(os.environ.get("STITCH_CHAOS_SEED", "1"))
REPLICAS = ("replica-0", "replica-1", "replica-2")
GATEWAYS = ("gateway-0", "gateway-1")
CLIENTS = 24
HEARTBEAT_SECONDS = 0.5
LEASE_SECONDS = 5 * HEARTBEAT_SECONDS
STOP_SECONDS = LEASE_SECONDS + 1.5
CONVERGE_SECONDS = 90.0
SLACK_MS = 1000 * (STOP_SECONDS + 8)
"""What an answer may be behind the log: a replica that was stopped with a request in its socket, and a busy machine."""


class Monkey:
    """Breaks one thing at a time, and brings back whatever ended."""

    def __init__(self, cluster: Cluster, mark: str, draw: random.Random) -> None:
        self.cluster, self.mark, self.draw = cluster, mark, draw
        self.done: Counter[str] = Counter()
        self.exits: Counter[str] = Counter()
        self.lives = 0
        self.outputs: list[Path] = []
        self.deck: list[Callable[[], None]] = []

    def start_all(self) -> None:
        for name in GATEWAYS:
            self.cluster.gateway(name=name)
        self.start_trainer()
        for name in REPLICAS:
            self.start_replica(name)

    def start_replica(self, name: str) -> None:
        self.cluster.replica(name, "--heartbeat", str(HEARTBEAT_SECONDS), "--capacity", "32", command=misbehaving())

    def start_trainer(self) -> None:
        self.lives += 1
        output = self.cluster.folder / f"trainer-{self.lives}.out"
        words = [sys.executable, "-m", "tests.chaos.publishing", self.cluster.log, self.cluster.store, f"{SEED}-{self.lives}"]
        self.cluster.processes["trainer"] = provision.start(words, output=output, name="trainer", cwd=Path(__file__).parents[2])
        self.outputs.append(output)

    def bring_back(self) -> None:
        """What a supervisor does: whoever ended begins a new life, under its old name."""
        for name, process in list(self.cluster.processes.items()):
            if process.alive():
                continue
            code = process.process.returncode
            process.kill()
            self.exits[f"{name.partition('-')[0]} {code}"] += 1
            if name == "trainer":
                self.start_trainer()
            elif name in GATEWAYS:
                self.cluster.gateway(name=name)
            else:
                self.start_replica(name)

    def strike(self) -> None:
        """Every kind comes once before any comes again, so that a short run sees all of them."""
        if not self.deck:
            self.deck = [
                self.kill_replica,
                self.kill_engine,
                self.kill_gateway,
                self.kill_trainer,
                self.stop_replica,
                self.stop_gateway,
                self.slow,
                self.refuse,
                self.die_loading,
            ]
            self.draw.shuffle(self.deck)
        strike = self.deck.pop()
        strike()
        self.done[strike.__name__] += 1

    def kill_replica(self) -> None:
        self.cluster.processes[self.draw.choice(REPLICAS)].kill()

    def kill_engine(self) -> None:
        engines = [pid for pid in processes_with(self.mark) if b"stitch.engines.reference" in _command(pid)]
        if engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.draw.choice(engines), signal.SIGKILL)

    def kill_gateway(self) -> None:
        self.cluster.processes[self.draw.choice(GATEWAYS)].kill()

    def kill_trainer(self) -> None:
        self.cluster.processes["trainer"].kill()

    def stop_replica(self) -> None:
        self._stop(self.draw.choice(REPLICAS))

    def stop_gateway(self) -> None:
        self._stop(self.draw.choice(GATEWAYS))

    def _stop(self, name: str) -> None:
        """Longer than a lease."""
        process = self.cluster.processes[name]
        process.pause()
        time.sleep(STOP_SECONDS)
        process.resume()

    def slow(self) -> None:
        self.misbehave(self.draw.choice(REPLICAS), slow_ms=self.draw.choice([0, 2, 20]))

    def refuse(self) -> None:
        name = self.draw.choice(REPLICAS)
        self.misbehave(name, refuse_update=True)
        time.sleep(1.5)
        self.misbehave(name, refuse_update=False)

    def die_loading(self) -> None:
        self.misbehave(self.draw.choice(REPLICAS), die="during_load")

    def misbehave(self, name: str, **faults: Any) -> None:
        with contextlib.suppress(OSError):  # it may be down already
            engine = get(f"{self.cluster.urls[name]}/server_info")[1]["engine"]["url"]
            if engine is not None:
                data = json.dumps(faults).encode()
                request = urllib.request.Request(f"{engine}/misbehave", data=data, headers={"content-type": "application/json"})
                urllib.request.urlopen(request, timeout=5).close()

    def behave(self) -> None:
        for name in REPLICAS:
            self.misbehave(name, slow_ms=0, refuse_update=False, die=None)


def _command(pid: int) -> bytes:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
    return b"" if b"stitch.replica.keeper" in command or b"\0replica\0" in command else command


class _Tip:
    """What clients may ask for: the tip, looked up now and then."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self.value = cluster, ("r1", 0)

    def look(self) -> None:
        for policy in status(self._cluster.log)["policies"]:
            if policy["policy"] == POLICY and policy["tip"]:
                run, _, label = policy["tip"].partition("/weight_v")
                self.value = (run, int(label))


def test_whatever_breaks_every_invariant_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {SEED}, {SECONDS:g} s")
    mark = f"soak-{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv("STITCH_TEST_MARK", mark)
    with Cluster(tmp_path) as cluster:
        monkey = Monkey(cluster, mark, random.Random(SEED))
        monkey.start_all()
        tip = _Tip(cluster)
        with Crowd(CLIENTS, SEED, lambda: [cluster.urls[name] for name in GATEWAYS], lambda: tip.value) as crowd:
            due = time.monotonic() + SECONDS
            while time.monotonic() < due:
                tip.look()
                monkey.strike()
                time.sleep(monkey.draw.uniform(0.3, 1.5))
                monkey.bring_back()
            _quiet(monkey, tip)
            crowd.stop()
        cluster.stop()
        print(dict(monkey.done), dict(monkey.exits), dict(crowd.statuses), dict(crowd.broken), f"{len(crowd.answers)} answers")
        assert crowd.wrong == []
        _judge(cluster, crowd, monkey)
    provision.wait_until(lambda: not processes_with(mark), "every process ended", timeout=30)


def _quiet(monkey: Monkey, tip: _Tip) -> None:
    """Faults stop, and every replica reaches the tip (I5). The trainer ends first, so that there is one tip."""
    monkey.cluster.processes["trainer"].kill()
    del monkey.cluster.processes["trainer"]
    publish_the_last(monkey)
    due = time.monotonic() + CONVERGE_SECONDS
    while True:
        monkey.bring_back()
        monkey.behave()
        tip.look()
        run, number = tip.value
        told = {r["replica"]: (r["serving"], r["phase"]) for r in status(monkey.cluster.log)["replicas"]}
        if all(told.get(name) == (f"{run}/weight_v{number:06d}", "serving") for name in REPLICAS):
            return
        assert time.monotonic() < due, f"no convergence to {tip.value}: {told}"
        time.sleep(0.2)


def publish_the_last(monkey: Monkey) -> None:
    """One more version: what died during a fault that we caused is held back, as it should be, until there is another."""
    owner = judging.lineage(monkey.cluster.log).owner
    assert owner is not None
    with Publisher.open(policy=POLICY, run=owner.run, log=monkey.cluster.log, store=monkey.cluster.store) as publisher:
        publisher.publish(to_bf16(init(SMALL, 12345)))


def _judge(cluster: Cluster, crowd: Crowd, monkey: Monkey) -> None:
    known, heard = judging.lineage(cluster.log), judging.activations(cluster.log)
    print(
        f"{len(known.versions)} versions in {len(known.runs)} runs, {len(heard)} records of {len({s.life for s, _ in heard})} lives"
    )
    assert judging.durable(known, cluster.store) == len(known.versions)
    judging.monotone(heard)
    judging.truthful(crowd.answers, known)
    judging.admitted(crowd.answers, known, slack_ms=SLACK_MS)
    assert judging.within_budget(heard) > 0
    for output in monkey.outputs:  # I6, I7: what publish said was accepted is
        for line in output.read_text().splitlines():
            said = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
            if "number" in said:
                accepted = known.versions[judging.version(said["run"], said["number"])]
                assert accepted.manifest.weights_digest == said["weights_digest"]
    assert stitch.replay(cluster.log).digest == stitch.replay(cluster.log).digest
    assert len(crowd.answers) > 100, "clients were answered while things broke"
    assert len({(told.run, told.start) for told in crowd.answers}) > 3
