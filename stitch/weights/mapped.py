"""A file mapped into memory to be changed in place."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE, since Linux 5.14; Python has no name for it."""
_libc: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The whole file, writable and shared with whoever reads it. What an error still refers to is unmapped with it."""
    with path.open("r+b") as handle:
        data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_WRITE)
    view = memoryview(data)
    try:
        yield view
    finally:
        view.release()
        with contextlib.suppress(BufferError):
            data.close()


def make_writable(part: memoryview) -> None:
    """Before most pages of a part of a mapped file are written: one call instead of a fault for each page, at a tenth of the cost.

    It marks all of them as changed, written or not. Raises OSError (ENOSPC) where the file system has no room for the change, at
    which a write would end the process. Does nothing where the system does not offer it.
    """
    if _libc is None or not part.nbytes:
        return
    begin: int = np.frombuffer(part, np.uint8).ctypes.data
    before = begin % mmap.PAGESIZE
    if _libc.madvise(ctypes.c_void_p(begin - before), ctypes.c_size_t(part.nbytes + before), _POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() == errno.EFAULT:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """As target[:] = source, but other threads run meanwhile."""
    if source.nbytes:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
