"""What the tests of the sparse codec share: the loops that it runs on, and chunks small enough to have many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st

from stitch.core.ids import StateDigest
from stitch.weights import kernels, sparse
from stitch.weights.digest import state_digest

Array = np.ndarray[Any, np.dtype[Any]]
LOOPS = ("numpy", "numba")
SMALL_CHUNK = 64


@contextlib.contextmanager
def running(loops: str, *, chunk_bytes: int | None = None) -> Iterator[None]:
    """Everything inside runs on these loops, and writes chunks of that size. Skips where numba is not installed."""
    if loops == "numba" and not kernels.warm(wait=True):
        pytest.skip("numba is not installed, or does not compile here")
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, {kernels.SWITCH: str(int(loops == "numba"))}))
        if chunk_bytes is not None:
            patches.enter_context(mock.patch.object(sparse, "CHUNK_BYTES", chunk_bytes))
        yield


def view(array: Array) -> memoryview:
    """The array's bytes, writable."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def applied(old: Array, *blobs: bytes, width: int) -> tuple[Array, StateDigest]:
    """A copy of the old bytes brought through the blobs, and the digest that apply gives. Without a digest it must do the same."""
    target, state = _applied(old, blobs, width, state_digest(view(old)))
    again, none = _applied(old, blobs, width, None)
    assert view(again) == view(target)
    assert none is None
    assert state is not None
    return target, state


def _applied(old: Array, blobs: Sequence[bytes], width: int, state: StateDigest | None) -> tuple[Array, StateDigest | None]:
    """On a copy that lies between guards at an odd address; they must stay as they are."""
    data = view(old)
    guarded = np.full(data.nbytes + 65, 0xA5, np.uint8)
    target = guarded[33 : 33 + data.nbytes]
    target[:] = np.frombuffer(data, np.uint8) if data.nbytes else 0
    try:
        found = sparse.apply(blobs, memoryview(target), width=width, state=state)
    finally:
        assert (guarded[:33] == 0xA5).all()
        assert (guarded[33 + data.nbytes :] == 0xA5).all()
    return target, found


@st.composite
def pairs(draw: st.DrawFn, max_units: int = 400) -> tuple[int, Array, Array]:
    """Width, and old and new units: alike but for some that moved a little, moved far, or are others altogether."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.integers(0, max_units))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 256, count * width, np.uint8).view(f"<u{width}")
    new = old.copy()
    share = draw(st.sampled_from([0, 0.003, 0.05, 0.6, 1]))
    for _ in range(draw(st.integers(1, 2))):
        where = np.flatnonzero(rng.random(count) < share)
        match draw(st.sampled_from(["little", "far", "other", "zero", "extreme"])):
            case "little":
                new[where] += rng.choice([1, -1, 2, -2, 256, 257, 258, -256, -257], where.size).astype(np.int64).astype(new.dtype)
            case "far":
                new[where] += rng.integers(-70_000, 70_000, where.size).astype(np.int64).astype(new.dtype)
            case "other":
                new[where] = rng.integers(0, 256, where.size * width, np.uint8).view(new.dtype)
            case "zero":
                new[where] = 0
            case "extreme":
                new[where] += np.array(1, new.dtype) << np.array(8 * width - 1, new.dtype)
    return width, old, new
