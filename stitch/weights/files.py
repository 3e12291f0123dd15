"""Files on a local disk: copied cheaply, written durably, replaced as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

COPY_CHUNK_BYTES: Final = 64 * 1024 * 1024
"""Per system call: long enough to cost nothing, short enough to be interrupted."""
_NOT_OFFERED: Final = frozenset({errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM})
"""What kernels and file systems say that cannot copy by themselves."""


def copy_range(source: int, source_offset: int, target: int, target_offset: int, count: int) -> None:
    """Copies bytes between two open files; the kernel shares or copies them by itself where it can."""
    done = 0
    offered = hasattr(os, "copy_file_range")
    while done < count:
        size = min(COPY_CHUNK_BYTES, count - done)
        copied = 0
        if offered:
            try:
                copied = os.copy_file_range(source, target, size, source_offset + done, target_offset + done)
            except OSError as error:
                if error.errno not in _NOT_OFFERED:
                    raise
            offered = copied > 0
        if not offered:
            copied = _copy_by_hand(source, source_offset + done, target, target_offset + done, size)
        done += copied


def _copy_by_hand(source: int, source_offset: int, target: int, target_offset: int, size: int) -> int:
    data = os.pread(source, size, source_offset)
    if not data:
        raise OSError(errno.EIO, f"the file ended {size} bytes early")
    write_at(target, target_offset, memoryview(data))
    return len(data)


def write_at(target: int, offset: int, data: memoryview) -> None:
    """All of the bytes at an offset of an open file."""
    while data.nbytes:
        written = os.pwrite(target, data, offset)
        data = data[written:]
        offset += written


def copy_file(source: Path, target: Path) -> None:
    """The content of a file into a new one, or over an old one's."""
    with source.open("rb") as reader, target.open("wb") as writer:
        copy_range(reader.fileno(), 0, writer.fileno(), 0, os.fstat(reader.fileno()).st_size)


def sync_file(path: Path) -> None:
    """Flushes a file or a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Replaces the file: whoever reads it, after whatever crash, finds the old content or all of the new."""
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    scratch.replace(path)
    sync_file(path.parent)


def remove(path: Path) -> None:
    """Removes a file or link; none there is no error."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
