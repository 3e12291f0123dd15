"""A log and a store for one test, with eyes of their own on what was published."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import Any, Final

import numpy as np

from stitch.audit.replay import replay
from stitch.core.events import ChannelPointer, RunVersion
from stitch.core.ids import LATEST, PolicyId, RunId, VersionNumber, VersionRef
from stitch.core.lineage import PolicyLineage
from stitch.core.manifest import Manifest
from stitch.core.pointers import greatest
from stitch.log.events import read
from stitch.log.memory import MemoryLog
from stitch.log.opening import open_log
from stitch.log.port import Stream
from stitch.log.read import read_all
from stitch.store.manifests import read_manifest, verify_version
from stitch.store.opening import open_store
from stitch.trainer.portal import LoopThread
from stitch.trainer.publisher import Publisher
from stitch.weights.safetensors import open_checkpoint
from stitch.weights.staging import Staging

POLICY: Final = PolicyId("p")
PATIENCE: Final = 60.0
"""For an outcome that must come: long, since machines are busy."""

Weights = dict[str, Any]


def weights(seed: int) -> Weights:
    """A small model of which `body` and `head` depend on the seed and `frozen` does not."""
    rng = np.random.default_rng(seed)
    return {
        "body": rng.standard_normal((8, 16)).astype(np.float32),
        "frozen": np.arange(4096, dtype=np.int64),
        "head": rng.standard_normal(7).astype(np.float16),
    }


class Place:
    """URLs for publishers; `log` and `store` are handles of the test's own."""

    def __init__(self, log: str, store: str) -> None:
        self.log_url, self.store_url = log, store

    @classmethod
    def in_memory(cls) -> Place:
        name = f"t{uuid.uuid4().hex}"
        return cls(f"memory://{name}", f"memory://{name}")

    @classmethod
    def on_disk(cls, folder: Path) -> Place:
        return cls(f"sqlite://{folder / 'log.db'}", f"file://{folder / 'store'}")

    def publisher(self, run: str = "r1", **arguments: Any) -> Publisher:
        """Opened with whatever else `Publisher.open` takes."""
        given = {"log": self.log_url, "store": self.store_url, "timeout": PATIENCE, **arguments}
        return Publisher.open(policy=POLICY, run=run, **given)

    def memory_log(self) -> MemoryLog:
        log = open_log(self.log_url)
        assert isinstance(log, MemoryLog)
        return log

    def policy(self) -> PolicyLineage:
        return replay(self.log_url).lineage.policy(POLICY)

    def numbers(self, run: str = "r1") -> list[int]:
        """Of the accepted versions."""
        return sorted(ref.number for ref in self.policy().versions if ref.run == run)

    def manifest(self, number: int, run: str = "r1") -> Manifest:
        version = self.policy().versions[RunVersion(run=RunId(run), number=VersionNumber(number))]
        with open_store(self.store_url) as store:
            return read_manifest(store, version.manifest)

    def read_back(self, number: int, run: str = "r1") -> tuple[Weights, dict[str, bytes]]:
        """What a replica gets: the tensors and the carried files."""
        ref = RunVersion(run=RunId(run), number=VersionNumber(number))
        version = self.policy().versions[ref]
        with (
            tempfile.TemporaryDirectory() as folder,
            open_store(self.store_url) as store,
            Staging(Path(folder), store) as staging,
        ):
            staged = staging.stage(VersionRef(policy=POLICY, run=ref.run, number=ref.number), version.manifest)
            with open_checkpoint(staged.path) as checkpoint:
                tensors = {name: np.array(checkpoint.array(name)) for name in checkpoint.names}
                return tensors, {name: (staged.path / name).read_bytes() for name in checkpoint.carried}

    def check_durable(self) -> None:
        """I1: the bytes of every accepted version are there and right."""
        with open_store(self.store_url) as store:
            for version in self.policy().versions.values():
                verify_version(store, version.manifest, deep=True)

    def check_pointers(self) -> None:
        """`latest` is written as the lineage has it."""
        policy, pointer = self.policy(), self.latest_pointer()
        channel = policy.channels[LATEST]
        if channel.target is None:
            assert pointer is None
        else:
            assert pointer is not None
            assert (pointer.target, pointer.sequence) == (channel.target, channel.sequence)

    def latest_pointer(self) -> ChannelPointer | None:
        async def look() -> ChannelPointer | None:
            async with open_log(self.log_url) as log:
                events = [read(record) for record in await read_all(log, Stream.POINTERS)]
            return greatest(event for event in events if isinstance(event, ChannelPointer) and event.channel == LATEST)

        loop = LoopThread()
        try:
            return loop.call(look)
        finally:
            loop.close()


def same(found: Weights, expected: Weights) -> bool:
    """To the bit: a NaN is itself."""
    return found.keys() == expected.keys() and all(_form(found[name]) == _form(expected[name]) for name in expected)


def _form(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.tobytes()
