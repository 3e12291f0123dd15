"""What the port EventLog promises, on every implementation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from stitch.core.errors import InvalidRequest, LogDiverged, Unavailable
from stitch.core.ids import Offset
from stitch.log.keeping import MAX_RECORD_BYTES
from stitch.log.port import Draft, EventLog, Reader, Record, Stream
from stitch.log.read import read_all
from tests.log.places import Place

pytestmark = pytest.mark.contract

PATIENCE_S = 30.0
"""For what takes milliseconds on an idle machine."""


def draft(number: int, key: str = "p") -> Draft:
    return Draft(key=key, value=b"%d" % number)


def values(records: Sequence[Record]) -> list[int]:
    return [int(record.value) for record in records]


async def take(reader: Reader, count: int) -> list[Record]:
    """Polls until `count` records came."""
    taken: list[Record] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(taken) < count:
            taken += await reader.poll(1.0)
    return taken


async def test_records_come_back_in_order(log: EventLog) -> None:
    before_ms = time.time_ns() // 1_000_000
    for number in range(20):
        await log.append(Stream.PUBLICATIONS, draft(number))
    records = await read_all(log, Stream.PUBLICATIONS)
    assert values(records) == list(range(20))
    assert all(record.stream is Stream.PUBLICATIONS and record.key == "p" for record in records)
    offsets = [record.offset for record in records]
    assert offsets == sorted(set(offsets))
    times = [record.time_ms for record in records]
    assert times == sorted(times)
    assert before_ms - 1_000 <= times[0] <= time.time_ns() // 1_000_000 + 1_000


async def test_keys_values_and_headers_come_back_as_they_were(log: EventLog) -> None:
    drafts = [
        Draft(key="a/b", value=b"", headers=()),
        Draft(key="", value=bytes(range(256)), headers=(("h", bytes(range(256))), ("h", b""), ("ce_id", b"again"))),
        Draft(key="schlüssel ☃", value=b"\xc3\x01", headers=(("größe", b"\0"),)),
    ]
    for each in drafts:
        await log.append(Stream.PUBLICATIONS, each)
    found = await read_all(log, Stream.PUBLICATIONS)
    assert [Draft(key=record.key, value=record.value, headers=record.headers) for record in found] == drafts


async def test_large_records_pass_and_larger_ones_are_refused(log: EventLog) -> None:
    largest = bytes(1000) * ((MAX_RECORD_BYTES - 1000) // 1000)
    await log.append(Stream.ROLLOUTS, Draft(key="k", value=largest))
    with pytest.raises(InvalidRequest, match="record"):
        await log.append(Stream.ROLLOUTS, Draft(key="k", value=bytes(MAX_RECORD_BYTES)))
    assert [record.value for record in await read_all(log, Stream.ROLLOUTS)] == [largest]


async def test_an_empty_stream(log: EventLog) -> None:
    bounds = await log.bounds(Stream.POINTERS)
    assert bounds.start == bounds.end
    assert await log.newest(Stream.POINTERS) is None
    assert await log.offset_at(Stream.POINTERS, 0) == bounds.end
    assert await read_all(log, Stream.POINTERS) == []


async def test_bounds_and_newest_follow_appends(log: EventLog) -> None:
    empty = await log.bounds(Stream.ACTIVATIONS)
    for number in range(3):
        await log.append(Stream.ACTIVATIONS, draft(number))
        newest = await log.newest(Stream.ACTIVATIONS)
        assert newest is not None
        assert int(newest.value) == number
        bounds = await log.bounds(Stream.ACTIVATIONS)
        assert bounds.start == empty.start
        assert bounds.end > newest.offset


async def test_streams_are_apart(log: EventLog) -> None:
    for number, stream in enumerate(Stream):
        await log.append(stream, draft(number))
    for number, stream in enumerate(Stream):
        assert values(await read_all(log, stream)) == [number]


async def test_offset_at_is_the_first_record_of_that_time_or_later(log: EventLog) -> None:
    for number in range(10):
        await log.append(Stream.ACTIVATIONS, draft(number))
        await asyncio.sleep(0.002)
    records = await read_all(log, Stream.ACTIVATIONS)
    end = (await log.bounds(Stream.ACTIVATIONS)).end
    for time_ms in {0, *(record.time_ms + shift for record in records for shift in (-1, 0, 1))}:
        expected = next((record.offset for record in records if record.time_ms >= time_ms), end)
        assert await log.offset_at(Stream.ACTIVATIONS, time_ms) == expected


async def test_a_reader_waits_for_what_another_handle_appends(place: Place, log: EventLog) -> None:
    other = place.handle()
    await log.append(Stream.PUBLICATIONS, draft(0))
    async with await other.reader(Stream.PUBLICATIONS, (await other.bounds(Stream.PUBLICATIONS)).end) as reader:
        for number in range(1, 6):
            waiting = asyncio.create_task(reader.poll(PATIENCE_S))
            await asyncio.sleep(0)
            await log.append(Stream.PUBLICATIONS, draft(number))
            assert values(await waiting) == [number]


async def test_a_poll_without_records_ends_with_its_time_out(log: EventLog) -> None:
    async with await log.reader(Stream.PUBLICATIONS, Offset(0)) as reader:
        for timeout in (0.3, 0.0):
            started = time.monotonic()
            assert await reader.poll(timeout) == []
            assert timeout - 0.05 <= time.monotonic() - started < PATIENCE_S
        assert reader.position == 0


async def test_a_reader_begins_where_it_is_told_and_takes_no_more_than_it_may(log: EventLog) -> None:
    for number in range(10):
        await log.append(Stream.PUBLICATIONS, draft(number))
    middle = (await read_all(log, Stream.PUBLICATIONS))[4].offset
    async with await log.reader(Stream.PUBLICATIONS, middle) as reader:
        assert reader.position == middle
        seen: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(seen) < 6:
                records = await reader.poll(1.0, max_records=4)
                assert len(records) <= 4
                if records:
                    assert reader.position > records[-1].offset
                seen += values(records)
    assert seen == [4, 5, 6, 7, 8, 9]


async def test_the_position_reaches_the_end(log: EventLog) -> None:
    for number in range(5):
        await log.append(Stream.POINTERS, draft(number, key=f"p/{number % 2}"))
    end = (await log.bounds(Stream.POINTERS)).end
    async with await log.reader(Stream.POINTERS, Offset(0)) as reader, asyncio.timeout(PATIENCE_S):
        while reader.position < end:
            await reader.poll(0.5)
        assert reader.position == end
        assert await reader.poll(0.1) == []
        await log.append(Stream.POINTERS, draft(5))
        assert values(await take(reader, 1)) == [5]


async def test_a_cancelled_poll_loses_nothing(log: EventLog) -> None:
    async with await log.reader(Stream.PUBLICATIONS, Offset(0)) as reader:
        for number in range(0, 9, 3):
            waiting = asyncio.create_task(reader.poll(PATIENCE_S))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            for each in range(3):
                await log.append(Stream.PUBLICATIONS, draft(number + each))
            assert values(await take(reader, 3)) == [number, number + 1, number + 2]


async def test_concurrent_appends_all_land_once_and_all_readers_agree(place: Place, log: EventLog) -> None:
    handles = [log, place.handle()]

    async def write(writer: int) -> None:
        for number in range(15):
            await handles[writer % 2].append(Stream.PUBLICATIONS, Draft(key=f"w{writer}", value=b"%d" % number))

    await asyncio.gather(*(write(writer) for writer in range(4)))
    read = [await read_all(handle, Stream.PUBLICATIONS) for handle in handles]
    assert read[0] == read[1]
    for writer in range(4):
        assert values([record for record in read[0] if record.key == f"w{writer}"]) == list(range(15))
    assert len(read[0]) == 60


async def test_compaction_keeps_the_last_record_of_each_key(place: Place, log: EventLog) -> None:
    for number in range(30):
        await log.append(Stream.POINTERS, draft(number, key=f"p/{number % 3}"))
    bounds = await log.bounds(Stream.POINTERS)
    await place.compact(log)
    records = [record for record in await read_all(log, Stream.POINTERS) if record.key != "roll"]
    assert [(record.key, int(record.value)) for record in records] == [("p/0", 27), ("p/1", 28), ("p/2", 29)]
    after = await log.bounds(Stream.POINTERS)
    assert after.end >= bounds.end
    # A reader within the hole goes on with what is left, since compaction is no damage.
    async with await log.reader(Stream.POINTERS, Offset(bounds.start + 1)) as reader:
        assert values([record for record in await take(reader, 3) if record.key != "roll"]) == [27, 28, 29]


async def test_a_position_beyond_the_end_is_damage(log: EventLog) -> None:
    await log.append(Stream.PUBLICATIONS, draft(0))
    end = (await log.bounds(Stream.PUBLICATIONS)).end
    async with await log.reader(Stream.PUBLICATIONS, Offset(end + 1)) as reader:
        with pytest.raises(LogDiverged):
            await reader.poll(PATIENCE_S)


async def test_records_outlive_their_handle(place: Place, log: EventLog) -> None:
    await log.append(Stream.PUBLICATIONS, draft(7))
    await log.aclose()
    again = place.handle()
    await again.setup(create=False)
    await again.append(Stream.PUBLICATIONS, draft(8))
    assert values(await read_all(again, Stream.PUBLICATIONS)) == [7, 8]


async def test_a_closed_log_says_so(log: EventLog) -> None:
    reader = await log.reader(Stream.PUBLICATIONS, Offset(0))
    waiting = asyncio.create_task(reader.poll(PATIENCE_S))
    await asyncio.sleep(0.01)
    await log.aclose()
    await log.aclose()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await reader.poll(0.1)
    await reader.aclose()
    await reader.aclose()
    with pytest.raises(Unavailable):
        await log.append(Stream.PUBLICATIONS, draft(0))
    with pytest.raises(Unavailable):
        await log.bounds(Stream.PUBLICATIONS)
    with pytest.raises(Unavailable):
        await log.offset_at(Stream.PUBLICATIONS, 0)
    with pytest.raises(Unavailable):
        await log.newest(Stream.PUBLICATIONS)
    with pytest.raises(Unavailable):
        await log.reader(Stream.PUBLICATIONS, Offset(0))
    with pytest.raises(Unavailable):
        await log.setup(create=True)


async def test_a_log_that_was_never_used_closes(place: Place) -> None:
    await place.handle().aclose()


async def test_a_missing_log_is_refused_with_the_command_that_makes_it(place: Place) -> None:
    log = place.handle()
    if not place.missing_is_refused:
        await log.setup(create=False)
        return
    with pytest.raises(InvalidRequest, match="stitch topics create --log"):
        await log.setup(create=False)
    await log.setup(create=True)
    await log.setup(create=False)


async def test_several_may_make_the_log_at_once(place: Place) -> None:
    handles = [place.handle() for _ in range(3)]
    await asyncio.gather(*(handle.setup(create=True) for handle in handles))
    for number, handle in enumerate(handles):
        await handle.append(Stream.PUBLICATIONS, draft(number))
    assert values(await read_all(handles[0], Stream.PUBLICATIONS)) == [0, 1, 2]
