"""Size and speed of sparse deltas against the form that Slime writes, on recorded AdamW steps, one core.

The peer, as its sources have it: xor of a tensor's bytes, zstd level 1 over all of it, no byte planes; to apply it, the frame is
read in blocks of 2 MiB, each xored into the old bytes. What it does besides (counting changed bytes, checksums) is left out of its
times; the checksum, its xxh3-128 of the new bytes, is counted in `..._verified` alone. Our side updates the state digest in either
direction, but in `decode_undigested_...`: so deltas are applied where all is read afterwards. `..._planes` compares with
the same form over byte planes: all low bytes of a tensor's xor, then all high ones, which is smaller and slower.

Seconds are the processor's, of the one thread that works: the goals are per core, and a busy machine disturbs these least.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
import zstandard

from stitch.core.ids import StateDigest
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
    result = {key: round(statistics.mean(one[key] for one in headline), 3) for key in headline[0] if "_vs_" in key}
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


class _Ours:
    def __init__(self, *, digest: bool = True) -> None:
        self._digest = digest

    def write(self, before: Array, after: Array, state: StateDigest) -> sparse.SparseTensor:
        delta = sparse.encode(before.data, after.data, width=2, state=state)
        assert delta is not None, "a recorded step changes every tensor"
        return delta

    def read(self, delta: sparse.SparseTensor, region: Array, state: StateDigest) -> None:
        found = sparse.apply([delta.blob], region.data, width=2, state=state if self._digest else None)
        assert found == (delta.state if self._digest else None), "the digest is not the new tensor's"

    def size(self, delta: sparse.SparseTensor) -> int:
        return len(delta.blob)


class _Xor:
    """As Slime writes and applies it; with its checksum of the new bytes where told so."""

    def __init__(self, *, verify: bool = False) -> None:
        self._verify = verify

    def write(self, before: Array, after: Array, _state: StateDigest) -> bytes:
        if self._verify:
            xxhash.xxh3_128(after.data).hexdigest()
        return zstandard.ZstdCompressor(level=1).compress((after ^ before).data)

    def read(self, blob: bytes, region: Array, _state: StateDigest) -> None:
        hasher = xxhash.xxh3_128()
        reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(blob))
        position = 0
        while position < region.nbytes:
            block = np.frombuffer(reader.read(min(BLOCK, region.nbytes - position)), np.uint8)
            part = region[position : position + block.nbytes]
            part ^= block
            if self._verify:
                hasher.update(part.data)
            position += block.nbytes
        hasher.hexdigest()

    def size(self, blob: bytes) -> int:
        return len(blob)


class _Planes:
    def write(self, before: Array, after: Array, _state: StateDigest) -> bytes:
        planes = np.ascontiguousarray((after ^ before).reshape(-1, 2).T)
        return zstandard.ZstdCompressor(level=1).compress(planes.reshape(-1).data)

    def read(self, blob: bytes, region: Array, _state: StateDigest) -> None:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint8)
        region ^= np.ascontiguousarray(planes.reshape(2, -1).T).reshape(-1)

    def size(self, blob: bytes) -> int:
        return len(blob)


def _measure(old: list[Array], new: list[Array], options: Options) -> dict[str, float]:
    """Each side's times over all tensors of one step, and its bytes."""
    sides: dict[str, Any] = {
        "ours": _Ours(),
        "ours_undigested": _Ours(digest=False),
        "xor_zstd": _Xor(),
        "xor_zstd_verified": _Xor(verify=True),
        "xor_zstd_planes": _Planes(),
    }
    states = [state_digest(tensor.data) for tensor in old]
    blobs: dict[str, list[Any]] = {}
    target = [tensor.copy() for tensor in old]

    def write(name: str) -> None:
        blobs[name] = [sides[name].write(*tensors) for tensors in zip(old, new, states, strict=True)]

    def read(name: str) -> None:
        for blob, region, state in zip(blobs[name], target, states, strict=True):
            sides[name].read(blob, region, state)

    def restore() -> None:
        for region, before in zip(target, old, strict=True):
            region[:] = before

    turns = 1 if options.small else TURNS
    encode = _in_turns({name: partial(write, name) for name in sides}, turns, lambda: None)
    for name in sides:
        restore()
        read(name)
        if any((region != after).any() for region, after in zip(target, new, strict=True)):
            raise AssertionError(f"{name}: what was applied is not the new tensor")
    decode = _in_turns({name: partial(read, name) for name in sides}, turns, restore)
    sizes = {name: sum(map(side.size, blobs[name])) for name, side in sides.items()}
    total = sum(tensor.nbytes for tensor in old)
    found: dict[str, float] = {}
    for name in sides.keys() - {"ours", "ours_undigested"}:
        if name != "xor_zstd_verified":
            found[f"size_vs_{name}"] = sizes["ours"] / sizes[name]
        found[f"encode_vs_{name}"] = encode.ratio(name, "ours")
        found[f"decode_vs_{name}"] = decode.ratio(name, "ours")
    found["decode_undigested_vs_xor_zstd"] = decode.ratio("xor_zstd", "ours_undigested")
    found["changed_percent"] = 200 * sum(delta.changed for delta in blobs["ours"]) / total
    found["size_percent"] = 100 * sizes["ours"] / total
    found |= {f"{what}_gb_per_s": total / 1e9 / times.median("ours") for what, times in (("encode", encode), ("decode", decode))}
    found |= {
        f"{what}_gb_per_s_xor": total / 1e9 / times.median("xor_zstd") for what, times in (("encode", encode), ("decode", decode))
    }
    return dict(sorted(found.items()))


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
