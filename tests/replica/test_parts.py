from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from stitch.core.errors import InvalidRequest
from stitch.core.events import ChannelPointer, RolloutServed
from stitch.core.ids import (
    LATEST,
    Digest,
    Epoch,
    EventId,
    Generation,
    Incarnation,
    Offset,
    PolicyId,
    ReplicaId,
    RunId,
    Sequence,
    VersionNumber,
)
from stitch.core.manifest import ManifestRef
from stitch.engines.opening import open_engine
from stitch.log.events import append
from stitch.log.faulty import FaultyLog
from stitch.log.memory import MemoryLog
from stitch.log.opening import open_log
from stitch.log.port import Stream
from stitch.replica import keeper
from stitch.replica.activate import ReplicaFailed
from stitch.replica.audit import Audit
from stitch.replica.config import AuditMode, ReplicaConfig
from stitch.replica.reconciler import Reconciler
from stitch.replica.supervisor import Supervisor, command_of
from stitch.replica.watchdog import watch
from tests.replica.world import ref
from tests.support.provision import eventually, wait_until

pytestmark = pytest.mark.unit

PLAIN = ReplicaConfig(log="memory://", store="memory://x", policy=PolicyId("p"), replica=ReplicaId("a"), workdir=Path("unused"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine": "sglang"}, "engine"),
        ({"engine_url": "http://x", "command": ("e", "{model}", "{port}")}, "command"),
        ({"command": ("e", "{model}")}, "command"),
        ({"command": ("e", "{port}")}, "command"),
        ({"capacity": 0}, "capacity"),
        ({"heartbeat_seconds": 0.0}, "heartbeat_seconds"),
        ({"heartbeat_seconds": 60.0}, "heartbeat_seconds"),
        ({"reconcile_seconds": 0.0}, "reconcile_seconds"),
        ({"swap_seconds": -1.0}, "swap_seconds"),
        ({"scrub_seconds": 0.0}, "scrub_seconds"),
        ({"disk_budget": 0}, "disk_budget"),
        ({"memory_budget": -1}, "memory_budget"),
    ],
)
def test_a_bad_configuration_names_the_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        replace(PLAIN, **changes)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_only_the_reference_engine_needs_no_command() -> None:
    assert "{model}" in command_of("reference", ())
    assert command_of("sglang", ("x", "{model}", "{port}")) == ("x", "{model}", "{port}")
    with pytest.raises(InvalidRequest):
        command_of("sglang", ())


# --- the keeper --------------------------------------------------------------------------------------------------------------

FAMILY = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '{child}'], start_new_session=True); time.sleep(600)"
)
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"


def keep(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", keeper.__name__, "--", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_the_keeper_exits_as_its_command_does() -> None:
    for status in (0, 7):
        with keep(sys.executable, "-c", f"raise SystemExit({status})") as process:
            assert process.wait(30) == status
    with keep(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)") as process:
        assert process.wait(30) == 128 + 9
    with keep("no-such-program") as process:
        assert process.wait(30) == keeper.NOT_STARTED
    assert keeper.main(["echo"]) == keeper.USAGE


def test_when_the_agent_ends_every_process_of_the_engine_ends() -> None:
    """A child in a session of its own, which the process group does not reach, and which ignores SIGTERM."""
    with keep(sys.executable, "-c", FAMILY.replace("{child}", STUBBORN)) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"1\n"
        below = _below(process.pid)
        assert len(below) == 2
        process.stdin.close()
        assert process.wait(60) == 128 + 15
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "all of them ended")


def _below(pid: int) -> list[int]:
    direct = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return direct + [found for child in direct for found in _below(child)]


async def test_a_supervised_process_is_told_model_and_port_and_ends_with_stop(tmp_path: Path) -> None:
    script = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); time.sleep(600)"
    supervisor = Supervisor((sys.executable, "-c", script, "{model}", "at {port}"))
    url = await supervisor.start(tmp_path / "model")
    await eventually(lambda: (tmp_path / "model").exists() and bool((tmp_path / "model").read_text()), "it was started")
    assert (tmp_path / "model").read_text() == f"at {url.rpartition(':')[2]}"
    assert supervisor.running is True
    ended = asyncio.create_task(supervisor.ended())
    await supervisor.stop()
    await supervisor.stop()
    assert "ended with status" in await ended
    assert (supervisor.running, supervisor.could_not_start) == (False, False)


# --- the watchdog ------------------------------------------------------------------------------------------------------------


async def test_the_watchdog_judges_only_while_the_engine_should_make_progress() -> None:
    engine = open_engine("reference", "http://127.0.0.1:9")  # nothing listens there
    judged = False
    looks = 0

    def should() -> bool:
        nonlocal looks
        looks += 1
        return judged

    watching = asyncio.create_task(watch(engine, judged=should, serving=lambda: None, interval=0.01, failures=2, ended=None))
    try:
        await eventually(lambda: looks > 5, "it looked")
        assert not watching.done()
        judged = True
        with pytest.raises(ReplicaFailed, match="2 times in a row"):
            await asyncio.wait_for(watching, 30)
    finally:
        watching.cancel()
        await engine.aclose()


# --- the reconciler ----------------------------------------------------------------------------------------------------------


def pointer(sequence: int, number: int, offset: int = 0, anchor: str | None = None) -> ChannelPointer:
    """`anchor`: the key of another manifest than the target's own."""
    manifest = ManifestRef(key="m", digest=Digest("1" * 64), weights_digest=Digest(f"{number:064d}"))
    return ChannelPointer(
        policy=PolicyId("p"),
        channel=LATEST,
        event_id=EventId(uuid.uuid4().hex),
        generation=Generation(0),
        sequence=Sequence(sequence),
        target=ref(number),
        epoch=Epoch(1),
        manifest=manifest,
        anchor=ref(number),
        anchor_manifest=manifest if anchor is None else replace(manifest, key=anchor),
        offset=Offset(offset),
        source=EventId("e"),
    )


async def test_it_never_goes_back_to_an_older_sequence_and_survives_a_log_that_is_away() -> None:
    url = f"memory://t{uuid.uuid4().hex}"
    async with open_log(url) as log, FaultyLog(open_log(url)) as deaf:
        deaf.cut()  # the consumer of publications is dead from the start
        found = Reconciler(deaf, url, policy=PolicyId("p"), channel=LATEST, interval=0.05, source="test")
        running = asyncio.create_task(found.run())
        try:
            await append(log, pointer(5, 3), source="test")
            first = await asyncio.wait_for(found.newer_than(None), 30)
            assert (first.ref, first.sequence) == (ref(3), 5)
            await append(log, pointer(4, 9), source="test")
            await append(log, pointer(7, 2), source="test")
            second = await asyncio.wait_for(found.newer_than(first.order), 30)
            assert (second.ref, second.sequence) == (ref(2), 7), "a rewind is a step forward in sequence"
            assert found.target == second
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_an_anchor_that_is_added_is_known_at_once_and_is_no_newer_target() -> None:
    """A compaction moves no channel: what is loaded stays loaded, and who still loads finds the nearer anchor."""
    url = f"memory://t{uuid.uuid4().hex}"
    async with open_log(url) as log, FaultyLog(open_log(url)) as deaf:
        deaf.cut()
        found = Reconciler(deaf, url, policy=PolicyId("p"), channel=LATEST, interval=0.05, source="test")
        running = asyncio.create_task(found.run())
        try:
            await append(log, pointer(5, 3, offset=10, anchor="far"), source="test")
            first = await asyncio.wait_for(found.newer_than(None), 30)
            newer, other = asyncio.create_task(found.newer_than(first.order)), asyncio.create_task(found.other_than(first))
            await append(log, pointer(5, 3, offset=20, anchor="near"), source="test")
            await asyncio.wait_for(other, 30)
            assert found.target is not None
            assert found.target.order == first.order
            assert [anchor.key for anchor in found.target.anchors] == ["near"]
            assert not newer.done(), "it would be staged, and perhaps loaded, again"
            await append(log, pointer(5, 3, offset=10, anchor="far"), source="test")
            await append(log, pointer(6, 4, offset=30), source="test")
            assert (await asyncio.wait_for(newer, 30)).ref == ref(4)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


# --- the audit ---------------------------------------------------------------------------------------------------------------


def served(name: str) -> RolloutServed:
    return RolloutServed(
        request_id=name,
        event_id=EventId(name),
        policy=PolicyId("p"),
        run=RunId("r1"),
        replica=ReplicaId("a"),
        incarnation=Incarnation(0),
        version_start=VersionNumber(0),
        version_end=VersionNumber(0),
        spans=(),
        prompt_tokens=None,
        output_tokens=None,
        started_ms=0,
        ended_ms=0,
    )


async def test_records_beyond_the_queue_are_dropped_and_counted() -> None:
    log = MemoryLog()
    audit = Audit(log, AuditMode.ALL, source="test", size=2)
    for name in "abc":
        audit.served(lambda name=name: served(name))  # type: ignore[misc]
    assert audit.dropped == 1
    running = asyncio.create_task(audit.run())
    await eventually(lambda: audit.written == 2, "both are written")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await log.bounds(Stream.ROLLOUTS)).end == 2
    silent = Audit(log, AuditMode.OFF, source="test")
    silent.served(lambda: served("d"))
    assert (silent.written, silent.dropped) == (0, 0)
