"""Files on a local disk: copied cheaply, replaced as a whole, counted."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
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


def copy_file(source: Path, target: Path, check: Callable[[], None] = lambda: None) -> None:
    """The content of a file into a new one, or over an old one's. `check` is called between chunks and raises to stop."""
    with source.open("rb") as reader, target.open("wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        for start in range(0, size, COPY_CHUNK_BYTES):
            check()
            copy_range(reader.fileno(), start, writer.fileno(), start, min(COPY_CHUNK_BYTES, size - start))


def write_whole(path: Path, data: bytes) -> None:
    """Replaces the file at once: whoever reads it, also after a crash of this process, finds the old content or all of the new.

    Nothing is flushed: after a loss of power it may be either, or damaged.
    """
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_bytes(data)
    scratch.replace(path)


def remove(path: Path) -> None:
    """Removes a file or link; none there is no error."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def held_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; what links lead to is not counted."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
