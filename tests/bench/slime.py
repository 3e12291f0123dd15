"""Slime's delta directories of recorded AdamW steps: their bytes before and after publishing, and what a replica then holds.

What is staged from the store is held against what the trainer's own loader would have made of the directories.
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import islice
from pathlib import Path

import stitch
from stitch.store.opening import open_store
from stitch.trainer.publisher import Publisher
from stitch.weights.safetensors import open_checkpoint, write_checkpoint
from stitch.weights.staging import Staging
from tests.bench import Options
from tests.bench._steps import Model, tiled
from tests.support import slime_writer as slime

MIB = 1 << 20
STEPS = 6
"""Versions of each encoding: the last one is reached by as many deltas."""


def run(options: Options) -> dict[str, float]:
    ratios = {encoding: _published(options, encoding) for encoding in slime.ENCODINGS}
    return {"size_vs_directory": round(ratios["xor"], 3), "size_vs_overwrite_directory": round(ratios["overwrite"], 3)}


def _published(options: Options, encoding: str) -> float:
    """Bytes of a version's objects / bytes of its directory: the median over versions."""
    base, steps = tiled((32 if options.small else 256) * MIB)
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="stitch-bench-") as name:
        folder = Path(name)
        write_checkpoint(folder / "hf", base)
        log, store = f"sqlite://{folder / 'log.db'}", f"file://{folder / 'store'}"
        loaded = {name: array.tobytes() for name, array in base.items()}
        before: Model = base
        with Publisher.open(policy="p", run="r", log=log, store=store, base=folder / "hf", scratch=folder) as publisher:
            for version, after in enumerate(islice(steps, 2 if options.small else STEPS), start=1):
                directory = slime.write_delta(folder, version, before, after, encoding=encoding)
                size = sum(path.stat().st_size for path in directory.iterdir())
                done = publisher.publish(directory, number=version)
                loaded = slime.load(directory, loaded)
                before = after
                ratios.append(done.bytes_written / size)
                options.say(f"{encoding:>9} {done.ref}: {size / MIB:.2f} MiB, published {done.bytes_written / MIB:.2f} MiB")
        with open_store(store) as blobs, Staging(folder / "replica", blobs) as staging:
            (version,) = (
                v for v in stitch.replay(log).lineage.policy(done.ref.policy).versions.values() if v.ref.number == done.ref.number
            )
            staged = staging.stage(done.ref, version.manifest)
            with open_checkpoint(staged.path) as checkpoint:
                assert {tensor.name for tensor in checkpoint.tensors()} == loaded.keys()
                for tensor in checkpoint.tensors():
                    assert tensor.data == loaded[tensor.name], f"{tensor.name}: not what the trainer's loader makes of it"
    return statistics.median(ratios)
