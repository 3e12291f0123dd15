"""One staging buffer: a safetensors file on the local disk, and a record of whether it can be trusted.

The record says `dirty` before the first byte changes and `clean` after the last one is on disk, each durably. So whatever crash
comes between, the next start finds known weights or a buffer to rebuild, never a mixture that looks whole.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stitch.core.ids import Digest
from stitch.weights.files import sync_file, write_durably
from stitch.weights.safetensors import WEIGHTS_FILE

STATE_FILE: Final = "buffer.json"
FORMAT: Final = 1
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a clean buffer holds. `version` is for people; the digest tells."""

    version: str
    weights_digest: Digest


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

    def mark_clean(self, contents: Contents) -> None:
        """After all of it was written and verified; flushes the weights first."""
        sync_file(self.weights)
        self._write({"state": "clean", "version": contents.version, "weights_digest": contents.weights_digest})
        self._contents = contents

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
        version, digest = raw.get("version"), raw.get("weights_digest")
        if not isinstance(version, str) or not isinstance(digest, str) or not _HEX64.match(digest) or not self.weights.is_file():
            return None
        return Contents(version=version, weights_digest=Digest(digest))
