from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import pytest

from stitch.core.errors import LogDiverged, Unavailable
from stitch.core.ids import Offset
from stitch.log import read
from stitch.log.port import Draft, EventLog, Record, Stream
from stitch.log.read import last_record, last_records, pages, read_all
from tests.log.stuck import StuckLog

pytestmark = pytest.mark.contract


def values(records: Sequence[Record]) -> list[int]:
    return [int(record.value) for record in records]


async def fill(log: EventLog, count: int) -> None:
    for number in range(count):
        await log.append(Stream.POINTERS, Draft(key=f"p/{number % 4}", value=b"%d" % number))


async def test_reads_between_two_offsets(log: EventLog) -> None:
    for number in range(10):
        await log.append(Stream.PUBLICATIONS, Draft(key="p", value=b"%d" % number))
    offsets = [record.offset for record in await read_all(log, Stream.PUBLICATIONS)]
    assert values(await read_all(log, Stream.PUBLICATIONS, start=offsets[2], until=offsets[5])) == [2, 3, 4]
    assert await read_all(log, Stream.PUBLICATIONS, start=offsets[5], until=offsets[5]) == []
    with pytest.raises(LogDiverged):
        await read_all(log, Stream.PUBLICATIONS, start=Offset(1000), until=Offset(1001))


async def test_the_end_is_that_of_the_call(log: EventLog) -> None:
    """Otherwise a busy stream would never be read to its end."""
    for number in range(3):
        await log.append(Stream.ROLLOUTS, Draft(key="p", value=b"%d" % number))
    seen = []
    async with aclosing(pages(log, Stream.ROLLOUTS)) as found:
        async for page in found:
            seen += values(page)
            await log.append(Stream.ROLLOUTS, Draft(key="p", value=b"99"))
    assert seen == [0, 1, 2]


async def test_the_last_record_is_found_behind_holes(log: EventLog) -> None:
    assert await last_record(log, Stream.POINTERS) is None
    await fill(log, 40)
    newest = await last_record(log, Stream.POINTERS)
    assert newest is not None
    assert newest == await log.newest(Stream.POINTERS)
    assert int(newest.value) == 39


@pytest.mark.parametrize("count", [0, 1, 3, 40, 41])
async def test_the_newest_records_in_their_order(log: EventLog, count: int) -> None:
    for number in range(40):
        await log.append(Stream.ROLLOUTS, Draft(key="k", value=b"%d" % number))
    assert values(await last_records(log, Stream.ROLLOUTS, count)) == list(range(40))[max(0, 40 - count) :]
    until = Offset((await log.bounds(Stream.ROLLOUTS)).end - 10)
    assert values(await last_records(log, Stream.ROLLOUTS, count, until=until)) == list(range(30))[max(0, 30 - count) :]


async def test_a_log_that_stops_answering_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with StuckLog() as log:
        await fill(log, 1)
        with pytest.raises(Unavailable, match="ends at 1"):
            await read_all(log, Stream.POINTERS, timeout=0.05)
        monkeypatch.setattr(read, "STALL_S", 0.05)
        with pytest.raises(Unavailable, match="read to offset 0"):
            await read_all(log, Stream.POINTERS)
