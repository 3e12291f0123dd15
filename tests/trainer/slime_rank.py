"""One rank of a trainer that calls the hook as Slime does. Arguments: folder, rank, ranks. Writes what it was told to rank-N.json.

Rank 0 alone makes the baseline call, while the others wait at a barrier. Then: two deltas; one of which a shard is cut short, and
then mended; one while rank 1 cannot reach the store, and then can; a full version, and one that lacks a tensor; and one for which
rank 0 is told a run that is none.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from stitch.core.errors import StitchError
from stitch.store.faulty import ALWAYS, Fault, Kind
from stitch.trainer import slime
from tests.support import slime_writer as writer
from tests.trainer.slime_model import fail_by, model, smaller

PATIENCE = timedelta(seconds=100)


def main(folder: Path, rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=ranks, timeout=PATIENCE)
    args = SimpleNamespace(hf_checkpoint=str(folder / "hf"))
    updates = folder / "updates"
    told: list[str] = []
    faults = fail_by(pytest.MonkeyPatch())

    def publish(version: int) -> None:
        dist.barrier()
        try:
            slime.publish(args, str(writer.version_directory(updates, version)), [])
            told.append("published")
        except StitchError as error:
            told.append(f"{type(error).__name__}: {error}")
        dist.barrier()

    def write(version: int) -> None:
        if rank == 0:
            writer.write_delta(updates, version, model(version - 1), model(version), shards=3)

    if rank == 0:
        slime.publish(args, str(updates), [])
    for version in (1, 2):
        write(version)
        publish(version)

    write(3)
    shard = writer.version_directory(updates, 3) / "model-00000-of-00002.safetensors"
    dist.barrier()
    content = shard.read_bytes()
    dist.barrier()
    if rank == 0:
        shard.write_bytes(content[:-1])
    publish(3)
    if rank == 0:
        shard.write_bytes(content)
    publish(3)

    slime.close()
    os.environ["STITCH_PUBLISH_TIMEOUT"] = "2"
    write(4)
    if rank == 1:
        faults.append(Fault(call="put", kind=Kind.FAIL_BEFORE, times=ALWAYS))
    publish(4)
    faults.clear()
    slime.close()
    os.environ["STITCH_PUBLISH_TIMEOUT"] = "100"
    publish(4)

    if rank == 0:
        writer.write_full(updates, 5, model(5))
        writer.write_full(updates, 6, smaller(6))
    publish(5)
    publish(6)

    slime.close()
    os.environ["STITCH_RUN"] = "No Name" if rank == 0 else ""
    publish(7)
    told.append(f"rank {dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
