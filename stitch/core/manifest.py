"""Manifests: what a version consists of, as one canonical JSON document.

A manifest is found by its key and trusted by its digest, both of which the publication carries. The digest is blake3 over the
uncompressed canonical bytes (RFC 8785), so two writers of the same content write the same bytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, Final

import rfc8785
from blake3 import blake3

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import Digest, Epoch, PolicyId, RunId, StateDigest, VersionNumber, VersionRef

FORMAT: Final = 1
MAX_MANIFEST_BYTES: Final = 256 * 1024 * 1024
"""Bound on an uncompressed manifest: a million tensors of 256 bytes each."""
MAX_FILES: Final = 100_000

_HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_HEX16 = re.compile(r"[0-9a-f]{16}\Z")


class Kind(StrEnum):
    """How the bytes of a version are held."""

    FULL = "full"
    """Every tensor: needs nothing else. Also called an anchor."""
    DELTA = "delta"
    """What changed against a base."""


class Codec(StrEnum):
    """How the weight files are to be read."""

    SAFETENSORS = "safetensors"
    """Safetensors files that hold every tensor once."""
    CHANGED_TENSORS = "changed-tensors/1"
    """Safetensors files that hold each changed tensor whole."""
    SPARSE = "sparse/1"
    """Safetensors files that hold, for each changed tensor, what changed in it (docs/delta-format.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor. `dtype` is safetensors' name of it (BF16, F32, …)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    state: StateDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of the checkpoint directory and the object that holds it. `path` is relative; `size` in bytes."""

    path: str
    key: str
    size: int
    blake3: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRef:
    """Where a manifest lies, what its bytes hash to, and what weights it describes."""

    key: str
    digest: Digest
    weights_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRef:
    """The version that a delta is against, with its manifest: enough to follow a chain without the log."""

    run: RunId
    number: VersionNumber
    manifest: ManifestRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one version consists of.

    `epoch` is None for a base checkpoint, which no claim precedes. `weights` are the files that hold tensors, `files` what is
    carried beside them (configuration, tokenizer). `metadata` is the trainer's own.
    """

    policy: PolicyId
    run: RunId
    number: VersionNumber
    epoch: Epoch | None
    kind: Kind
    codec: Codec
    parent: VersionNumber | None
    base: BaseRef | None
    tensors: tuple[TensorSpec, ...]
    weights_digest: Digest
    weights: tuple[StoredFile, ...]
    files: tuple[StoredFile, ...] = ()
    probes: tuple[Mapping[str, Any], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ref(self) -> VersionRef:
        """The version that it was written for; an alias in another run shares the manifest."""
        return VersionRef(policy=self.policy, run=self.run, number=self.number)

    def __post_init__(self) -> None:
        if (self.base is None) != (self.kind is Kind.FULL):
            raise InvalidRequest(f"manifest.base: a {self.kind} version {'has no' if self.base else 'needs a'} base", field="base")
        if self.weights_digest != weights_digest(self.tensors):
            raise CorruptObject("manifest.weights_digest: does not follow from the tensors")


def weights_digest(tensors: Iterable[TensorSpec]) -> Digest:
    """blake3 of the RFC 8785 JSON of the list of [name, dtype, shape, state], sorted by name."""
    rows: list[Any] = [[t.name, t.dtype, list(t.shape), t.state] for t in sorted(tensors, key=lambda t: t.name)]
    return Digest(blake3(rfc8785.dumps(rows)).hexdigest())


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes."""
    return rfc8785.dumps({"format": FORMAT, **_plain(manifest)})


def manifest_digest(data: bytes) -> Digest:
    """blake3 of a manifest's canonical, uncompressed bytes."""
    return Digest(blake3(data).hexdigest())


def decode_manifest(data: bytes, expect: Digest | None = None) -> Manifest:
    """A manifest from its bytes. Raises CorruptObject where they do not hash to `expect` or are no manifest."""
    if expect is not None and manifest_digest(data) != expect:
        raise CorruptObject(f"manifest: bytes do not match digest {expect[:16]}…")
    try:
        return _parse(json.loads(data, parse_constant=_no_constant))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, InvalidRequest) as error:
        raise CorruptObject(f"manifest: not readable: {error!r}") from error


def _plain(manifest: Manifest) -> dict[str, Any]:
    plain = asdict(manifest)
    for tensor in plain["tensors"]:
        tensor["shape"] = list(tensor["shape"])
    for name in ("tensors", "weights", "files", "probes"):
        plain[name] = list(plain[name])
    plain["metadata"] = dict(plain["metadata"])
    return plain


def _parse(raw: dict[str, Any]) -> Manifest:
    if raw.pop("format") != FORMAT:
        raise CorruptObject("manifest.format: written by a newer release; upgrade this one")
    base = raw["base"]
    weights, files = _files(raw["weights"]), _files(raw["files"])
    twice = [path for path, count in Counter(file.path for file in (*weights, *files)).items() if count > 1]
    if twice:
        raise CorruptObject(f"manifest.files: {twice[0]!r} stands twice")
    return Manifest(
        policy=PolicyId(_text(raw["policy"])),
        run=RunId(_text(raw["run"])),
        number=VersionNumber(_count(raw["number"])),
        epoch=None if raw["epoch"] is None else Epoch(_count(raw["epoch"])),
        kind=Kind(raw["kind"]),
        codec=Codec(raw["codec"]),
        parent=None if raw["parent"] is None else VersionNumber(_count(raw["parent"])),
        base=None
        if base is None
        else BaseRef(
            run=RunId(_text(base["run"])),
            number=VersionNumber(_count(base["number"])),
            manifest=_manifest_ref(base["manifest"]),
        ),
        tensors=_tensors(raw["tensors"]),
        weights_digest=Digest(_hex(raw["weights_digest"], _HEX64)),
        weights=weights,
        files=files,
        probes=tuple(_object(p) for p in _list(raw["probes"])),
        metadata=_object(raw["metadata"]),
    )


def _manifest_ref(raw: dict[str, Any]) -> ManifestRef:
    return ManifestRef(
        key=_text(raw["key"]),
        digest=Digest(_hex(raw["digest"], _HEX64)),
        weights_digest=Digest(_hex(raw["weights_digest"], _HEX64)),
    )


def _tensors(raw: object) -> tuple[TensorSpec, ...]:
    tensors = tuple(
        TensorSpec(
            name=_text(t["name"]),
            dtype=_text(t["dtype"]),
            shape=tuple(_count(n) for n in t["shape"]),
            state=StateDigest(_hex(t["state"], _HEX16)),
        )
        for t in _list(raw)
    )
    if len({t.name for t in tensors}) != len(tensors):
        raise CorruptObject("manifest.tensors: a name stands twice")
    return tensors


def _files(raw: object) -> tuple[StoredFile, ...]:
    rows = _list(raw)
    if len(rows) > MAX_FILES:
        raise CorruptObject(f"manifest.files: more than {MAX_FILES}")
    return tuple(
        StoredFile(
            path=check_relative(_text(f["path"])),
            key=_text(f["key"]),
            size=_count(f["size"]),
            blake3=Digest(_hex(f["blake3"], _HEX64)),
        )
        for f in rows
    )


def check_relative(path: str) -> str:
    """The path itself, if it is relative, canonical and stays inside the directory that it is written to."""
    pure = PurePosixPath(path)
    if not path or "\\" in path or "\0" in path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
        raise CorruptObject(f"manifest: path {path[:200]!r} leaves its directory")
    return path


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {value!r}")
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {value!r}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"expected a whole number, found {value!r}")
    return value


def _hex(value: object, pattern: re.Pattern[str]) -> str:
    text = _text(value)
    if not pattern.match(text):
        raise ValueError(f"expected {pattern.pattern}, found {text[:80]!r}")
    return text
