"""Where versions lie in a store, and how their manifests are written, read and verified.

    <policy>/<run>/<number>.e<epoch>/<blake3>                     objects of one attempt at a version
    <policy>/<run>/<number>.e<epoch>.<digest16>.json              its manifest
    <policy>/<run>/<number>.base-<weights16>/<blake3>             objects of a base checkpoint, which no epoch precedes
    <policy>/<run>/<number>.base-<weights16>.<digest16>.json      its manifest

`digest16` is the start of the manifest's own digest, so other content never meets the same key. A large manifest is stored as
one zstd frame, which its first bytes tell. Carried files that did not change since the base stay where the base has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import zstandard

from stitch.core.errors import CorruptObject, VersionConflict
from stitch.core.ids import Digest, Epoch, PolicyId, RunId, VersionNumber
from stitch.core.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestRef,
    StoredFile,
    decode_manifest,
    encode_manifest,
    manifest_digest,
)
from stitch.store.port import BlobStore, Receipt
from stitch.store.scratch import scratch_folder

COMPRESS_ABOVE_BYTES: Final = 64 * 1024
"""Below it a manifest stays readable to the eye; above it, names and shapes shrink about tenfold."""
COMPRESSION_LEVEL: Final = 3
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
KEY_DIGITS: Final = 16
"""Of a digest, in keys: enough to tell attempts apart; the whole digest is checked on reading."""


def attempt_prefix(policy: PolicyId, run: RunId, number: VersionNumber, epoch: Epoch) -> str:
    """What the keys of one attempt's objects begin with; no slash at the end."""
    return f"{policy}/{run}/{number}.e{epoch}"


def base_prefix(policy: PolicyId, run: RunId, number: VersionNumber, weights: Digest) -> str:
    """The same for a base checkpoint, which is told by its weights digest."""
    return f"{policy}/{run}/{number}.base-{weights[:KEY_DIGITS]}"


def prefix_of(manifest: Manifest) -> str:
    """The prefix of the manifest's own attempt: every object that it names lies under it."""
    if manifest.epoch is None:
        return base_prefix(manifest.policy, manifest.run, manifest.number, manifest.weights_digest)
    return attempt_prefix(manifest.policy, manifest.run, manifest.number, manifest.epoch)


def object_key(prefix: str, blake3: Digest) -> str:
    """The key of an object under an attempt's prefix."""
    return f"{prefix}/{blake3}"


def manifest_key(prefix: str, digest: Digest) -> str:
    """The key of an attempt's manifest, by the manifest's digest."""
    return f"{prefix}.{digest[:KEY_DIGITS]}.json"


def manifest_ref(manifest: Manifest) -> ManifestRef:
    """Where `write_manifest` puts it, and its digests."""
    return _ref(manifest, encode_manifest(manifest))


def receipt(file: StoredFile) -> Receipt:
    """What the store must hold for a file of a manifest."""
    return Receipt(key=file.key, size=file.size, blake3=file.blake3)


def write_manifest(store: BlobStore, manifest: Manifest, base: Manifest | None = None) -> ManifestRef:
    """Writes the manifest, durably on return. Again with the same content is no error.

    `base` is its base's manifest, read where it is needed and not given. Raises CorruptObject where the manifest names an
    object that is neither of its own attempt nor of its base's manifest, VersionConflict where the key holds other content.
    """
    _check_keys(store, manifest, base)
    data = encode_manifest(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptObject(f"manifest of {manifest.ref}: {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are readable")
    ref = _ref(manifest, data)
    body = zstandard.compress(data, COMPRESSION_LEVEL) if len(data) > COMPRESS_ABOVE_BYTES else data
    try:
        store.put(ref.key, body)
    except VersionConflict:
        # Another release of zstd may have written the same content as other bytes.
        try:
            read_manifest(store, ref)
        except CorruptObject as error:
            raise VersionConflict(f"manifest of {manifest.ref}: {ref.key} holds other content") from error
    return ref


def read_manifest(store: BlobStore, ref: ManifestRef) -> Manifest:
    """The manifest, verified against both digests of the reference.

    Raises KeyError where there is none, CorruptObject where it is damaged, not the one referred to, or too large.
    """
    stored = store.get(ref.key, limit=MAX_MANIFEST_BYTES)
    data = _decompress(stored, ref.key) if stored.startswith(ZSTD_MAGIC) else stored
    try:
        manifest = decode_manifest(data, ref.digest)
    except CorruptObject as error:
        raise CorruptObject(f"{ref.key}: {error}") from error
    if manifest.weights_digest != ref.weights_digest:
        raise CorruptObject(f"{ref.key}: describes weights {manifest.weights_digest}, not {ref.weights_digest}")
    return manifest


def verify_version(store: BlobStore, ref: ManifestRef, *, deep: bool = False) -> Manifest:
    """Checks that the manifest and all objects that it names are there, with the right sizes; `deep` reads and hashes them.

    Does not follow the chain: a delta's base is a version of its own. Raises CorruptObject naming the version and the file.
    """
    try:
        manifest = read_manifest(store, ref)
    except KeyError:
        raise CorruptObject(f"manifest {ref.key} is missing") from None
    _check_keys(store, manifest, None, written=True)
    for file in (*manifest.weights, *manifest.files):
        entry = store.stat(file.key)
        if entry is None:
            raise CorruptObject(f"{manifest.ref}: {file.path}: object {file.key} is missing")
        if entry.size != file.size:
            raise CorruptObject(f"{manifest.ref}: {file.path}: object {file.key} has {entry.size} bytes, not {file.size}")
    if deep:
        _hash_all(store, manifest, (*manifest.weights, *manifest.files))
    return manifest


def _hash_all(store: BlobStore, manifest: Manifest, files: Iterable[StoredFile]) -> None:
    with scratch_folder("verify") as scratch:
        path = scratch / "object"
        for file in files:
            try:
                store.download(receipt(file), path)
            except CorruptObject as error:
                raise CorruptObject(f"{manifest.ref}: {file.path}: {error}") from error
            path.unlink(missing_ok=True)


def _ref(manifest: Manifest, data: bytes) -> ManifestRef:
    digest = manifest_digest(data)
    return ManifestRef(key=manifest_key(prefix_of(manifest), digest), digest=digest, weights_digest=manifest.weights_digest)


def _check_keys(store: BlobStore, manifest: Manifest, base: Manifest | None, *, written: bool = False) -> None:
    """Nothing is shared sideways: an object goes when the last version that names it, or builds on it, goes.

    Of one that was `written`, the base may be gone: its version has an anchor since, and the base was retired.
    """
    prefix = prefix_of(manifest)
    inherited = [file for file in manifest.files if file.key != object_key(prefix, file.blake3)]
    if inherited and base is None and manifest.base is not None:
        try:
            base = read_manifest(store, manifest.base.manifest)
        except KeyError:
            if not written:
                raise
            inherited = []
    offered = {(file.key, file.size, file.blake3) for file in base.files} if base is not None else set()
    strays = [file for file in inherited if (file.key, file.size, file.blake3) not in offered]
    strays += [file for file in manifest.weights if file.key != object_key(prefix, file.blake3)]
    if strays:
        raise CorruptObject(
            f"manifest of {manifest.ref}: {strays[0].path}: object {strays[0].key!r} is neither under {prefix}/ nor its base's"
        )


def _decompress(stored: bytes, key: str) -> bytes:
    """One frame of bounded size; what it claims about its size is not believed."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    data = bytearray()
    window = memoryview(stored)
    try:
        while window and not decoder.eof:
            data += decoder.decompress(window[:COMPRESS_ABOVE_BYTES])
            window = window[COMPRESS_ABOVE_BYTES:]
            if len(data) > MAX_MANIFEST_BYTES:
                raise CorruptObject(f"{key}: more than {MAX_MANIFEST_BYTES} bytes when decompressed")
    except zstandard.ZstdError as error:
        raise CorruptObject(f"{key}: not decompressible: {error}") from error
    if not decoder.eof or decoder.unused_data or window:
        raise CorruptObject(f"{key}: {'ends early' if not decoder.eof else 'bytes after its end'}")
    return bytes(data)
