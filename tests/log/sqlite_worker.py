"""A process that appends records `<name> <number>` to a SqliteLog and prints each number once it is acknowledged."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from stitch.log.port import Draft, Stream
from stitch.log.sqlite import SqliteLog


async def main(path: Path, name: str, count: int) -> None:
    async with SqliteLog(path) as log:
        for number in range(count):
            await log.append(Stream.PUBLICATIONS, Draft(key=name, value=b"%d" % number))
            print(number, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
