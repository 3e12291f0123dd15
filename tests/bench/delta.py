"""Size and speed of sparse deltas against the form that Slime writes, on recorded AdamW steps, one core.

The peer, as its sources have it: xor of a tensor's bytes, zstd level 1 over all of it, no byte planes; to apply it, the frame is
read in blocks of 2 MiB, each xored into the old bytes. What it does besides (counting changed bytes, checksums) is left out of its
times, and told separately where the checksum is counted: `..._verified` compares with its xxh3-128 of the new bytes. Our side
updates the state digest in either direction, which no key leaves out.

Seconds are the processor's, of the one thread that works: the goals are per core, and a busy machine disturbs these least.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
import zstandard

from stitch.weights import kernels, sparse
from stitch.weights.digest import state_digest
from tests.bench import Options, Times
from tests.bench._steps import Array, rates, tiled

MIB = 1 << 20
TURNS = 7
BLOCK = 2 * MIB
"""What the peer reads at a time."""
RATES = {1e-6: "1e-6", 2e-6: "2e-6", 3e-6: "3e-6"}
"""Learning rates that are told each; the headline is the mean of the first two: 1 to 2 % changed."""


def run(options: Options) -> dict[str, float]:
    if not kernels.warm(wait=True):
        options.say("numba is not here: these are numpy's times")
    size = (32 if options.small else 256) * MIB
    found: dict[str, dict[str, float]] = {}
    for rate, old, new in _steps(size, options):
        found[rate] = _measure(old, new, options)
        for key, value in found[rate].items():
            options.say(f"  {rate}: {key} {value:.3f}")
    headline = [found[rate] for rate in ("1e-6", "2e-6") if rate in found]
    result = {
        key: round(statistics.mean(one[key] for one in headline), 3)
        for key in headline[0]
        if key.startswith(("size_vs", "encode_vs", "decode_vs"))
    }
    for rate, values in found.items():
        result |= {f"{key}_{rate}": round(value, 4) for key, value in values.items() if key not in result or len(found) > 1}
    return result


def _steps(size: int, options: Options) -> list[tuple[str, list[Array], list[Array]]]:
    """One step of each learning rate, tensor by tensor as bytes: from the middle of its steps, where the optimizer has settled."""
    base, later = tiled(size)
    wanted = list(RATES)[:1] if options.small else list(RATES)
    picks = {rates().index(rate) + (0 if options.small else rates().count(rate) // 2): rate for rate in wanted}
    found: list[tuple[str, list[Array], list[Array]]] = []
    for number, (old, new) in enumerate(pairwise(_chain(base, later))):
        if number in picks:
            found.append((RATES[picks[number]], _as_bytes(old), _as_bytes(new)))
        if number == max(picks):
            break
    return found


def _chain(first: Any, later: Any) -> Any:
    yield first
    yield from later


def _as_bytes(model: dict[str, Array]) -> list[Array]:
    return [array.reshape(-1).view(np.uint8) for array in model.values()]


def _measure(old: list[Array], new: list[Array], options: Options) -> dict[str, float]:
    """Each side's times over all tensors of one step."""
    states = [state_digest(tensor.data) for tensor in old]
    theirs: list[bytes] = []
    ours: list[sparse.SparseTensor] = []
    target = [tensor.copy() for tensor in old]

    def write_theirs() -> None:
        theirs[:] = [zstandard.ZstdCompressor(level=1).compress(after ^ before) for before, after in zip(old, new, strict=True)]

    def write_ours() -> None:
        made = (
            sparse.encode(before.data, after.data, width=2, state=state)
            for before, after, state in zip(old, new, states, strict=True)
        )
        ours[:] = [delta for delta in made if delta is not None]

    def read_theirs(verify: bool = False) -> None:
        for blob, region in zip(theirs, target, strict=True):
            _read_xor(blob, region, verify=verify)

    def read_ours() -> None:
        for delta, region, state in zip(ours, target, states, strict=True):
            if sparse.apply([delta.blob], region.data, width=2, state=state) != delta.state:
                raise AssertionError("the digest is not the new tensor's")

    def restore() -> None:
        for region, before in zip(target, old, strict=True):
            region[:] = before

    turns = 1 if options.small else TURNS
    encode = _in_turns({"ours": write_ours, "theirs": write_theirs}, turns, lambda: None)
    for act in (read_theirs, read_ours):
        restore()
        act()
        if any((region != after).any() for region, after in zip(target, new, strict=True)):
            raise AssertionError("what was applied is not the new tensor")
    sides: dict[str, Callable[[], object]] = {
        "ours": read_ours,
        "theirs": read_theirs,
        "verified": lambda: read_theirs(verify=True),
    }
    decode = _in_turns(sides, turns, restore)
    total = sum(tensor.nbytes for tensor in old)
    return {
        "size_vs_xor_zstd": sum(len(delta.blob) for delta in ours) / sum(map(len, theirs)),
        "encode_vs_xor_zstd": encode.ratio("theirs", "ours"),
        "decode_vs_xor_zstd": decode.ratio("theirs", "ours"),
        "decode_vs_xor_zstd_verified": decode.ratio("verified", "ours"),
        "changed_percent": 200 * sum(delta.changed for delta in ours) / total,
        "size_percent": 100 * sum(len(delta.blob) for delta in ours) / total,
        **_speeds("encode", encode, total),
        **_speeds("decode", decode, total),
    }


def _in_turns(sides: dict[str, Callable[[], object]], turns: int, settle: Callable[[], object]) -> Times:
    """As tests.bench.in_turns, by the processor's time."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(turns):
        for side in sides if turn % 2 == 0 else reversed(sides):
            settle()
            began = time.thread_time()
            sides[side]()
            seconds[side].append(time.thread_time() - began)
    return Times(seconds=seconds)


def _speeds(what: str, times: Times, total: int) -> dict[str, float]:
    return {f"{what}_gb_per_s": total / 1e9 / times.median("ours"), f"{what}_gb_per_s_xor": total / 1e9 / times.median("theirs")}


def _read_xor(blob: bytes, region: Array, *, verify: bool) -> None:
    hasher = xxhash.xxh3_128()
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(blob))
    position = 0
    while position < region.nbytes:
        block = np.frombuffer(reader.read(min(BLOCK, region.nbytes - position)), np.uint8)
        part = region[position : position + block.nbytes]
        part ^= block
        if verify:
            hasher.update(part)
        position += block.nbytes
    if verify:
        hasher.hexdigest()
