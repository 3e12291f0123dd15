"""Which loops digest and sparse codec run on: numba's where they are compiled, numpy's until then. The bytes are the same.

numba (the extra `fast`) takes a second to import and five to compile these loops, then half a second to load them again: it keeps
what it compiled beside the modules, in the user's cache folder, or in NUMBA_CACHE_DIR, whichever can be written; with no such place
it compiles at every start. None of it happens where someone waits: `warm` starts it in the background, and so does enough work
done in numpy. The environment variable STITCH_NUMBA=0 turns it off.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stitch.weights.sparse_format import Bytes, Chunk, Part
    from stitch.weights.sparse_numpy import Found

SWITCH: Final = "STITCH_NUMBA"
WARM_AFTER_BYTES: Final = 1 << 30
"""So much work in numpy has cost about as much time as numba's start would."""
_EXIT_PATIENCE_S: Final = 10.0
"""Longer than importing numba takes; a process that ends while it does must not tear it down half-way."""

_log = logging.getLogger(__name__)


class Kernels(Protocol):
    """The loops, as `sparse_numpy` documents them."""

    def find(self, old: Bytes, new: Bytes, width: int, first_word: int) -> tuple[Found, int]: ...
    def gaps_of(self, positions: np.ndarray[Any, np.dtype[np.uint32]]) -> Bytes: ...
    def differences(self, found: Found, width: int) -> tuple[Bytes, Bytes, Bytes]: ...
    def check(self, chunk: Chunk, width: int, units: int) -> bool: ...
    def apply_sparse(self, target: Bytes, chunk: Chunk, width: int, first_word: int) -> int: ...
    def fold(self, target: Bytes, parts: Sequence[Part], width: int) -> int: ...


class Fast(Kernels, Protocol):
    """numba's, which have one for the whole state digest too."""

    def word_sum(self, data: Bytes, first_word: int) -> int: ...


class _Warming:
    """What this process knows of numba."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.fast: Fast | None = None
        self.numpy_bytes = 0


_state: Final = _Warming()
ending: Final = threading.Event()
"""Set when the process ends: what is being compiled stops at the next loop."""


def enabled() -> bool:
    """Whether numba may be used: not where it is switched off, nor on a big-endian machine, whose words its loops cannot read."""
    return os.environ.get(SWITCH, "1") != "0" and sys.byteorder == "little"


def warm(*, wait: bool = False) -> bool:
    """Starts numba in a daemon thread, once; returns whether it is ready. With `wait`, not before that is decided.

    Worth calling at the start of a long-lived process; never required.
    """
    if not enabled():
        return False
    with _state.lock:
        if _state.thread is None:
            _state.thread = threading.Thread(target=_start, name="stitch-warm", daemon=True)
            atexit.register(_end)
            _state.thread.start()
    if wait:
        _state.thread.join()
    return _state.fast is not None


def fast(nbytes: int = 0) -> Fast | None:
    """numba's loops, if they are ready and not switched off; else the caller does so many bytes of work in numpy."""
    if _state.fast is not None:
        return _state.fast if enabled() else None
    # Threads may lose each other's counts; enough work adds up all the same.
    _state.numpy_bytes += nbytes
    if _state.numpy_bytes >= WARM_AFTER_BYTES and _state.thread is None:
        warm()
    return None


def _start() -> None:
    try:
        from stitch.weights import numba_sparse
    except ImportError as error:
        _log.debug("numba is not used: %s", error)
    except Exception:  # noqa: BLE001  whatever a compiler raises on some machine, numpy does the work
        if not ending.is_set():
            _log.warning("numba does not compile here; numpy does its work, slower", exc_info=True)
    else:
        _state.fast = numba_sparse


def _end() -> None:
    ending.set()
    if _state.thread is not None:
        _state.thread.join(_EXIT_PATIENCE_S)
