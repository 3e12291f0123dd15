"""Manifests in a store: keys, compression, verification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from stitch.core.errors import CorruptObject, VersionConflict
from stitch.core.ids import Digest, Epoch, PolicyId, RunId, StateDigest, VersionNumber
from stitch.core.manifest import (
    BaseRef,
    Codec,
    Kind,
    Manifest,
    ManifestRef,
    StoredFile,
    TensorSpec,
    encode_manifest,
    weights_digest,
)
from stitch.store import manifests
from stitch.store.directory import DirectoryStore
from stitch.store.hashing import digest_bytes
from stitch.store.manifests import (
    ZSTD_MAGIC,
    attempt_prefix,
    base_prefix,
    manifest_ref,
    object_key,
    prefix_of,
    read_manifest,
    verify_version,
    write_manifest,
)
from stitch.store.memory import MemoryStore
from stitch.store.port import BlobStore

pytestmark = pytest.mark.unit

POLICY, RUN, EPOCH = PolicyId("p"), RunId("r1"), Epoch(3)
SMALL, LARGE = 2, 1500


def specs(count: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=f"t.{i}", dtype="F32", shape=(i,), state=StateDigest(f"{i:016x}")) for i in range(count))


def stored(store: BlobStore, prefix: str, path: str, data: bytes) -> StoredFile:
    receipt = store.put(object_key(prefix, digest_bytes(data)), data)
    return StoredFile(path=path, key=receipt.key, size=receipt.size, blake3=receipt.blake3)


def full(store: BlobStore, number: int = 7, tensors: int = SMALL, epoch: Epoch | None = EPOCH) -> Manifest:
    described = specs(tensors)
    digest = weights_digest(described)
    version = VersionNumber(number)
    prefix = base_prefix(POLICY, RUN, version, digest) if epoch is None else attempt_prefix(POLICY, RUN, version, epoch)
    return Manifest(
        policy=POLICY,
        run=RUN,
        number=version,
        epoch=epoch,
        kind=Kind.FULL,
        codec=Codec.SAFETENSORS,
        parent=None,
        base=None,
        tensors=described,
        weights_digest=digest,
        weights=(stored(store, prefix, "model.safetensors", b"weights of %d" % number),),
        files=(stored(store, prefix, "config.json", b"{}"),),
    )


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    with MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path / "store") as opened:
        yield opened


def test_keys_are_as_designed() -> None:
    store = MemoryStore()
    digest = Digest("ab" * 32)
    assert attempt_prefix(POLICY, RUN, VersionNumber(7), EPOCH) == "p/r1/7.e3"
    assert base_prefix(POLICY, RUN, VersionNumber(0), digest) == "p/r1/0.base-abababababababab"
    assert object_key("p/r1/7.e3", digest) == f"p/r1/7.e3/{digest}"
    manifest = full(store)
    ref = manifest_ref(manifest)
    assert ref.key == f"p/r1/7.e3.{digest_bytes(encode_manifest(manifest))[:16]}.json"
    base = full(store, 0, epoch=None)
    assert prefix_of(base) == f"p/r1/0.base-{base.weights_digest[:16]}"
    assert manifest_ref(base).key.startswith(f"{prefix_of(base)}.")


@pytest.mark.parametrize("tensors", [0, SMALL, LARGE])
@pytest.mark.parametrize("epoch", [EPOCH, None])
def test_written_is_read_back(store: BlobStore, tensors: int, epoch: Epoch | None) -> None:
    manifest = full(store, tensors=tensors, epoch=epoch)
    ref = write_manifest(store, manifest)
    assert ref == manifest_ref(manifest)
    assert ref.digest == digest_bytes(encode_manifest(manifest))
    assert read_manifest(store, ref) == manifest
    assert write_manifest(store, manifest) == ref
    assert store.get(ref.key, limit=1 << 30).startswith(ZSTD_MAGIC) == (tensors == LARGE)
    assert verify_version(store, ref, deep=True) == manifest


def test_same_content_compressed_otherwise_is_no_conflict(store: BlobStore) -> None:
    manifest = full(store, tensors=LARGE)
    ref = manifest_ref(manifest)
    store.put(ref.key, zstandard.compress(encode_manifest(manifest), 19))
    assert write_manifest(store, manifest) == ref


@pytest.mark.parametrize("tensors", [SMALL, LARGE])
def test_other_content_under_the_key_is_a_conflict(store: BlobStore, tensors: int) -> None:
    manifest = full(store, tensors=tensors)
    store.put(manifest_ref(manifest).key, b"{}")
    with pytest.raises(VersionConflict):
        write_manifest(store, manifest)


def test_wrong_reference_is_refused(store: BlobStore) -> None:
    ref = write_manifest(store, full(store))
    with pytest.raises(CorruptObject, match="weights"):
        read_manifest(store, replace(ref, weights_digest=Digest("0" * 64)))
    with pytest.raises(CorruptObject, match="digest"):
        read_manifest(store, replace(ref, digest=Digest("0" * 64)))
    with pytest.raises(KeyError):
        read_manifest(store, replace(ref, key="p/r1/8.e3.0.json"))


@pytest.mark.parametrize("tensors", [SMALL, LARGE])
def test_every_damaged_byte_is_found(tensors: int) -> None:
    store = MemoryStore()
    ref = write_manifest(store, full(store, tensors=tensors))
    good = store.get(ref.key, limit=1 << 30)
    step = max(1, len(good) // 300)
    spoilt = [good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :] for i in range(0, len(good), step)]
    for bad in [*spoilt, good[:-1], good + b"\0", b"", good + good, ZSTD_MAGIC]:
        store.delete(ref.key)
        store.put(ref.key, bad)
        try:
            found = read_manifest(store, ref)
        except CorruptObject:
            continue
        # Some bits of a zstd frame's header do not bear on its content.
        assert encode_manifest(found) == encode_manifest(full(MemoryStore(), tensors=tensors))


def test_decompression_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 1 << 20)
    store = MemoryStore()
    bomb = zstandard.compress(bytes(1 << 26))
    assert len(bomb) < 1 << 14
    store.put("p/bomb.json", bomb)
    with pytest.raises(CorruptObject, match="more than 1048576 bytes"):
        read_manifest(store, ManifestRef(key="p/bomb.json", digest=Digest("0" * 64), weights_digest=Digest("0" * 64)))


class TestBase:
    """A delta's carried files may stay where its base has them; nothing else is shared."""

    @pytest.fixture
    def base(self, store: BlobStore) -> Manifest:
        manifest = full(store, 6)
        write_manifest(store, manifest)
        return manifest

    def delta(self, store: BlobStore, base: Manifest) -> Manifest:
        made = full(store, 7)
        return replace(
            made,
            kind=Kind.DELTA,
            codec=Codec.CHANGED_TENSORS,
            base=BaseRef(run=RUN, number=base.number, manifest=manifest_ref(base)),
            files=base.files,
        )

    def test_carried_files_of_the_base(self, store: BlobStore, base: Manifest) -> None:
        delta = self.delta(store, base)
        ref = write_manifest(store, delta)
        assert write_manifest(store, delta, base) == ref
        assert verify_version(store, ref, deep=True) == delta

    def test_through_a_chain(self, store: BlobStore, base: Manifest) -> None:
        first = self.delta(store, base)
        write_manifest(store, first)
        made = full(store, 8)
        base_ref = BaseRef(run=RUN, number=first.number, manifest=manifest_ref(first))
        second = replace(made, kind=Kind.DELTA, codec=Codec.CHANGED_TENSORS, base=base_ref, files=first.files)
        assert verify_version(store, write_manifest(store, second)) == second

    def test_nothing_sideways(self, store: BlobStore, base: Manifest) -> None:
        other = full(store, 5)
        for bad in (
            replace(self.delta(store, base), files=other.files),
            replace(self.delta(store, base), weights=base.weights),
            replace(full(store, 7), files=other.files),
            replace(full(store, 7), weights=(replace(other.weights[0], key="p/r1/7.e3/" + "0" * 64),)),
        ):
            with pytest.raises(CorruptObject, match="neither under"):
                write_manifest(store, bad)


def test_missing_and_short_objects_are_named(store: BlobStore) -> None:
    manifest = full(store)
    ref = write_manifest(store, manifest)
    key = manifest.files[0].key
    store.delete(key)
    with pytest.raises(CorruptObject, match=r"r1/weight_v000007: config.json: object .* is missing"):
        verify_version(store, ref)
    store.put(key, b"{ }")
    with pytest.raises(CorruptObject, match=r"config.json: .* has 3 bytes, not 2"):
        verify_version(store, ref)
    store.delete(key)
    store.put(key, b"[]")
    verify_version(store, ref)
    with pytest.raises(CorruptObject, match=r"r1/weight_v000007: config.json"):
        verify_version(store, ref, deep=True)
    store.delete(ref.key)
    with pytest.raises(CorruptObject, match=r"manifest .* is missing"):
        verify_version(store, ref)
