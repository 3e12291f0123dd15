"""When numba's loops are used, and that a process does well without them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from stitch.weights import kernels
from stitch.weights.digest import state_digest, word_sum
from tests.weights.sparse_support import running

pytestmark = pytest.mark.unit


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def test_nothing_is_imported_before_it_is_needed() -> None:
    done = python("import sys, stitch.weights.sparse, stitch.weights.digest; assert 'numba' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SWITCH, "0")
    assert not kernels.warm(wait=True)
    assert kernels.fast() is None


def test_a_process_may_end_while_it_warms() -> None:
    """At once, though numba is being imported in the background; nothing is torn down half-way, nothing is said."""
    done = python("from stitch.weights import kernels; kernels.warm()")
    assert (done.returncode, done.stderr) == (0, "")


def test_without_numba_numpy_does_it_all() -> None:
    done = python(
        "import sys; sys.modules['numba'] = None\n"
        "from stitch.weights import kernels; from stitch.weights.digest import state_digest\n"
        "assert not kernels.warm(wait=True); assert kernels.fast() is None; print(state_digest(bytes(800)))"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == state_digest(bytes(800))


def test_enough_work_in_numpy_starts_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    state = kernels._Warming()
    monkeypatch.setattr(kernels, "_state", state)
    monkeypatch.setattr(kernels, "_start", started.set)
    monkeypatch.setenv(kernels.SWITCH, "1")
    assert kernels.fast(kernels.WARM_AFTER_BYTES - 1) is None
    assert state.thread is None
    assert kernels.fast(1) is None
    assert state.thread is not None
    assert started.wait(10)
    thread = state.thread
    kernels.fast(kernels.WARM_AFTER_BYTES)
    assert state.thread is thread


def test_a_compiler_that_fails_leaves_numpy_and_says_so() -> None:
    done = python(
        "import logging, sys; logging.basicConfig(format='%(message)s')\n"
        "from stitch.weights import kernels; from stitch.weights.digest import state_digest\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'stitch.weights.numba_sparse': raise SystemError('no such target')\n"
        "sys.meta_path.insert(0, Finder())\n"
        "assert not kernels.warm(wait=True); print(state_digest(bytes(8)))"
    )
    assert done.returncode == 0, done.stderr
    assert "numba does not compile here" in done.stderr
    assert done.stdout.strip() == state_digest(bytes(8))


def test_where_nothing_can_be_kept_it_compiles_anew() -> None:
    """numba raises where neither the modules' folder nor the user's cache can be written."""
    with running("numba"):
        from stitch.weights import numba_kernels

    asked: list[dict[str, Any]] = []

    def njit(signatures: object, **options: Any) -> Any:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_kernels.numba, "njit", njit)
        assert numba_kernels._compiled("signature")(python) == ("compiled", python)
    assert [options.get("cache", False) for options in asked] == [True, False]
    assert all(options["nogil"] for options in asked)


@pytest.mark.parametrize("first_word", [0, 1, 4 * 1024 * 1024 - 5, 2**40])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 200_003])
def test_parts_of_a_digest_add_up_on_both_loops(first_word: int, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    sums = set()
    for loops in ("numpy", "numba"):
        with running(loops):
            whole = word_sum(data, first_word)
            cut = size // 2 // 8 * 8
            assert (word_sum(data[:cut], first_word) + word_sum(data[cut:], first_word + cut // 8)) % 2**64 == whole
            sums.add(whole)
    assert len(sums) == 1
