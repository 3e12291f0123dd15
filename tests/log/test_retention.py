"""How long the embedded logs keep records. Kafka does the same by its topics' settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stitch.core.errors import LogDiverged
from stitch.core.ids import Offset
from stitch.log.keeping import DAY_MS, RETENTION_MS
from stitch.log.memory import MemoryLog
from stitch.log.port import Draft, EventLog, Stream
from stitch.log.read import read_all
from stitch.log.sqlite import SqliteLog

pytestmark = pytest.mark.contract


class Clock:
    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "sqlite"])
async def log(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> AsyncIterator[EventLog]:
    async with MemoryLog(clock=clock) if request.param == "memory" else SqliteLog(tmp_path / "log.db", clock=clock) as log:
        await log.setup(create=True)
        yield log


@pytest.mark.parametrize(("stream", "days"), [(Stream.ACTIVATIONS, 7), (Stream.ROLLOUTS, 30)])
async def test_old_records_expire(log: EventLog, clock: Clock, stream: Stream, days: int) -> None:
    for number in range(days + 3):
        await log.append(stream, Draft(key="k", value=b"%d" % number))
        clock.ms += DAY_MS
    # The last append came at day `days + 2`; what is older than `days` by then is gone.
    bounds = await log.bounds(stream)
    assert (bounds.start, bounds.end) == (2, days + 3)
    assert [int(record.value) for record in await read_all(log, stream)] == list(range(2, days + 3))
    async with await log.reader(stream, Offset(1)) as reader:
        with pytest.raises(LogDiverged):
            await reader.poll(1.0)


async def test_a_backlog_of_old_records_goes_within_some_appends(log: EventLog, clock: Clock) -> None:
    for number in range(250):
        await log.append(Stream.ACTIVATIONS, Draft(key="k", value=b"%d" % number))
    clock.ms += RETENTION_MS[Stream.ACTIVATIONS] + 1
    for number in range(250, 260):
        await log.append(Stream.ACTIVATIONS, Draft(key="k", value=b"%d" % number))
    assert (await log.bounds(Stream.ACTIVATIONS)).start == 250
    assert [int(record.value) for record in await read_all(log, Stream.ACTIVATIONS)] == list(range(250, 260))


@pytest.mark.parametrize("stream", [Stream.PUBLICATIONS, Stream.POINTERS])
async def test_decisions_and_pointers_stay(log: EventLog, clock: Clock, stream: Stream) -> None:
    for number in range(3):
        await log.append(stream, Draft(key=f"k{number}", value=b"%d" % number))
        clock.ms += 1000 * DAY_MS
    assert [int(record.value) for record in await read_all(log, stream)] == [0, 1, 2]
    assert (await log.bounds(stream)).start == 0
