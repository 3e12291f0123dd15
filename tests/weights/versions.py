"""Versions of a small model in a store, written as a publisher would."""

from __future__ import annotations

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from blake3 import blake3

from stitch.core.ids import Digest, Epoch, PolicyId, RunId, VersionNumber, VersionRef
from stitch.core.manifest import BaseRef, Manifest, ManifestRef, StoredFile
from stitch.store.manifests import attempt_prefix, object_key, write_manifest
from stitch.store.port import BlobStore
from stitch.weights.encode import Encoded, LocalFile, encode_delta, encode_full, encode_sparse
from stitch.weights.safetensors import DEFAULT_SHARD_BYTES, open_checkpoint
from stitch.weights.tensors import host_tensor

POLICY = PolicyId("p")
RUN = RunId("r1")
CONFIG = b'{"model_type": "tiny"}'

Weights = dict[str, np.ndarray]


def model(seed: int = 0) -> Weights:
    """Several dtypes and shapes, an odd number of bytes, an empty tensor and a scalar."""
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.standard_normal((64, 16)).astype(ml_dtypes.bfloat16),
        "layer.0": rng.standard_normal((16, 33)).astype(ml_dtypes.bfloat16),
        "layer.1": rng.standard_normal((16, 33)).astype(np.float32),
        "mask": rng.integers(0, 2, 13).astype(np.bool_),
        "empty": np.zeros((0, 4), np.float32),
        "scale": np.array(rng.standard_normal(), np.float32),
    }


def changed(weights: Weights, *names: str, seed: int = 1) -> Weights:
    """The same with other values in some tensors."""
    rng = np.random.default_rng(seed)
    out = dict(weights)
    for name in names:
        out[name] = np.asarray(rng.standard_normal(weights[name].shape)).astype(weights[name].dtype)
    return out


class Line:
    """The versions of one run: `full`, `delta` (changed tensors, whole) and `sparse` publish the next one."""

    def __init__(self, store: BlobStore, run: RunId = RUN) -> None:
        self.store = store
        self.run = run
        self.refs: dict[int, ManifestRef] = {}
        self.manifests: dict[int, Manifest] = {}
        self._weights: dict[int, Weights] = {}

    def ref(self, number: int) -> VersionRef:
        return VersionRef(policy=POLICY, run=self.run, number=VersionNumber(number))

    def full(self, number: int, weights: Weights, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES, config: bytes = CONFIG) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            encoded = encode_full(weights, Path(scratch), max_shard_bytes=max_shard_bytes)
            self._publish(number, encoded, None, config)
        self._weights[number] = dict(weights)

    def delta(self, number: int, base: int, weights: Weights, *, config: bytes = CONFIG) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            encoded = encode_delta(weights, self.manifests[base].tensors, Path(scratch))
            self._publish(number, encoded, self._base(base), config)
        self._weights[number] = dict(weights)

    def sparse(self, number: int, base: int, weights: Weights, *, config: bytes = CONFIG) -> None:
        old = self._weights[base]
        with tempfile.TemporaryDirectory() as scratch:
            encoded = encode_sparse(
                weights, self.manifests[base].tensors, lambda spec: host_tensor(spec.name, old[spec.name]), Path(scratch)
            )
            self._publish(number, encoded, self._base(base), config)
        self._weights[number] = dict(weights)

    def _base(self, number: int) -> BaseRef:
        return BaseRef(run=self.run, number=VersionNumber(number), manifest=self.refs[number])

    def _publish(self, number: int, encoded: Encoded, base: BaseRef | None, config: bytes) -> None:
        prefix = attempt_prefix(POLICY, self.run, VersionNumber(number), Epoch(1))
        manifest = Manifest(
            policy=POLICY,
            run=self.run,
            number=VersionNumber(number),
            epoch=Epoch(1),
            kind=encoded.kind,
            codec=encoded.codec,
            parent=None if base is None else base.number,
            base=base,
            tensors=encoded.tensors,
            weights_digest=encoded.weights_digest,
            weights=tuple(self._upload(prefix, file) for file in encoded.weights),
            files=(self._upload_bytes(prefix, "config.json", config),),
        )
        self.manifests[number] = manifest
        self.refs[number] = write_manifest(self.store, manifest)

    def _upload(self, prefix: str, file: LocalFile) -> StoredFile:
        return self._upload_bytes(prefix, file.path, file.source.read_bytes())

    def _upload_bytes(self, prefix: str, path: str, data: bytes) -> StoredFile:
        digest = Digest(blake3(data).hexdigest())
        receipt = self.store.put(object_key(prefix, digest), data)
        return StoredFile(path=path, key=receipt.key, size=receipt.size, blake3=receipt.blake3)


def loaded(path: Path) -> Weights:
    """What an engine would load from a folder."""
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.array(name).copy() for name in checkpoint.names}


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
