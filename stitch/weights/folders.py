"""The folders that engines load from: one per version, made of links into a buffer and to carried files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from stitch.core.errors import CorruptObject
from stitch.core.ids import VersionRef
from stitch.core.manifest import Manifest
from stitch.weights.safetensors import INDEX_FILE, NOT_CARRIED, WEIGHTS_FILE

_NEW: Final = ".new"


def check_carried(version: VersionRef, manifest: Manifest) -> None:
    """Refuses carried files that an engine could take for weights, or that cannot lie side by side. Raises CorruptObject."""
    paths = {PurePosixPath(file.path) for file in manifest.files}
    for path in sorted(paths):
        if path.suffix in NOT_CARRIED or path.name == INDEX_FILE:
            raise CorruptObject(f"{version}: carried file {str(path)!r} is of a form that holds weights")
        if not paths.isdisjoint(path.parents):
            raise CorruptObject(f"{version}: carried file {str(path)!r} lies below another carried file")


class StagedFolders:
    """`<root>/<run>/weight_v000007/…`. A folder appears as a whole, and goes before what it links to changes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # Those of an earlier process may lead into a buffer that a crash left dirty.
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)

    def path(self, version: VersionRef) -> Path:
        """A version's folder, whether it is there or not: unique to run and number, so that an engine's report of it is a proof."""
        return self._root / version.run / f"weight_v{version.number:06d}"

    def expose(self, version: VersionRef, weights: Path, carried: Mapping[str, Path]) -> Path:
        """Makes the folder, or leaves it where it is as it should be."""
        path = self.path(version)
        scratch = self._root / _NEW
        shutil.rmtree(scratch, ignore_errors=True)
        for name, source in {WEIGHTS_FILE: weights, **carried}.items():
            place = scratch / name
            place.parent.mkdir(parents=True, exist_ok=True)
            # Relative, so that the folder works where a container sees it under another path.
            place.symlink_to(os.path.relpath(source, (path / name).parent))
        if not _same_links(path, scratch):
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.rename(path)
        shutil.rmtree(scratch, ignore_errors=True)
        return path

    def withdraw(self, weights: Path) -> None:
        """Removes every folder that leads to this file."""
        self._remove(lambda folder: (folder / WEIGHTS_FILE).resolve() == weights.resolve())

    def keep_only(self, *kept: Path) -> None:
        self._remove(lambda folder: folder not in kept)

    def _remove(self, unwanted: Callable[[Path], bool]) -> None:
        for folder in self._root.glob("*/weight_v*"):
            if unwanted(folder):
                shutil.rmtree(folder)


def _same_links(one: Path, other: Path) -> bool:
    return one.is_dir() and _links(one) == _links(other)


def _links(folder: Path) -> dict[Path, Path]:
    return {path.relative_to(folder): path.readlink() for path in folder.rglob("*") if path.is_symlink()}
