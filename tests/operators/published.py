"""Versions in a store with the decisions that make them count, of every form that there is; for tests of what operators do."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from stitch.core.events import AnchorAdded, Decision, RunClaimed, RunVersion, VersionPublished, VersionRetired
from stitch.core.ids import EventId, Offset, PolicyId, RunId, VersionNumber, WriterId
from stitch.core.lineage import Lineage, PolicyLineage, Position, Verdict, Version
from stitch.core.lineage import apply as fold
from stitch.core.manifest import BaseRef, Codec, Kind, Manifest, ManifestRef, StoredFile
from stitch.log.events import append
from stitch.log.opening import open_log
from stitch.store.manifests import attempt_prefix, object_key, read_manifest, write_manifest
from stitch.store.opening import open_store
from stitch.store.port import BlobStore
from stitch.weights import sparse
from stitch.weights.encode import DELTA_FILE, Encoded, LocalFile, encode_delta, encode_full
from stitch.weights.host import HostTensor, host_tensor, host_tensors
from stitch.weights.safetensors import DEFAULT_SHARD_BYTES, TensorSpool
from tests.support.commands import Said, command

POLICY = PolicyId("p")
CONFIG = b'{"model_type": "tiny"}\n'
Weights = dict[str, np.ndarray[Any, Any]]


def model(seed: int = 0) -> Weights:
    """Several dtypes, an odd number of bytes, an empty tensor and a scalar."""
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.standard_normal((48, 16)).astype(ml_dtypes.bfloat16),
        "layers.0.weight": rng.standard_normal((16, 33)).astype(ml_dtypes.bfloat16),
        "layers.1.weight": rng.standard_normal((16, 33)).astype(np.float32),
        "mask": rng.integers(0, 2, 13).astype(np.bool_),
        "empty": np.zeros((0, 4), np.float32),
        "scale": np.array(rng.standard_normal(), np.float32),
    }


def stepped(weights: Weights, share: float = 0.05, *, seed: int = 1) -> Weights:
    """The same after a training step: a share of the bf16 values moved to a neighbouring number."""
    rng = np.random.default_rng(seed)
    out = dict(weights)
    for name, array in weights.items():
        if array.dtype == ml_dtypes.bfloat16:
            units = array.view(np.uint16).copy()
            where = rng.random(units.shape) < share
            where.reshape(-1)[0] = True
            out[name] = (units + where.astype(np.uint16)).view(ml_dtypes.bfloat16)
    return out


class Published:
    """The versions of one policy. Each method makes the next decision, which must count."""

    def __init__(self, store: BlobStore, run: str = "r1") -> None:
        self.store = store
        self.lineage = Lineage()
        self.decisions: list[Decision] = []
        self.claim(run)

    @property
    def policy(self) -> PolicyLineage:
        return self.lineage.policy(POLICY)

    def version(self, number: int, run: str | None = None) -> Version:
        owner = self.policy.owner
        assert owner is not None
        return self.policy.versions[RunVersion(run=RunId(run) if run else owner.run, number=VersionNumber(number))]

    def manifest(self, number: int, run: str | None = None) -> Manifest:
        return read_manifest(self.store, self.version(number, run).manifest)

    def claim(self, run: str, *, alias: RunVersion | None = None) -> None:
        boot = None if alias is None else VersionNumber(0)
        self._decide(
            RunClaimed(
                policy=POLICY,
                run=RunId(run),
                event_id=self._id(),
                writer=WriterId("w"),
                expected_head=self.policy.head,
                boot=boot,
                alias=alias,
            )
        )

    def full(self, weights: Weights, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            self._publish(encode_full(weights, Path(scratch), max_shard_bytes=max_shard_bytes))

    def changed(self, weights: Weights) -> None:
        """A delta that holds changed tensors whole."""
        with tempfile.TemporaryDirectory() as scratch:
            self._publish(encode_delta(weights, self._tip().tensors, Path(scratch)))

    def sparse(self, old: Weights, new: Weights, *, width: int | None = None) -> None:
        """A delta that holds what changed in each tensor, by units of `width` bytes (default: the tensor's own)."""
        base = self._tip()
        states = {spec.name: spec.state for spec in base.tensors}
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / DELTA_FILE
            with TensorSpool(path) as spool:
                for tensor in host_tensors(new):
                    packed = sparse.encode(
                        host_tensor(tensor.name, old[tensor.name]).data,
                        tensor.data,
                        width=width or sparse.unit_bytes(tensor.dtype),
                        state=states[tensor.name],
                    )
                    if packed is not None:
                        blob = memoryview(packed.blob)
                        spool.write(HostTensor(name=tensor.name, dtype="U8", shape=(blob.nbytes,), data=blob))
                spool.finish()
            with tempfile.TemporaryDirectory() as other:
                like = encode_delta(new, base.tensors, Path(other))
            files = (LocalFile(path=DELTA_FILE, source=path),)
            self._publish(replace(like, codec=Codec.SPARSE, weights=files, complete=False))

    def anchor(self, number: int, weights: Weights) -> None:
        """Adds a full form, as a compactor does."""
        version = self.version(number)
        with tempfile.TemporaryDirectory() as scratch:
            encoded = encode_full(weights, Path(scratch))
            manifest, size = self._write(encoded, version.ref, None)
        self._decide(
            AnchorAdded(
                policy=POLICY,
                version=version.ref,
                event_id=self._id(),
                writer=WriterId("w"),
                epoch=self.policy.epoch,
                manifest=manifest,
                size=size,
            )
        )

    def retire(self, number: int) -> None:
        self._decide(VersionRetired(policy=POLICY, version=self.version(number).ref, event_id=self._id(), writer=WriterId("w")))

    async def write_log(self, url: str) -> None:
        """All decisions, to a log that is made for it."""
        async with open_log(url) as log:
            await log.setup(create=True)
            for decision in self.decisions:
                await append(log, decision, source="test")

    def keys(self, number: int) -> list[str]:
        """Of a version's own objects, its manifests first."""
        version = self.version(number)
        manifests = [ref for ref in (version.manifest, version.anchor) if ref is not None]
        files = [file.key for ref in manifests for file in self._files(ref)]
        return list(dict.fromkeys([*(ref.key for ref in manifests), *files]))

    def _files(self, ref: ManifestRef) -> tuple[StoredFile, ...]:
        manifest = read_manifest(self.store, ref)
        return (*manifest.weights, *manifest.files)

    def _tip(self) -> Manifest:
        assert self.policy.tip is not None
        return self.manifest(self.policy.tip.number)

    def _publish(self, encoded: Encoded) -> None:
        policy = self.policy
        assert policy.owner is not None
        greatest = policy.greatest(policy.owner.run)
        ref = RunVersion(run=policy.owner.run, number=VersionNumber(0 if greatest is None else greatest + 1))
        base = None if encoded.kind is Kind.FULL else policy.tip
        manifest, size = self._write(encoded, ref, base)
        assert policy.head is not None
        self._decide(
            VersionPublished(
                policy=POLICY,
                run=ref.run,
                number=ref.number,
                event_id=self._id(),
                writer=WriterId("w"),
                epoch=policy.epoch,
                expected_head=policy.head,
                parent=policy.tip.number if policy.tip else None,
                kind=encoded.kind,
                base=base,
                manifest=manifest,
                size=size,
            )
        )

    def _write(self, encoded: Encoded, ref: RunVersion, base: RunVersion | None) -> tuple[ManifestRef, int]:
        prefix = attempt_prefix(POLICY, ref.run, ref.number, self.policy.epoch)
        config = self._put(prefix, "config.json", CONFIG)
        manifest = Manifest(
            policy=POLICY,
            run=ref.run,
            number=ref.number,
            epoch=self.policy.epoch,
            kind=encoded.kind,
            codec=encoded.codec,
            parent=None,
            base=None if base is None else BaseRef(run=base.run, number=base.number, manifest=self.policy.versions[base].manifest),
            tensors=encoded.tensors,
            weights_digest=encoded.weights_digest,
            weights=tuple(self._put(prefix, file.path, file.source.read_bytes()) for file in encoded.weights),
            files=(config,),
        )
        return write_manifest(self.store, manifest), sum(file.size for file in manifest.weights)

    def _put(self, prefix: str, path: str, data: bytes) -> StoredFile:
        receipt = self.store.put_named(lambda digest: object_key(prefix, digest), data)
        return StoredFile(path=path, key=receipt.key, size=receipt.size, blake3=receipt.blake3)

    def _id(self) -> EventId:
        return EventId(f"e{len(self.decisions)}")

    def _decide(self, decision: Decision) -> None:
        at = Position(offset=Offset(len(self.decisions)), time_ms=0)
        self.lineage, verdict = fold(self.lineage, decision, at)
        assert verdict is Verdict.ACCEPTED, verdict
        self.decisions.append(decision)


def line_of_four(store: BlobStore) -> tuple[Published, list[Weights]]:
    """Full, sparse delta, changed-tensors delta, sparse delta."""
    made = Published(store)
    weights = [model()]
    for seed in (1, 2, 3):
        weights.append(stepped(weights[-1], seed=seed))
    weights[2]["layers.1.weight"] = model(7)["layers.1.weight"]
    weights[3]["layers.1.weight"] = weights[2]["layers.1.weight"]
    made.full(weights[0])
    made.sparse(weights[0], weights[1])
    made.changed(weights[2])
    made.sparse(weights[2], weights[3])
    return made, weights


class Place:
    """Four versions of all forms behind URLs, as `line_of_four` makes them, for commands."""

    def __init__(self, log_url: str, store_url: str) -> None:
        self.store_url = store_url
        self.store = open_store(store_url)
        self.made, self.weights = line_of_four(self.store)
        self.rewrite_log(log_url)

    def rewrite_log(self, log_url: str) -> None:
        """All decisions so far, into a log that is new."""
        asyncio.run(self.made.write_log(log_url))
        self.options = ("--log", log_url, "--store", self.store_url, "--policy", POLICY)

    @classmethod
    def on_disk(cls, folder: Path) -> Place:
        return cls(f"sqlite://{folder / 'log.db'}", f"file://{folder / 'store'}")

    def command(self, *arguments: object) -> Said:
        """`stitch ARGUMENTS` with the place's log, store and policy."""
        return command(*arguments, *self.options)

    def spoil(self, key: str) -> None:
        """Flips a bit in the middle of an object."""
        data = bytearray(self.store.get(key, limit=1 << 30))
        data[len(data) // 2] ^= 4
        self.store.delete(key)
        self.store.put(key, bytes(data))
