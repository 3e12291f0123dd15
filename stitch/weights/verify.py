"""Whether a safetensors file holds exactly the tensors that it should: names, dtypes, shapes, and every byte by state digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from stitch.core.errors import CorruptObject
from stitch.core.ids import StateDigest
from stitch.core.manifest import TensorSpec
from stitch.weights.digest import add_to_state, word_sum
from stitch.weights.header import DTYPES, TensorInfo
from stitch.weights.parallel import Check, run_all
from stitch.weights.safetensors import TensorFile

PART_BYTES: Final = 32 * 1024 * 1024
"""Of one thread's piece of work, a multiple of a word: some milliseconds, so that a huge tensor is spread over all threads and a
call can be stopped soon."""
_WORD_BYTES: Final = 8
EMPTY: Final = StateDigest(f"{0:016x}")
"""Of no bytes."""


class Verify(StrEnum):
    """What is read again before an engine is given a staged version."""

    FULL = "full"
    """Every byte of the buffer."""
    INCREMENTAL = "incremental"
    """What changed: digests follow from the changed words and must be the manifest's. What did not change was right when it was
    last read, and is read again now and then by a scrub."""


Part = tuple[str, int, int]
"""A tensor's name, and the bytes of it from begin to end."""


def parts(sizes: Iterable[tuple[str, int]]) -> Iterator[list[Part]]:
    """Tensors of these sizes as pieces of about PART_BYTES: small ones together, large ones in several."""
    piece: list[Part] = []
    held = 0
    for name, size in sizes:
        for begin in range(0, max(size, 1), PART_BYTES):
            end = min(begin + PART_BYTES, size)
            piece.append((name, begin, end))
            held += end - begin
            if held >= PART_BYTES:
                yield piece
                piece, held = [], 0
    if piece:
        yield piece


def part_sum(data: memoryview, begin: int, end: int) -> int:
    """What these bytes of a tensor are in the sum of its state digest. `begin` is a multiple of a word."""
    return word_sum(np.frombuffer(data[begin:end], np.uint8), begin // _WORD_BYTES) if end > begin else 0


def digests(
    data: Callable[[str], memoryview], sizes: Iterable[tuple[str, int]], threads: int, check: Check
) -> dict[str, StateDigest]:
    """The state digests of tensors of these names and sizes in bytes; `data` gives a tensor's bytes."""

    def read(piece: list[Part]) -> list[tuple[str, int]]:
        return [(name, part_sum(data(name), begin, end)) for name, begin, end in piece]

    found: dict[str, StateDigest] = {}
    for sums in run_all((partial(read, piece) for piece in parts(sizes)), threads, check):
        for name, part in sums:
            found[name] = add_to_state(found.get(name, EMPTY), part)
    return found


def read_specs(file: TensorFile, threads: int, check: Check) -> tuple[TensorSpec, ...]:
    """All tensors of a file with their state digests, by one read of it; sorted by name."""
    infos = [file.spec(name) for name in file.names]
    found = digests(file.data, ((info.name, info.end - info.begin) for info in infos), threads, check)
    rows = (TensorSpec(name=info.name, dtype=info.dtype, shape=info.shape, state=found[info.name]) for info in infos)
    return tuple(sorted(rows, key=lambda spec: spec.name))


def verify(path: Path, tensors: Sequence[TensorSpec], source: str, check: Check, *, threads: int = 1) -> None:
    """Holds every tensor of a file against its spec, by one read. Raises CorruptObject naming `source` and the tensor."""
    with TensorFile(path) as file:
        check_layout({name: file.spec(name) for name in file.names}, tensors, source)
        sizes = ((name, file.spec(name).end - file.spec(name).begin) for name in file.names)
        found = digests(file.data, sizes, threads, check)
    for spec in tensors:
        check_state(spec, found[spec.name], source)


def check_dtypes(tensors: Iterable[TensorSpec], source: str) -> None:
    """Raises CorruptObject naming `source` and the tensor whose dtype no safetensors file of ours can hold."""
    for spec in tensors:
        if spec.dtype not in DTYPES:
            raise CorruptObject(f"{source}: tensor {spec.name!r} is of dtype {spec.dtype[:40]!r}, which is not known")


def check_layout(infos: Mapping[str, TensorInfo], tensors: Iterable[TensorSpec], source: str) -> None:
    """Names, dtypes and shapes alone, which no state digest covers. Raises CorruptObject naming `source` and the tensor."""
    specs = {spec.name: spec for spec in tensors}
    for name in infos:
        if name not in specs:
            raise CorruptObject(f"{source}: tensor {name!r} is not in the manifest")
    for name, spec in specs.items():
        info = infos.get(name)
        if info is None:
            raise CorruptObject(f"{source}: tensor {name!r} is missing")
        if (info.dtype, info.shape) != (spec.dtype, spec.shape):
            raise CorruptObject(
                f"{source}: tensor {name!r} is {info.dtype} {list(info.shape)}, not {spec.dtype} {list(spec.shape)}"
            )


def check_state(spec: TensorSpec, found: StateDigest, source: str) -> None:
    """Raises CorruptObject naming `source` and the tensor."""
    if found != spec.state:
        raise CorruptObject(f"{source}: tensor {spec.name!r} has the state digest {found}, not {spec.state}")
