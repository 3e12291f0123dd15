"""A line of versions and the staging area of a replica that follows it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from stitch.store.faulty import FaultyStore
from stitch.store.memory import MemoryStore
from stitch.weights.safetensors import WEIGHTS_FILE
from stitch.weights.staging import Staged, Staging
from tests.weights.versions import Line, Weights, changed, model

V0 = model()
V1 = changed(V0, "layer.0", seed=1)
V2 = changed(V1, "embed", "scale", seed=2)
V3 = changed(V2, "layer.1", seed=3)
ALL = [V0, V1, V2, V3]
WHOLE: Final = ("delta", "delta", "delta")
"""How versions 1 to 3 are published: by their changed tensors, whole."""
SPARSE: Final = ("sparse", "sparse", "sparse")
MIXED: Final = ("sparse", "delta", "sparse")


class Scene:
    """A line of four versions (0 full, the rest deltas) and the staging area of a replica."""

    def __init__(self, workdir: Path, *, deltas: tuple[str, ...] = WHOLE, **options: Any) -> None:
        """`options` are the staging area's."""
        self.workdir = workdir
        self.options = options
        self.store = FaultyStore(MemoryStore())
        self.line = Line(self.store)
        self.line.full(0, V0)
        for number, kind in enumerate(deltas, 1):
            getattr(self.line, kind)(number, number - 1, ALL[number])
        self.staging = Staging(workdir, self.store, **options)

    def stage(self, number: int, **options: Any) -> Staged:
        return self.staging.stage(self.line.ref(number), self.line.refs[number], **options)

    def go(self, number: int) -> Staged:
        """Stages and activates."""
        staged = self.stage(number)
        self.staging.mark_active(staged)
        return staged

    def restart(self, **options: Any) -> None:
        self.staging.close()
        self.options |= options
        self.staging = Staging(self.workdir, self.store, **self.options)

    def downloads(self) -> list[str]:
        return [key for call, key in self.store.calls if call == "download"]

    def size(self, number: int) -> int:
        manifest = self.line.manifests[number]
        return sum(file.size for file in manifest.weights)

    def stored(self, number: int) -> bytes:
        return self.store.get(self.line.manifests[number].weights[0].key, limit=1 << 30)


def buffer_bytes(scene: Scene, name: str) -> bytes:
    return (scene.workdir / "buffers" / name / WEIGHTS_FILE).read_bytes()


@functools.cache
def expected_file(number: int) -> bytes:
    """What staging writes where nothing goes wrong."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        with scene.staging:
            return (scene.stage(number).path / WEIGHTS_FILE).read_bytes()


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    place %= len(data) * 8
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def nudged(weights: Weights, seed: int, share: float = 0.02) -> Weights:
    """The same after a small step: a share of all values moved by a few units in the last place."""
    rng = np.random.default_rng(seed)
    out: Weights = {}
    for name, array in weights.items():
        units = np.array(array).reshape(-1).view(f"u{array.dtype.itemsize}")
        places = np.flatnonzero(rng.random(units.size) < share)
        units[places] ^= rng.integers(1, 4, places.size).astype(units.dtype) if array.dtype != np.bool_ else units.dtype.type(1)
        out[name] = units.view(array.dtype).reshape(array.shape)
    return out
