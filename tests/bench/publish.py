"""A full version of 1 GiB, published, against s3transfer's upload of the same files; and a small version's time.

The publisher does more: it digests every tensor and file, writes and reads back a manifest, and appends to the log.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import numpy as np

from stitch.trainer.publisher import Publisher
from tests.bench import Options, in_turns, seconds_of
from tests.bench._world import MIB, World, checkpoint, world

TURNS = 5
SMALL_VERSIONS = 40


def run(options: Options) -> dict[str, float]:
    with world() as made:
        return {**_large(made, options), **_small(made, options)}


def _large(made: World, options: Options) -> dict[str, float]:
    size = (32 if options.small else 1024) * MIB
    options.say(f"writing a checkpoint of {size // MIB} MiB")
    folder = checkpoint(made.folder / "checkpoint", size, seed=1)
    files = sorted(folder.glob("*.safetensors"))
    with Publisher.open(
        policy="p", run="r", log=f"sqlite://{made.folder / 'log.db'}", store=made.below("ours"), scratch=made.folder
    ) as publisher:

        def ours() -> None:
            # A number of its own each time: nothing of an earlier turn is there already.
            publication = publisher.publish(str(folder), kind="full")
            options.say(f"  published {publication.bytes_written // MIB} MiB as {publication.ref}")

        def theirs() -> None:
            made.upload(files, "theirs")

        def settle() -> None:
            made.empty("ours")
            made.empty("theirs")
            os.sync()

        times = in_turns({"ours": ours, "theirs": theirs}, 1 if options.small else TURNS, settle=settle)
        settle()
    for side in ("ours", "theirs"):
        options.say(f"{side:>8}: {times.median(side):.2f} s, {size / MIB / times.median(side):.0f} MiB/s")
    return {
        "publish_1gib_vs_s3transfer": round(times.ratio("ours", "theirs"), 3),
        "publish_1gib_s": round(times.median("ours"), 3),
        "s3transfer_1gib_s": round(times.median("theirs"), 3),
    }


def _small(made: World, options: Options) -> dict[str, float]:
    """A few kilobytes, so that only the protocol's round trips count."""
    rng = np.random.default_rng(2)
    seconds: list[float] = []
    with Publisher.open(
        policy="small", run="r", log=f"sqlite://{made.folder / 'log.db'}", store=made.below("small"), scratch=made.folder
    ) as publisher:
        for _ in range(3 if options.small else SMALL_VERSIONS):
            weights: dict[str, Any] = {"w": rng.standard_normal((32, 32)).astype(np.float32)}
            seconds.append(seconds_of(lambda weights=weights: publisher.publish(weights)))  # type: ignore[misc]
    return {"small_publish_ms_p50": round(statistics.median(seconds) * 1000, 2)}
