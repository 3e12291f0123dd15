"""One staging buffer: a safetensors file on the local disk, a record of what it holds, and whether this process may trust it.

The record says `dirty` before the first byte changes and `clean` after the last one was written and verified. Neither it nor the
weights are flushed to disk, which would make every staging cost the model. That is enough, for two reasons:

- A crash of the process, at any point, loses nothing that it wrote: writes, through the mapping too, are in the kernel's page cache
  at once, and whoever reads the files later reads them there. So the record is as good as the order of the calls, and a buffer
  whose change was begun and not finished is dirty.
- After a loss of power, or a crash of the kernel, the disk holds any part of what was written, in any order: a record may say
  `clean` over bytes that are older or newer than it says, torn, zero, or cut. But no process trusts a buffer that it did not write
  itself: every byte of it is read, and held against the weights digest that is asked for, before an engine may load it or a digest
  is carried on from it. The digest is the manifest's, found by way of the log, so a record that lies does not matter: what it says
  only picks the buffer that is worth reading. Where the bytes are others the buffer is dirty, and built anew.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from stitch.core.errors import CorruptObject
from stitch.core.ids import Digest
from stitch.core.manifest import TensorSpec
from stitch.weights.files import write_whole
from stitch.weights.safetensors import WEIGHTS_FILE, TensorFile

STATE_FILE: Final = "buffer.json"
FORMAT: Final = 1
NAMES: Final = ("a", "b")
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a clean buffer holds. `version` is for people; the digest tells. `header` is blake3 of the file's header, which no
    state digest covers."""

    version: str
    weights_digest: Digest
    header: Digest


class Buffer:
    """The folder of one buffer, made if it is missing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder: Final = folder
        self.weights: Final = folder / WEIGHTS_FILE
        self.tensors: tuple[TensorSpec, ...] | None = None
        """What this process wrote and verified, tensor by tensor; None: an earlier one wrote it, or it is dirty."""
        self.writes = 0
        """How often it was begun to be changed."""
        self._contents = self._read()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def contents(self) -> Contents | None:
        """None while it is dirty or empty."""
        return self._contents

    @property
    def trusted(self) -> bool:
        """Whether this process verified every byte of it, or carried verified bytes on."""
        return self.tensors is not None

    @property
    def size(self) -> int:
        """Of the weights file, in bytes; 0 where there is none."""
        return self.weights.stat().st_size if self.weights.exists() else 0

    def holds(self, digest: Digest) -> bool:
        """Whether it is clean, by its record, and has these weights."""
        return self._contents is not None and self._contents.weights_digest == digest

    def mark_dirty(self) -> None:
        """Before anything in it changes, and where its bytes proved wrong."""
        self._contents = self.tensors = None
        self.writes += 1
        self._write({"state": "dirty"})

    def mark_clean(self, version: str, weights_digest: Digest, tensors: Sequence[TensorSpec], header: Digest) -> None:
        """After all of it was written and verified. Raises CorruptObject where the header is not the one that was written."""
        contents = Contents(version=version, weights_digest=weights_digest, header=header)
        self._check_header(contents)
        self._write({"state": "clean", **asdict(contents)})
        self._contents, self.tensors = contents, tuple(tensors)

    def trust(self, tensors: Sequence[TensorSpec]) -> None:
        """After all of a clean buffer was read and found right."""
        self.tensors = tuple(tensors)

    def check_header(self) -> Digest:
        """The header's digest. Raises CorruptObject where a clean buffer's header is not what it was."""
        assert self._contents is not None
        return self._check_header(self._contents)

    def _check_header(self, contents: Contents) -> Digest:
        found: str | None = None
        with contextlib.suppress(CorruptObject, OSError):
            found = header_digest(self.weights)
        if found != contents.header:
            raise CorruptObject(f"{contents.version}: buffer {self.name}: the header of {self.weights} is damaged")
        return contents.header

    def _write(self, state: dict[str, Any]) -> None:
        write_whole(self.folder / STATE_FILE, json.dumps({"format": FORMAT, **state}).encode())

    def _read(self) -> Contents | None:
        """Anything but a readable record of a clean buffer counts as dirty."""
        try:
            raw = json.loads((self.folder / STATE_FILE).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("state") != "clean":
            return None
        version, digest, header = raw.get("version"), raw.get("weights_digest"), raw.get("header")
        if not isinstance(version, str) or not _is_digest(digest) or not _is_digest(header) or not self.weights.is_file():
            return None
        return Contents(version=version, weights_digest=digest, header=header)


def open_buffers(folder: Path, count: int) -> tuple[Buffer, ...]:
    """One buffer or two. Where there were two and one is wanted, the one that was clean last is kept."""
    buffers = tuple(Buffer(folder / name) for name in NAMES)
    if count == len(NAMES):
        return buffers
    kept = max(buffers, key=lambda buffer: (buffer.contents is not None, _changed_at(buffer.folder / STATE_FILE)))
    for buffer in buffers:
        if buffer is not kept:
            shutil.rmtree(buffer.folder)
    return (kept,)


def header_digest(path: Path) -> Digest:
    """blake3 of a safetensors file's header. Raises CorruptObject, OSError."""
    with TensorFile(path) as file:
        return file.header_digest


def _changed_at(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _is_digest(value: object) -> TypeGuard[Digest]:
    return isinstance(value, str) and _HEX64.match(value) is not None
