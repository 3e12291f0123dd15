"""`stitch log tail`: the newest events, whatever the length of the log."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from stitch.cli import inspect
from stitch.core.events import RunClaimed
from stitch.core.ids import EventId, Offset
from stitch.log.events import append, draft
from stitch.log.memory import MemoryLog
from stitch.log.port import Draft, Record, Stream
from tests.support.examples import examples

pytestmark = pytest.mark.unit


class _Counted(MemoryLog):
    """Counts the records that it hands out."""

    read = 0

    def _read(self, stream: Stream, position: int, most: int) -> tuple[Sequence[Record], int]:
        found, after = super()._read(stream, position, most)
        self.read += len(found)
        return found, Offset(after)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    made = _Counted()

    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[_Counted]:
        yield made

    monkeypatch.setattr(inspect, "open_log", opened)
    return made


async def tail(capsys: pytest.CaptureFixture[str], stream: Stream, count: int) -> list[dict[str, Any]]:
    await inspect._tail("memory://", stream, follow=False, count=count, as_json=True)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("stream", "name"),
    [(Stream.ACTIVATIONS, "replica_state"), (Stream.ROLLOUTS, "rollout_served")],
    ids=["activations", "rollouts"],
)
async def test_a_long_stream_is_read_at_its_end_alone(
    log: _Counted, capsys: pytest.CaptureFixture[str], stream: Stream, name: str
) -> None:
    record = draft(examples()[name], source="test")
    for _ in range(5000):
        await log.append(stream, record)
    rows = await tail(capsys, stream, 20)
    assert [row["offset"] for row in rows] == list(range(4980, 5000))
    assert log.read <= 40


async def test_publications_tell_what_became_of_each_and_nothing_after_one_that_cannot_be_read(
    log: _Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = examples()["run_claimed"]
    assert isinstance(claim, RunClaimed)
    await append(log, claim, source="test")
    await append(log, replace(claim, event_id=EventId("late")), source="test")
    await log.append(Stream.PUBLICATIONS, Draft(key="math", value=b"poison"))
    await append(log, replace(claim, event_id=EventId("after")), source="test")
    rows = await tail(capsys, Stream.PUBLICATIONS, 20)
    assert [row["type"] for row in rows] == ["RunClaimed", "RunClaimed", "unreadable", "RunClaimed"]
    assert [row.get("verdict") for row in rows] == ["accepted", "stale_head", None, None]
    assert [row["offset"] for row in await tail(capsys, Stream.PUBLICATIONS, 1)] == [3]
    assert await tail(capsys, Stream.PUBLICATIONS, 0) == []
