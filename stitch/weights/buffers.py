"""One staging buffer: a safetensors file on the local disk, and a record of whether it can be trusted.

The record says `dirty` before the first byte changes and `clean` after the last one is on disk, each durably. So whatever crash
comes between, the next start finds known weights or a buffer to rebuild, never a mixture that looks whole.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from stitch.core.errors import CorruptObject
from stitch.core.ids import Digest
from stitch.weights.files import sync_file, write_durably
from stitch.weights.safetensors import WEIGHTS_FILE, TensorFile

STATE_FILE: Final = "buffer.json"
FORMAT: Final = 1
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
        self._contents = self._read()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def contents(self) -> Contents | None:
        """None while it is dirty or empty."""
        return self._contents

    @property
    def size(self) -> int:
        """Of the weights file, in bytes; 0 where there is none."""
        return self.weights.stat().st_size if self.weights.exists() else 0

    def mark_dirty(self) -> None:
        """Before anything in it changes, and where its bytes proved wrong."""
        self._contents = None
        self._write({"state": "dirty"})

    def mark_clean(self, version: str, weights_digest: Digest) -> None:
        """After all of it was written and verified; flushes the weights first."""
        sync_file(self.weights)
        with TensorFile(self.weights) as file:
            contents = Contents(version=version, weights_digest=weights_digest, header=file.header_digest)
        self._write({"state": "clean", **asdict(contents)})
        self._contents = contents

    def check_header(self) -> None:
        """Raises CorruptObject where a clean buffer's header is not what it was, and marks it dirty."""
        if self._contents is None:
            return
        found: str | None = None
        with contextlib.suppress(CorruptObject), TensorFile(self.weights) as file:
            found = file.header_digest
        if found != self._contents.header:
            self.mark_dirty()
            raise CorruptObject(f"buffer {self.name}: the header of {self.weights} is damaged")

    def _write(self, state: dict[str, Any]) -> None:
        write_durably(self.folder / STATE_FILE, json.dumps({"format": FORMAT, **state}).encode())

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


def _is_digest(value: object) -> TypeGuard[Digest]:
    return isinstance(value, str) and _HEX64.match(value) is not None
