"""Downloads of a version's objects into local folders: several at once, resumed after an interruption, verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from stitch.core.errors import CorruptObject, StitchError
from stitch.core.ids import Digest, VersionRef
from stitch.core.manifest import StoredFile
from stitch.store.manifests import receipt
from stitch.store.port import BlobStore
from stitch.weights.files import remove

DOWNLOADS: Final = 8
"""At once: enough to fill a fast link from stores that give each connection some hundred MB/s."""
CHECK_EVERY_S: Final = 0.2
"""Between two looks at whether to stop, while downloads run."""

Progress = Callable[[int, int], None]


class StagingCancelled(StitchError):
    """Whoever asked for the version no longer wants it."""


class Fetcher:
    """Objects of weights in `cache`, carried files in `files`, each named by its blake3."""

    def __init__(self, store: BlobStore, *, cache: Path, files: Path) -> None:
        self._store = store
        self._cache = cache
        self._files = files
        for folder in (cache, files):
            folder.mkdir(parents=True, exist_ok=True)

    def cached(self, file: StoredFile) -> Path:
        """Where an object of weights lies once fetched."""
        return self._cache / file.blake3

    def carried(self, file: StoredFile) -> Path:
        """Where a carried file lies once fetched."""
        return self._files / file.blake3

    def missing_bytes(self, weights: Iterable[StoredFile], files: Iterable[StoredFile] = ()) -> int:
        """What `fetch` would still have to download."""
        return sum(file.size - _present(path, file) for path, file in self._places(weights, files))

    def fetch(
        self,
        version: VersionRef,
        weights: Iterable[StoredFile],
        files: Iterable[StoredFile],
        check: Callable[[], None],
        progress: Progress | None,
    ) -> int:
        """Downloads what is missing and hashes what is here; returns the bytes downloaded. `progress` is told 0 of them first.

        `check` raises to stop: no further download begins, running ones are waited for, and parts are kept. Raises CorruptObject
        naming the version and the file.
        """
        places = self._places(weights, files)
        todo = {path: file.size - _present(path, file) for path, file in places}
        told = _Told(progress, sum(todo.values()))
        done = 0
        with ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="stitch-fetch") as pool:
            running = {pool.submit(self._one, version, file, path): (path, file) for path, file in places}
            try:
                while running:
                    finished, _ = wait(running, CHECK_EVERY_S, FIRST_COMPLETED)
                    check()
                    for future in finished:
                        path, _ = running.pop(future)
                        future.result()
                        done += todo[path]
                    under_way = [place for future, place in running.items() if future.running()]
                    told(done + sum(todo[path] - (file.size - _present(path, file)) for path, file in under_way))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return done

    def evict_weights(self, keep: Iterable[StoredFile]) -> None:
        """Removes all other objects of weights, parts of them included."""
        _keep_only(self._cache, {file.blake3 for file in keep})

    def evict_files(self, keep: Iterable[StoredFile]) -> None:
        """Removes all other carried files."""
        _keep_only(self._files, {file.blake3 for file in keep})

    def _one(self, version: VersionRef, file: StoredFile, path: Path) -> None:
        try:
            self._store.download(receipt(file), path)
        except KeyError:
            raise CorruptObject(f"{version}: {file.path}: object {file.key} is missing") from None
        except CorruptObject as error:
            raise CorruptObject(f"{version}: {file.path}: {error}") from error

    def _places(self, weights: Iterable[StoredFile], files: Iterable[StoredFile]) -> list[tuple[Path, StoredFile]]:
        """Each object once, whichever version's file it is."""
        places = {self.cached(file): file for file in weights} | {self.carried(file): file for file in files}
        return list(places.items())


class _Told:
    """Progress that never goes back, also where a file is fetched anew."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        if progress is not None:
            progress(0, total)

    def __call__(self, done: int) -> None:
        if self._progress is not None and done > self._done:
            self._done = done
            self._progress(done, self._total)


def _present(path: Path, file: StoredFile) -> int:
    try:
        size = path.stat().st_size
    except FileNotFoundError:  # not begun, or begun anew at this moment
        return 0
    return size if size <= file.size else 0


def _keep_only(folder: Path, names: set[Digest]) -> None:
    for path in folder.iterdir():
        if path.name not in names:
            remove(path)
