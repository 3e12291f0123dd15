"""Every prefix of a log gives the view that folding by hand gives, in every process and every release (I8)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.audit.replay import view_at
from stitch.core import fleet as fleet_fold
from stitch.core import lineage as lineage_fold
from stitch.core.events import Decision, ReplicaState
from stitch.core.fleet import Fleet
from stitch.core.ids import Offset
from stitch.core.lineage import Lineage, Position, Verdict
from stitch.core.replay import View
from stitch.log.events import append
from stitch.log.memory import MemoryLog
from tests.audit.recording import EPOCH_MS, GOLDEN, decisions, digests_of, states
from tests.core.builders import POLICY

pytestmark = pytest.mark.unit

LOGS = sorted(GOLDEN.glob("*.jsonl"))


def by_hand(taken: list[tuple[int, Any]]) -> View:
    """The folds of the core over events, without log or encoding. Each with its time; offsets count by stream."""
    lineage, fleet, offsets = Lineage(), Fleet(), {True: 0, False: 0}
    for time_ms, event in taken:
        replica = isinstance(event, ReplicaState)
        at = Position(offset=Offset(offsets[replica]), time_ms=time_ms)
        offsets[replica] += 1
        if isinstance(event, ReplicaState):
            fleet = fleet_fold.apply(fleet, event, at)[0]
        else:
            lineage = lineage_fold.apply(lineage, event, at)[0]
    return View(lineage=lineage, fleet=fleet)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, Decision | ReplicaState]]:
    """The scripted events, some doubled, some lost, mixed in any way that keeps each stream's rough order, at times that may
    coincide."""
    found: list[tuple[int, Decision | ReplicaState]] = []
    pending: list[list[Any]] = [decisions(), list(states())]
    now = EPOCH_MS
    while any(pending):
        source = draw(st.sampled_from([each for each in pending if each]))
        event = source.pop(0)
        for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2, 0]))):
            now += draw(st.sampled_from([0, 1, 1000]))
            found.append((now, event))
    return found


@settings(max_examples=20, deadline=None)
@given(history=histories())
def test_each_offset_and_each_moment_is_what_folding_by_hand_gives(history: list[tuple[int, Decision | ReplicaState]]) -> None:
    asyncio.run(_check(history))


async def _check(history: list[tuple[int, Decision | ReplicaState]]) -> None:
    now = [0]
    async with MemoryLog(clock=lambda: now[0]) as log:
        for time_ms, event in history:
            now[0] = time_ms
            await append(log, event, source="test")
        assert await view_at(log) == by_hand(history)
        for moment in sorted({time_ms for time_ms, _ in history}):
            until = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=moment)
            assert await view_at(log, until) == by_hand([each for each in history if each[0] <= moment])
        published = [(time_ms, event) for time_ms, event in history if not isinstance(event, ReplicaState)]
        for offset, (moment, _) in enumerate(published):
            states_then = [each for each in history if isinstance(each[1], ReplicaState) and each[0] <= moment]
            expected = by_hand([*published[: offset + 1], *states_then])
            view = await view_at(log, offset)
            assert view == expected
            assert view.digest == expected.digest


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_recorded_log_gives_the_digests_that_were_recorded_with_it(path: Path) -> None:
    """A fold rule that was changed without a format level shows here."""
    told = asyncio.run(digests_of(path.read_text(encoding="utf-8").splitlines()))
    assert told == json.loads(path.with_suffix(".digests.json").read_text(encoding="utf-8"))
    assert len(set(told.values())) > len(told) // 2


def test_the_scripted_history_holds_what_a_log_may_hold() -> None:
    view = by_hand([(EPOCH_MS, event) for event in [*decisions(), *states()]])
    policy = view.lineage.policy(POLICY)
    assert LOGS
    assert len({event.__class__ for event in decisions()}) == 7, "a decision of every kind"
    assert any(version.abandoned for version in policy.versions.values())
    assert any(version.quarantined for version in policy.versions.values())
    assert any(version.retired for version in policy.versions.values())
    assert any(version.alias_of for version in policy.versions.values())
    assert any(version.anchor for version in policy.versions.values())
    refused = {verdict for verdict in policy.verdicts.values() if verdict is not Verdict.ACCEPTED}
    assert refused >= {Verdict.STALE_EPOCH, Verdict.STALE_SEQUENCE, Verdict.NUMBER_NOT_GREATER, Verdict.VERSION_NEEDED}
    assert set(view.fleet.members) == {"one", "two", "three"}


_PRINT_DIGEST = """
import asyncio, sys
from pathlib import Path
from tests.audit.recording import digests_of
print(asyncio.run(digests_of(Path(sys.argv[1]).read_text().splitlines()))["end"])
"""


def test_the_digest_is_the_same_in_every_process() -> None:
    """Whatever order a process's hashes give to maps and sets."""
    told = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_DIGEST, str(LOGS[0])],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        told.add(done.stdout.strip())
    assert told == {json.loads(LOGS[0].with_suffix(".digests.json").read_text(encoding="utf-8"))["end"]}
