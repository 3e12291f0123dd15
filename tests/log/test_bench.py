"""Measures of the embedded log. `pytest -m bench -s tests/log/test_bench.py` prints them."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from stitch.log.port import Draft, EventLog, Stream
from stitch.log.sqlite import SqliteLog

pytestmark = pytest.mark.bench

APPENDS = 300
LOOKS = 40
IDLE_S = 3.0


async def put(log: EventLog) -> None:
    await log.append(Stream.ACTIVATIONS, Draft(key="r", value=bytes(1000)))


async def test_sqlite(tmp_path: Path) -> None:
    async with SqliteLog(tmp_path / "log.db") as log, SqliteLog(tmp_path / "log.db") as other:
        await log.setup(create=True)
        started = time.perf_counter()
        for _ in range(APPENDS):
            await put(log)
        print(f"\nappend, one by one: {(time.perf_counter() - started) / APPENDS * 1e3:.2f} ms")
        started = time.perf_counter()
        await asyncio.gather(*(put(log) for _ in range(APPENDS)))
        print(f"append, together:   {(time.perf_counter() - started) / APPENDS * 1e3:.2f} ms")

        delays = []
        async with await other.reader(Stream.ACTIVATIONS, (await other.bounds(Stream.ACTIVATIONS)).end) as reader:
            for number in range(LOOKS):
                waiting = asyncio.create_task(reader.poll(30.0))
                await asyncio.sleep(0.03 + 0.001 * (number % 25))  # wherever the follower is between two looks
                await put(log)
                started = time.perf_counter()
                assert len(await waiting) == 1
                delays.append(time.perf_counter() - started)
            print(f"seen by others:     median {statistics.median(delays) * 1e3:.1f} ms, most {max(delays) * 1e3:.1f} ms")
            used = time.process_time()
            assert await reader.poll(IDLE_S) == []
            print(f"idle follower:      {(time.process_time() - used) / IDLE_S:.2%} of a core")
