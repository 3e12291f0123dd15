"""One recorded training step of a model of 2 GiB published as a delta, against the bare encoding of the same tensors.

The publisher does more: it plans on the log, packs and uploads, writes the manifest, appends, reads back, and writes the
pointers. It uploads to a directory, and in turns to an S3 server on this machine, which takes its own work from the same cores.
The other side calls the codec on the same old and new bytes, with as many threads, and throws the result away. What the
publisher does after it returned (its copy of the old bytes moves on) is waited for outside the measure; a trainer's next step
hides it.

Memory is what the process grew by at its peak while a version was published from an iterable, whose tensors are copied.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import statistics
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

from stitch.core.ids import StateDigest
from stitch.trainer.publisher import Publisher
from stitch.weights import kernels
from stitch.weights.encode import PACK_BYTES
from stitch.weights.ordered import in_order
from stitch.weights.parallel import default_threads
from stitch.weights.sparse import SparseTensor, encode, unit_bytes
from stitch.weights.tensors import HostTensor, host_tensors
from tests.bench import Options, in_turns
from tests.bench._steps import Model, tiled
from tests.bench._world import MIB, World, world

TURNS = 7
MEMORY_TURNS = 2


def run(options: Options) -> dict[str, float]:
    kernels.warm(wait=True)
    old, steps = tiled((32 if options.small else 2048) * MIB)
    turns, memory_turns = (1, 1) if options.small else (TURNS, MEMORY_TURNS)
    largest = max(tensor.nbytes for tensor in old.values())
    walls: list[tuple[float, float, float]] = []
    peaks: list[int] = []
    with (
        world() as made,
        _publisher(made, f"file://{made.folder / 'store'}", "d") as near,
        _publisher(made, made.below("s"), "s") as s3,
    ):
        for publisher in (near, s3):
            publisher.publish(old)
        for turn, new in enumerate(islice(steps, turns + memory_turns)):
            if turn < turns:
                walls.append(_turn(options, near, s3, old, new, reverse=turn % 2 == 1))
            else:
                _settled(near)
                peaks.append(_peak_growth(partial(near.publish, iter(new.items()), kind="delta")))
            old = new
    ours, _, theirs = (statistics.median(side) for side in zip(*walls, strict=True))
    peak = statistics.median(peaks)
    # What stitch.weights.encode says: tensors in work or waiting, as many idle buffers for their copies, and one pack of blobs.
    declared = PACK_BYTES + 2 * (default_threads() + 2) * largest
    options.say(f"{len(old)} tensors: published in {ours:.3f} s, encoded in {theirs:.3f} s; grew by {peak / MIB:.0f} MiB")
    return {
        "wall_vs_encode": round(statistics.median(one / other for one, _, other in walls), 3),
        "wall_vs_encode_s3_on_the_same_cores": round(statistics.median(one / other for _, one, other in walls), 3),
        "publish_delta_s": round(ours, 3),
        "encode_s": round(theirs, 3),
        "peak_growth_vs_declared": round(peak / declared, 3),
        "peak_growth_vs_largest_tensor": round(peak / largest, 2),
    }


def _publisher(made: World, store: str, policy: str) -> Publisher:
    log = f"sqlite://{made.folder / 'log.db'}"
    return Publisher.open(policy=policy, run="r", log=log, store=store, scratch=made.folder)


def _turn(options: Options, near: Publisher, s3: Publisher, old: Model, new: Model, *, reverse: bool) -> tuple[float, float, float]:
    """Seconds of one step: published to a directory, to S3, and encoded only."""

    def publish(publisher: Publisher) -> None:
        done = publisher.publish(new, kind="delta")
        options.say(f"  {done.ref}: {done.bytes_written / MIB:.1f} MiB")

    def settle() -> None:
        _settled(near)
        _settled(s3)
        os.sync()

    sides: list[tuple[str, Callable[[], object]]] = [
        ("near", partial(publish, near)),
        ("s3", partial(publish, s3)),
        ("theirs", partial(_encode_only, old, new)),
    ]
    times = in_turns(dict(reversed(sides) if reverse else sides), 1, settle=settle)
    return times.median("near"), times.median("s3"), times.median("theirs")


def _encode_only(old: Model, new: Model) -> None:
    """What bounds it: every tensor through the codec. The state that a digest starts from is of no matter to its cost."""
    before = {tensor.name: tensor.data for tensor in host_tensors(old)}

    def change(tensor: HostTensor) -> SparseTensor | None:
        return encode(before[tensor.name], tensor.data, width=unit_bytes(tensor.dtype), state=StateDigest("0" * 16))

    for _ in in_order(host_tensors(new), change, copy=False):
        pass


def _settled(publisher: Publisher) -> None:
    """Waits until the publisher's copy of the old bytes is that of the tip."""
    if publisher._following is not None:
        concurrent.futures.wait([publisher._following])


def _peak_growth(act: Callable[[], object]) -> int:
    """Bytes by which the process's resident memory grew at its peak meanwhile."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from now
    before = _memory("VmRSS")
    act()
    return max(0, _memory("VmHWM") - before)


def _memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024
