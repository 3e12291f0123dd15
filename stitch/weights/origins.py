"""Where a buffer's weights can begin: in shards, downloaded or of a local checkpoint directory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import Digest
from stitch.core.manifest import weights_digest
from stitch.weights.files import COPY_CHUNK_BYTES, copy_range, remove
from stitch.weights.header import format_header, lay_out
from stitch.weights.parallel import Check
from stitch.weights.safetensors import FILE_METADATA, SUFFIX, TensorFile, open_checkpoint
from stitch.weights.verify import read_specs

log = logging.getLogger(__name__)


def merge(shards: Sequence[Path], target: Path, check: Check, *, consume: bool = False) -> None:
    """One file of all tensors of several, shard after shard. `consume` removes each shard once it was copied, so that the disk
    never holds the model twice. Raises CorruptObject naming the tensor that stands in two of them."""
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(TensorFile(shard)) for shard in shards]
        infos = [(file, file.spec(name)) for file in files for name in file.names]
        seen: set[str] = set()
        for file, info in infos:
            if info.name in seen:
                raise CorruptObject(f"{file.path.name}: tensor {info.name!r} is in another shard too")
            seen.add(info.name)
        with target.open("wb") as out:
            out.write(format_header(lay_out((info.name, info.dtype, info.shape) for _, info in infos), FILE_METADATA))
            out.flush()
            position = out.tell()
            for file in files:
                # A shard's tensors follow each other without holes, up to its end, as they do in the target.
                position = _copy_data(file, out.fileno(), position, check)
                if consume:
                    remove(file.path)


def _copy_data(file: TensorFile, target: int, position: int, check: Check) -> int:
    """Copies a file's tensors to a position of the target; returns the position after them."""
    size = sum(info.end - info.begin for info in map(file.spec, file.names))
    begin = file.size - size
    with file.path.open("rb") as source:
        for start in range(0, size, COPY_CHUNK_BYTES):
            check()
            count = min(COPY_CHUNK_BYTES, size - start)
            copy_range(source.fileno(), begin + start, target, position + start, count)
    return position + size


class LocalBase:
    """A checkpoint directory at hand, which may spare a download. Its weights are told by their digest, whatever it is called."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidRequest where it is no directory."""
        if not directory.is_dir():
            raise InvalidRequest(f"base: {directory} is no directory", field="base")
        self._directory = directory
        self._usable = True
        self._digest: Digest | None = None

    @property
    def size(self) -> int:
        """Of its weight files, in bytes."""
        return sum(path.stat().st_size for path in self._directory.glob(f"*{SUFFIX}"))

    def weights_digest(self, threads: int, check: Check) -> Digest | None:
        """Of all its tensors, by a read of every byte that is done once; None where it holds no sound checkpoint."""
        if self._digest is None and self._usable:
            try:
                with open_checkpoint(self._directory) as checkpoint:
                    opened = {file.path: file for file in checkpoint.files.values()}
                    specs = [spec for file in opened.values() for spec in read_specs(file, threads, check)]
                    self._digest = weights_digest(specs)
            except (CorruptObject, InvalidRequest, OSError) as error:
                log.warning("the local base is not used: %s", error)
                self._usable = False
        return self._digest

    def forget(self) -> None:
        """Its files are no longer what they were: they are read again before they are used again."""
        self._digest = None

    def copy_to(self, target: Path, check: Check) -> None:
        """All its tensors as one file."""
        with open_checkpoint(self._directory) as checkpoint:
            shards = [self._directory / name for name in checkpoint.weights]
        merge(shards, target, check)
