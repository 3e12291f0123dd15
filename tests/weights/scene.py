"""A line of versions and the staging area of a replica that follows it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from stitch.store.faulty import FaultyStore
from stitch.store.memory import MemoryStore
from stitch.weights.safetensors import WEIGHTS_FILE
from stitch.weights.staging import Staged, Staging
from tests.weights.versions import Line, changed, model

V0 = model()
V1 = changed(V0, "layer.0", seed=1)
V2 = changed(V1, "embed", "scale", seed=2)
V3 = changed(V2, "layer.1", seed=3)
ALL = [V0, V1, V2, V3]


class Scene:
    """A line of four versions (0 full, the rest deltas) and the staging area of a replica."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.store = FaultyStore(MemoryStore())
        self.line = Line(self.store)
        self.line.full(0, V0)
        for number in (1, 2, 3):
            self.line.delta(number, number - 1, ALL[number])
        self.staging = Staging(workdir, self.store)

    def stage(self, number: int, **options: object) -> Staged:
        return self.staging.stage(self.line.ref(number), self.line.refs[number], **options)  # type: ignore[arg-type]

    def go(self, number: int) -> Staged:
        """Stages and activates."""
        staged = self.stage(number)
        self.staging.mark_active(staged)
        return staged

    def restart(self) -> None:
        self.staging.close()
        self.staging = Staging(self.workdir, self.store)

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
