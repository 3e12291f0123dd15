"""Room on the disk: what is free, what the operator allows, and the refusal that says what is needed."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stitch.core.errors import Rejected
from stitch.core.ids import VersionRef
from stitch.weights.files import held_bytes

SPARE_BYTES: Final = 64 * 1024 * 1024
"""Left free on the disk beyond what staging itself needs: state files, logs, others."""


class NotEnoughSpace(Rejected):
    """The disk, or the budget of it, cannot take the version; the message says what is needed and what there is."""


class Room:
    """The disk below a folder. `budget`: bytes that the folder's files may take in all; None: as many as fit."""

    def __init__(self, root: Path, budget: int | None) -> None:
        self._root, self._budget = root, budget

    def left(self) -> int:
        """Bytes that may be written now; may be negative."""
        free = shutil.disk_usage(self._root).free - SPARE_BYTES
        return free if self._budget is None else min(free, self._budget - held_bytes(self._root))

    def demand(self, target: VersionRef, needed: int, freed: int) -> None:
        """Raises NotEnoughSpace where `needed` bytes do not fit once `freed` bytes have been removed."""
        free = shutil.disk_usage(self._root).free - SPARE_BYTES + freed
        if needed > free:
            raise NotEnoughSpace(
                f"{target}: staging needs {needed} bytes in {self._root} and {SPARE_BYTES} to spare, "
                f"{free + SPARE_BYTES} are free; give it more disk"
            )
        if self._budget is None:
            return
        held = held_bytes(self._root) - freed
        if held + needed > self._budget:
            raise NotEnoughSpace(
                f"{target}: staging needs {needed} bytes beside {held} in {self._root}, the disk budget is {self._budget}; "
                f"raise it to {held + needed}, or stage with a single buffer"
            )


@contextlib.contextmanager
def naming_full_disks(target: VersionRef, root: Path) -> Iterator[None]:
    """Others may fill the disk meanwhile."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotEnoughSpace(f"{target}: the disk of {root} became full while staging: {error}") from error
