"""An object of 1 GiB into a local file, verified, against s3transfer's download of it."""

from __future__ import annotations

import os

from stitch.store.hashing import digest_file
from stitch.store.port import Receipt
from stitch.store.s3 import S3Store, parse_s3
from tests.bench import Options, in_turns
from tests.bench._world import MIB, world

TURNS = 5
BLOCK = 16 * MIB


def run(options: Options) -> dict[str, float]:
    size = (96 if options.small else 1024) * MIB
    with world() as made:
        source = made.folder / "source"
        with source.open("wb") as file:
            for _ in range(0, size, BLOCK):
                file.write(os.urandom(BLOCK))
        digest, _ = digest_file(source)
        made.client.upload_file(str(source), made.place.bucket, "p/object")
        source.unlink()
        target = made.folder / "target"
        with S3Store(parse_s3(made.below("p"))) as store:

            def settle() -> None:
                target.unlink(missing_ok=True)
                os.sync()

            times = in_turns(
                {
                    "ours": lambda: store.download(Receipt(key="object", size=size, blake3=digest), target),
                    "theirs": lambda: made.download("p/object", target),
                },
                1 if options.small else TURNS,
                settle=settle,
            )
    for side in ("ours", "theirs"):
        options.say(f"{side:>8}: {times.median(side):.2f} s, {size / MIB / times.median(side):.0f} MiB/s")
    return {
        "download_1gib_vs_s3transfer": round(times.ratio("ours", "theirs"), 3),
        "download_1gib_s": round(times.median("ours"), 3),
        "s3transfer_1gib_s": round(times.median("theirs"), 3),
    }
