"""The buffers of a staging area, the one that an engine was loaded from, and the folders that lead to them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stitch.core.errors import CorruptObject
from stitch.core.ids import Digest, VersionRef
from stitch.core.manifest import StoredFile
from stitch.weights.buffers import Buffer, open_buffers
from stitch.weights.files import remove
from stitch.weights.folders import StagedFolders

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version ready to be loaded. `path` is a checkpoint folder unique to run and number; it lasts until its buffer is staged
    into again, and for as long as it is the active one of two buffers."""

    path: Path
    ref: VersionRef
    weights_digest: Digest
    buffer: str
    files: tuple[StoredFile, ...]
    bytes_downloaded: int
    seconds: float


class Shelf:
    """One buffer or two. Nothing here is locked: one caller at a time changes it."""

    def __init__(self, root: Path, count: int) -> None:
        self.buffers: Final = open_buffers(root / "buffers", count)
        self.folders: Final = StagedFolders(root / "staged")
        self.active: Staged | None = None
        self.damages = 0
        """How often a buffer proved damaged."""

    @property
    def single(self) -> bool:
        return len(self.buffers) == 1

    def holding(self, digest: Digest) -> Buffer | None:
        """A clean buffer with these weights, the active one first."""
        return max((buffer for buffer in self.buffers if buffer.holds(digest)), key=self.is_active, default=None)

    def is_active(self, buffer: Buffer) -> bool:
        return self.active is not None and self.active.buffer == buffer.name

    def writable(self, buffer: Buffer) -> bool:
        """Whether it may be changed: the active one only where there is no other."""
        return self.single or not self.is_active(buffer)

    def free(self) -> Buffer:
        """One that may be built anew, rather one that holds nothing."""
        return min(filter(self.writable, self.buffers), key=lambda buffer: buffer.contents is not None)

    def change(self, buffer: Buffer) -> None:
        """Before a buffer is changed: from here on nobody may take it for what it was."""
        buffer.mark_dirty()
        self.folders.withdraw(buffer.weights)
        if self.is_active(buffer):
            self.active = None

    def discard(self, buffer: Buffer) -> None:
        """Empties a buffer."""
        self.change(buffer)
        remove(buffer.weights)

    def give_up(self, buffer: Buffer, error: CorruptObject) -> None:
        """Its bytes proved wrong: they are never used again."""
        self.damages += 1
        log.error("%s is damaged, and is built anew: %s", buffer.folder, error)
        self.change(buffer)
