"""The store side of a publisher: files uploaded in parallel, each held against what the store received, and manifests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from stitch.core.errors import CorruptObject, Unavailable
from stitch.core.manifest import Manifest, ManifestRef, StoredFile
from stitch.store.manifests import object_key, read_manifest, receipt, write_manifest
from stitch.store.port import BlobStore, Receipt
from stitch.trainer.attempt import Attempt, Step
from stitch.weights.encode import LocalFile

UPLOAD_THREADS: Final = 8
"""Objects under way at a time: enough to fill a fast network with streams of one connection each."""

T = TypeVar("T")


class Blobs:
    """`scratch` keeps the files that are carried from version to version."""

    def __init__(self, store: BlobStore, scratch: Path) -> None:
        self.store: Final = store
        self._scratch = scratch
        self._threads = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="stitch-upload")
        self._ahead: dict[tuple[str, Path], Future[Receipt]] = {}
        self._given_up = threading.Event()
        """Of the transfers that were begun since the last `drop`."""

    def close(self) -> None:
        """Waits for the transfers in hand, which end with the piece that they are at."""
        self._given_up.set()
        self._threads.shutdown(cancel_futures=True)

    def begin(self, prefix: str, source: Path) -> None:
        """Starts to upload a file that `upload` will be asked for; `drop` it where it then was not."""
        self._ahead[prefix, source] = self._threads.submit(self._put, prefix, source, self._given_up)

    def drop(self) -> None:
        """Ends what was begun: no file is read any more. Blocks while a transfer ends the piece that it is at."""
        self._given_up.set()
        self._given_up = threading.Event()
        for future in self._ahead.values():
            future.cancel()
        wait(self._ahead.values())
        self._ahead.clear()

    async def upload(self, prefix: str, files: Sequence[LocalFile], attempt: Attempt) -> tuple[StoredFile, ...]:
        """Every file as an object under the prefix, durable on return, in the order given.

        Raises CorruptObject where a file changed meanwhile. Again with the same files is no error.
        """
        total = sum(file.source.stat().st_size for file in files)
        done = 0

        async def one(file: LocalFile) -> StoredFile:
            nonlocal done
            stored = await self._upload_one(prefix, file, attempt)
            done += stored.size
            attempt.report(Step.UPLOADING, bytes_done=done, bytes_total=total)
            return stored

        tasks = [asyncio.create_task(one(file)) for file in files]
        try:
            stored = tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        attempt.report(Step.UPLOADED, bytes_done=total, bytes_total=total)
        return stored

    async def write_manifest(self, manifest: Manifest, base: Manifest | None, attempt: Attempt) -> ManifestRef:
        return await self._call(attempt, partial(write_manifest, self.store, manifest, base))

    async def read_manifest(self, ref: ManifestRef, attempt: Attempt) -> Manifest:
        """Raises CorruptObject also where there is none."""
        try:
            return await self._call(attempt, partial(read_manifest, self.store, ref))
        except KeyError as error:
            raise CorruptObject(f"manifest {ref.key} is missing from {self.store.url}") from error

    async def carried(self, manifest: Manifest, attempt: Attempt) -> tuple[LocalFile, ...]:
        """The files that a version carries beside its weights, as local ones. Each is downloaded once."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        return tuple([await self._carry(file, attempt) for file in manifest.files])

    async def _carry(self, file: StoredFile, attempt: Attempt) -> LocalFile:
        source = self._scratch / file.blake3
        if not source.exists():
            part = source.with_suffix(".part")
            try:
                await self._call(attempt, partial(self.store.download, receipt(file), part))
            except KeyError as error:
                raise CorruptObject(f"object {file.key} ({file.path}) is missing from {self.store.url}") from error
            part.rename(source)
        return LocalFile(path=file.path, source=source)

    async def _upload_one(self, prefix: str, file: LocalFile, attempt: Attempt) -> StoredFile:
        begun = self._ahead.get((prefix, file.source))
        got = None if begun is None else await self._result(begun, attempt)
        self._ahead.pop((prefix, file.source), None)
        if got is None:
            got = await self._call(attempt, partial(self._put, prefix, file.source, self._given_up))
        if file.changed():
            raise CorruptObject(
                f"{file.source} was changed while it was published; nothing was. Publish a directory that nobody writes to any more"
            )
        return StoredFile(path=file.path, key=got.key, size=got.size, blake3=got.blake3)

    def _put(self, prefix: str, source: Path, given_up: threading.Event) -> Receipt:
        return self.store.put_named(partial(object_key, prefix), source, cancelled=given_up.is_set)

    @staticmethod
    async def _result(begun: Future[Receipt], attempt: Attempt) -> Receipt | None:
        """None where the store was away: the upload begins again, as one that may be waited for. Unavailable at the deadline."""
        try:
            return await attempt.bounded(lambda: asyncio.wrap_future(begun))
        except Unavailable:
            if attempt.expired:
                raise
            return None

    async def _call(self, attempt: Attempt, act: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await attempt.until_available(lambda: loop.run_in_executor(self._threads, act))
