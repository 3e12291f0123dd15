"""Planned faults behave as the port says that real ones do, whatever the log behind them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from stitch.core.errors import OutcomeUnknown, Unavailable
from stitch.core.ids import Offset
from stitch.log.faulty import Fault, FaultyLog, Plan, script, seeded
from stitch.log.memory import MemoryLog
from stitch.log.port import Draft, EventLog, Stream
from stitch.log.read import read_all

pytestmark = pytest.mark.contract


@pytest.fixture
def faulty(log: EventLog) -> FaultyLog:
    return FaultyLog(log)


async def put(log: EventLog, number: int) -> None:
    await log.append(Stream.PUBLICATIONS, Draft(key="p", value=b"%d" % number))


async def there(log: EventLog) -> list[int]:
    return [int(record.value) for record in await read_all(log, Stream.PUBLICATIONS)]


async def test_a_lost_append_is_unknown_and_never_lands(faulty: FaultyLog) -> None:
    faulty.plan(script(Fault.LOSE))
    with pytest.raises(OutcomeUnknown):
        await put(faulty, 0)
    await put(faulty, 1)
    assert await faulty.release() == 0
    assert await there(faulty) == [1]


async def test_a_refused_append_never_lands(faulty: FaultyLog) -> None:
    faulty.plan(script(Fault.REFUSE))
    with pytest.raises(Unavailable):
        await put(faulty, 0)
    assert await there(faulty) == []


async def test_a_held_append_lands_when_released(faulty: FaultyLog) -> None:
    faulty.plan(script(Fault.HOLD, Fault.HOLD))
    for number in range(2):
        with pytest.raises(OutcomeUnknown):
            await put(faulty, number)
    await put(faulty, 2)
    assert faulty.held == 2
    assert await there(faulty) == [2]
    assert await faulty.release(1) == 1
    assert await there(faulty) == [2, 0]
    assert await faulty.release() == 1
    assert await there(faulty) == [2, 0, 1]


async def test_a_mute_append_lands_without_a_word(faulty: FaultyLog) -> None:
    faulty.plan(script(Fault.MUTE))
    with pytest.raises(OutcomeUnknown):
        await put(faulty, 0)
    assert await there(faulty) == [0]


async def test_an_echoed_append_is_there_twice(faulty: FaultyLog) -> None:
    faulty.plan(script(Fault.ECHO))
    await put(faulty, 0)
    await put(faulty, 1)
    assert await there(faulty) == [0, 0, 1]


async def test_a_slow_append_lands_behind_a_later_one(log: EventLog) -> None:
    faulty = FaultyLog(log, script(Fault.SLOW), slow=1.0)
    slow = asyncio.create_task(put(faulty, 0))
    await asyncio.sleep(0)
    await put(faulty, 1)
    await slow
    assert await there(faulty) == [1, 0]


async def test_a_cut_log_is_unavailable_until_mended(faulty: FaultyLog) -> None:
    await put(faulty, 0)
    async with await faulty.reader(Stream.PUBLICATIONS, Offset(0)) as reader:
        faulty.cut()
        with pytest.raises(Unavailable):
            await put(faulty, 1)
        with pytest.raises(Unavailable):
            await reader.poll(0.1)
        with pytest.raises(Unavailable):
            await faulty.bounds(Stream.PUBLICATIONS)
        with pytest.raises(Unavailable):
            await faulty.newest(Stream.PUBLICATIONS)
        with pytest.raises(Unavailable):
            await faulty.setup(create=True)
        faulty.mend()
        assert [int(record.value) for record in await reader.poll(30.0)] == [0]
    assert await there(faulty) == [0]


def _drawn(plan: Plan, count: int) -> list[Fault]:
    return [plan(Stream.PUBLICATIONS, Draft(key="k", value=b"")) for _ in range(count)]


def test_a_seed_repeats_its_faults() -> None:
    odds = {Fault.LOSE: 0.2, Fault.ECHO: 0.1}
    drawn = _drawn(seeded(7, odds), 2000)
    assert drawn == _drawn(seeded(7, odds), 2000)
    assert drawn != _drawn(seeded(8, odds), 2000)
    counts = Counter(drawn)
    assert set(counts) == {Fault.NONE, Fault.LOSE, Fault.ECHO}
    assert 300 < counts[Fault.LOSE] < 500
    assert 130 < counts[Fault.ECHO] < 270
    with pytest.raises(ValueError, match="odds"):
        seeded(1, {Fault.LOSE: 0.7, Fault.ECHO: 0.7})


async def test_closing_closes_the_log_behind() -> None:
    inner = MemoryLog()
    async with FaultyLog(inner):
        pass
    with pytest.raises(Unavailable):
        await inner.bounds(Stream.PUBLICATIONS)
