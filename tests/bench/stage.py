"""One recorded training step staged onto a checkpoint of 2 GiB, against rewriting that checkpoint; and thirty of them in one fold.

All of `Staging.stage` counts: the download from a directory, its digests, the fold, and the verification. The peer writes the same
bytes by safetensors' own `save_file`. Nobody flushes to disk within a turn; what has become dirty is written between turns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import stitch
from stitch.core.ids import VersionRef
from stitch.core.manifest import ManifestRef
from stitch.store.opening import open_store
from stitch.store.port import BlobStore
from stitch.trainer.publisher import Publisher
from stitch.weights import kernels
from stitch.weights.safetensors import WEIGHTS_FILE, write_checkpoint
from stitch.weights.staging import Staged, Staging, Verify
from tests.bench import Options, in_turns, seconds_of
from tests.bench._steps import Model, tiled
from tests.bench._world import MIB

TURNS = 5
FOLDS = 3
MANY = 30


class Line:
    """Published versions, and staging areas that follow them one by one."""

    def __init__(self, store: BlobStore, versions: Mapping[int, tuple[VersionRef, ManifestRef]]) -> None:
        self._store, self._versions = store, versions

    def stage(self, staging: Staging, number: int) -> Staged:
        ref, manifest = self._versions[number]
        staged = staging.stage(ref, manifest)
        staging.mark_active(staged)
        return staged

    def following(self, staging: Staging) -> Callable[[], Staged]:
        """Each call stages the next version."""
        numbers = iter(range(max(self._versions) + 1))
        return lambda: self.stage(staging, next(numbers))

    def area(self, folder: Path, verify: Verify, buffers: int) -> Staging:
        return Staging(folder, self._store, verify=verify, buffers=buffers)


def run(options: Options) -> dict[str, float]:
    kernels.warm(wait=True)
    size = (32 if options.small else 2048) * MIB
    with tempfile.TemporaryDirectory(prefix="stitch-bench-") as name:
        folder = Path(name)
        base, steps = tiled(size)
        many = 3 if options.small else MANY
        versions = _publish(options, folder, base, islice(steps, many + 1))
        with open_store(f"file://{folder / 'store'}") as store:
            line = Line(store, versions)
            one = _one(options, folder, line, base)
            fold = _fold(options, folder, line, many)
            return {**one, **fold, "thirty_vs_rewrite": round(fold["thirty_s"] / one["rewrite_s"], 2)}


def _publish(options: Options, folder: Path, base: Model, steps: islice[Model]) -> Mapping[int, tuple[VersionRef, ManifestRef]]:
    write_checkpoint(folder / "base", base)
    log = f"sqlite://{folder / 'log.db'}"
    with Publisher.open(
        policy="p", run="r", log=log, store=f"file://{folder / 'store'}", base=folder / "base", scratch=folder
    ) as publisher:
        for model in steps:
            done = publisher.publish(model, kind="delta")
            options.say(f"  published {done.ref}: {done.bytes_written / MIB:.1f} MiB")
    (folder / "base" / WEIGHTS_FILE).unlink()
    lineage = stitch.replay(log).lineage.policy(done.ref.policy)
    return {version.ref.number: (version.ref.of(done.ref.policy), version.manifest) for version in lineage.versions.values()}


def _one(options: Options, folder: Path, line: Line, base: Model) -> dict[str, float]:
    """One delta in place; and, as replicas follow by default, the last two in the other of two buffers."""
    tensors = {name: array.view(np.uint16) for name, array in base.items()}  # the same bytes: its numpy has no bf16
    turns = 1 if options.small else TURNS
    with (
        line.area(folder / "full", Verify.FULL, 1) as full,
        line.area(folder / "incremental", Verify.INCREMENTAL, 1) as incremental,
        line.area(folder / "two", Verify.FULL, 2) as two,
    ):
        sides: dict[str, Callable[[], object]] = {
            "full": line.following(full),
            "incremental": line.following(incremental),
            "two buffers": line.following(two),
            "rewrite": lambda: save_file(tensors, folder / "rewritten.safetensors"),
        }
        for begin in ("full", "incremental", "two buffers", "two buffers", "rewrite"):
            sides[begin]()
        times = in_turns(sides, turns)
        os.sync()
        sides["full"]()
        flush = _flush(folder / "full")
    for side in sides:
        options.say(f"{side:>12}: {times.median(side):.3f} s")
    options.say(f"       flush: {flush:.3f} s, which a staging does not wait for")
    (folder / "rewritten.safetensors").unlink()
    return {
        "one_delta_vs_rewrite": round(1 / times.ratio("full", "rewrite"), 2),
        "one_delta_incremental_vs_rewrite": round(1 / times.ratio("incremental", "rewrite"), 2),
        "two_buffers_vs_rewrite": round(1 / times.ratio("two buffers", "rewrite"), 2),
        "one_delta_s": round(times.median("full"), 3),
        "rewrite_s": round(times.median("rewrite"), 3),
        "flush_vs_one_delta": round(flush / times.median("full"), 2),
    }


def _flush(workdir: Path) -> float:
    """What waiting for the disk would cost after a staging."""
    handle = os.open(workdir / "buffers" / "a" / WEIGHTS_FILE, os.O_RDONLY)
    try:
        return seconds_of(lambda: os.fsync(handle))
    finally:
        os.close(handle)


def _fold(options: Options, folder: Path, line: Line, many: int) -> dict[str, float]:
    """From version 0 to version `many` in one fold, then one more; in place both."""
    taken: dict[str, list[tuple[float, float]]] = {Verify.FULL: [], Verify.INCREMENTAL: []}
    for verify, workdir in ((Verify.FULL, "full"), (Verify.INCREMENTAL, "incremental")):
        with line.area(folder / workdir, verify, 1) as staging:
            for _ in range(1 if options.small else FOLDS):
                line.stage(staging, 0)
                seconds: list[float] = []
                for number in (many, many + 1):
                    os.sync()
                    seconds.append(seconds_of(lambda number=number: line.stage(staging, number)))  # type: ignore[misc]
                options.say(f"{verify:>12}: {many} deltas {seconds[0]:.3f} s, one {seconds[1]:.3f} s")
                taken[verify].append((seconds[0], seconds[1]))
    return {
        "thirty_vs_one": round(statistics.median(thirty / one for thirty, one in taken[Verify.FULL]), 2),
        "thirty_vs_one_incremental": round(statistics.median(thirty / one for thirty, one in taken[Verify.INCREMENTAL]), 2),
        "thirty_s": round(statistics.median(thirty for thirty, _ in taken[Verify.FULL]), 3),
    }
