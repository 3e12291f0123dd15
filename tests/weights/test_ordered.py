"""Tensors in work: their order, and how much memory they may take."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.weights.host import HostTensor, host_tensor
from stitch.weights.ordered import in_order

pytestmark = pytest.mark.unit


class Given:
    """Tensors of these sizes, in one buffer that is overwritten for each, and what is in work."""

    def __init__(self, sizes: list[int], *, reuse: bool) -> None:
        self._sizes, self._reuse = sizes, reuse
        self._lock = threading.Lock()
        self._buffer = np.zeros(max(sizes, default=0), np.uint8)
        self.taken = 0
        self.at_work: dict[str, int] = {}
        self.most = self.most_bytes = 0

    def tensors(self) -> Iterator[HostTensor]:
        for index, size in enumerate(self._sizes):
            data = self._buffer[:size] if self._reuse else np.zeros(size, np.uint8)
            data[...] = index % 251
            with self._lock:
                self.taken += 1
                self.at_work[f"{index}"] = size
            yield host_tensor(f"{index}", data)

    def act(self, tensor: HostTensor) -> int:
        with self._lock:
            self.most = max(self.most, len(self.at_work))
            self.most_bytes = max(self.most_bytes, sum(self.at_work.values()))
        assert set(bytes(tensor.data)) <= {int(tensor.name) % 251}
        return int(tensor.name)

    def done(self, tensor: HostTensor) -> None:
        assert set(bytes(tensor.data)) <= {int(tensor.name) % 251}, "good until the next one is taken"
        with self._lock:
            del self.at_work[tensor.name]


@given(
    sizes=st.lists(st.integers(0, 3000), max_size=30),
    threads=st.integers(1, 4),
    room=st.integers(1, 5000),
    copy=st.booleans(),
)
def test_order_is_kept_and_memory_is_bounded(sizes: list[int], threads: int, room: int, copy: bool) -> None:
    given = Given(sizes, reuse=copy)
    results = []
    for tensor, result in in_order(given.tensors(), given.act, copy=copy, threads=threads, room=room):
        given.done(tensor)
        results.append(result)
    assert results == list(range(len(sizes)))
    assert given.most <= threads + 2, "those in work, one that is ready, and one that waits"
    assert given.most_bytes <= max(room, max(sizes, default=0)) + max(sizes, default=0)


def test_an_error_ends_it_and_no_thread_is_left() -> None:
    before = set(threading.enumerate())

    def act(tensor: HostTensor) -> int:
        if tensor.name == "3":
            raise ValueError("three")
        return 0

    given = Given([8] * 50, reuse=False)
    with pytest.raises(ValueError, match="three"):
        list(in_order(given.tensors(), act, copy=False, threads=2))
    assert given.taken < 10
    assert set(threading.enumerate()) <= before


def test_an_error_of_the_tensors_is_the_callers() -> None:
    def broken() -> Iterator[HostTensor]:
        yield host_tensor("a", np.zeros(3))
        raise RuntimeError("the trainer's own fault")

    with pytest.raises(RuntimeError, match="own fault"):
        list(in_order(broken(), lambda tensor: tensor.name, copy=True))
