"""BlobStore in a directory of a POSIX file system: `file:///PATH`, `file://relative`. The embedded default.

An object is written to a file of its own under `.stitch-uploads`, synced, and then hard-linked to its name: the link either
makes the whole object visible or fails because the name is taken, among any number of processes. Folders are opened one by one
without following symbolic links, so nothing in the tree leads out of the root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat as modes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from stitch.core.errors import InvalidRequest, Unavailable, VersionConflict
from stitch.core.ids import Digest
from stitch.store.hashing import (
    Hasher,
    Stream,
    body_chunks,
    checked,
    checked_body,
    digest_body,
    digest_chunks,
    download_verified,
    put_hashed_first,
    read_chunks,
    too_long,
)
from stitch.store.keys import RESERVED_SEGMENT, check_key, check_prefix, is_key, tree_conflict
from stitch.store.port import BlobStore, Body, Cancelled, Entry, Receipt, never

UPLOAD_TTL_S: Final = 24 * 3600.0
"""Age, since the last write, at which an unfinished file is taken for a dead writer's. A live writer starts over."""

_RACE_TRIES: Final = 100
"""Of a put whose folders vanish under it: a try fails only where another process pruned or swept in that very moment."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_ONLY_MODE: Final = 0o444
"""Objects never change: a slip of an editor or a shell redirection is refused by the system."""
_REFUSALS: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP}
"""What another try does not mend. EPERM and ENOTSUP are also how a file system says that it has no hard links."""
_NO_OBJECT: Final = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""How the system says that a path leads to nothing, or over something that is no folder of ours."""


class DirectoryStore(BlobStore):
    """The objects below `root`, which is made if missing. Safe for any number of threads and processes of one machine."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        try:
            _make_folders(self._root)
        except OSError as error:
            raise InvalidRequest(f"store: {self.url} cannot be made: {error.strerror}", field="store") from error
        self.sweep(UPLOAD_TTL_S)

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def put(self, key: str, body: Body) -> Receipt:
        *folders, name = check_key(key).split("/")
        body = checked_body(body)
        with self._reporting():
            for _ in range(_RACE_TRIES):
                try:
                    with self._folder(folders, create=True) as folder:
                        receipt = self._create(key, folder, name, body)
                        os.fsync(folder)  # also where another process made the link and may not have synced it yet
                        return receipt
                except FileNotFoundError:
                    continue
                except NotADirectoryError as error:
                    raise tree_conflict(key) from error
        raise Unavailable(f"store {self.url}: the folders of {key!r} keep vanishing")

    def put_named(self, key_of: Callable[[Digest], str], body: Body, *, cancelled: Cancelled = never) -> Receipt:
        return put_hashed_first(self, key_of, body, cancelled)

    def get(self, key: str, *, limit: int, expect: Digest | None = None) -> bytes:
        with self._reporting(), self._opened(key) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise too_long(key, size, limit)
            return checked(key, file.read(), limit=limit, expect=expect)

    def download(self, expect: Receipt, path: Path) -> None:
        check_key(expect.key)
        download_verified(expect, path, lambda offset: self._chunks(expect.key, offset))

    def stat(self, key: str) -> Entry | None:
        check_key(key)
        try:
            with self._reporting(), self._opened(key) as file:
                return _entry(key, os.fstat(file.fileno()))
        except KeyError:
            return None

    def entries(self, prefix: str) -> Iterator[Entry]:
        *folders, beginning = check_prefix(prefix).split("/")
        return self._walk(folders, beginning)

    def delete(self, key: str) -> None:
        *folders, name = check_key(key).split("/")
        with self._reporting():
            try:
                with self._folder(folders) as folder:
                    if _is_object(folder, name):
                        os.unlink(name, dir_fd=folder)
                        os.fsync(folder)
            except OSError as error:
                if error.errno not in _NO_OBJECT:
                    raise
            self._prune(folders)

    def sweep(self, older_than_s: float) -> int:
        oldest = time.time() - older_than_s
        swept = 0
        with self._reporting(), contextlib.suppress(FileNotFoundError), self._folder([RESERVED_SEGMENT]) as uploads:
            for name in os.listdir(uploads):  # noqa: PTH208 - by descriptor, so that no link leads elsewhere
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(name, dir_fd=uploads, follow_symlinks=False).st_mtime <= oldest:
                        os.unlink(name, dir_fd=uploads)
                        swept += 1
        return swept

    def _create(self, key: str, folder: int, name: str, body: Body) -> Receipt:
        """The new object, or the equal one that exists. FileNotFoundError: something vanished in between; begin again."""
        if _is_object(folder, name):
            digest, size = digest_body(body)
            return _settle(key, folder, name, Receipt(key=key, size=size, blake3=digest))
        with self._folder([RESERVED_SEGMENT], create=True) as uploads:
            upload = f"{os.getpid()}-{secrets.token_hex(8)}"
            try:
                hasher = _write(uploads, upload, body)
                receipt = Receipt(key=key, size=hasher.size, blake3=hasher.digest)
                try:
                    os.link(upload, name, src_dir_fd=uploads, dst_dir_fd=folder)
                except FileExistsError:
                    return _settle(key, folder, name, receipt)
                return receipt
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(upload, dir_fd=uploads)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[BinaryIO]:
        *folders, name = check_key(key).split("/")
        try:
            with self._folder(folders) as folder:
                handle = os.open(name, _READ, dir_fd=folder)
        except OSError as error:
            if error.errno in _NO_OBJECT:
                raise KeyError(key) from error
            raise
        if not modes.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise KeyError(key)
        with os.fdopen(handle, "rb") as file:
            yield file

    def _chunks(self, key: str, offset: int) -> Stream:
        with self._reporting(), self._opened(key) as file:
            file.seek(offset)
            yield from read_chunks(file)

    def _walk(self, folders: list[str], beginning: str) -> Iterator[Entry]:
        rows: list[tuple[str, os.stat_result]] = []
        try:
            with self._reporting(), self._folder(folders) as folder, os.scandir(folder) as found:
                rows.extend(row for item in found if item.name.startswith(beginning) and (row := _row(item)) is not None)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, status in sorted(rows, key=lambda row: row[0]):
            key = "/".join([*folders, name])
            if name.endswith("/"):
                yield from self._walk([*folders, name[:-1]], "")
            elif is_key(key):
                yield _entry(key, status)

    @contextlib.contextmanager
    def _folder(self, folders: list[str], *, create: bool = False) -> Iterator[int]:
        """An open descriptor of the folder. With `create`, each is made where missing and its name made durable."""
        try:
            current = os.open(self._root, _FOLDER & ~os.O_NOFOLLOW)
        except OSError as error:
            raise Unavailable(f"store {self.url} cannot be opened: {error.strerror}") from error
        try:
            for segment in folders:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(segment, dir_fd=current)
                    os.fsync(current)  # whoever made it: it may not be synced yet
                below = os.open(segment, _FOLDER, dir_fd=current)
                os.close(current)
                current = below
            yield current
        finally:
            os.close(current)

    def _prune(self, folders: list[str]) -> None:
        """Removes the folders that became empty, deepest first."""
        while folders:
            *folders, name = folders
            try:
                with self._folder(folders) as parent:
                    os.rmdir(name, dir_fd=parent)
            except OSError:  # not empty, or gone already: nothing to tidy, and a later delete tries again
                return

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """What the system says, as an error of ours. Outside of it lies the caller's own file of a download."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                raise  # an answer, which each method understands by itself
            if error.errno in _REFUSALS:
                raise InvalidRequest(f"store: {self.url} refuses: {error.strerror}", field="store") from error
            raise Unavailable(f"store {self.url} failed: {error.strerror}") from error


def _make_folders(root: Path) -> None:
    """Durable too: an object in a folder that a power cut forgets is lost."""
    for folder in [*reversed(root.parents), root]:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)  # fails where it is a file
            handle = os.open(folder.parent, _FOLDER & ~os.O_NOFOLLOW)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _is_object(folder: int, name: str) -> bool:
    """False where there is nothing; NotADirectoryError where there is something else, such as a link."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if not modes.S_ISREG(mode):
        raise NotADirectoryError(errno.ENOTDIR, "no regular file", name)
    return True


def _settle(key: str, folder: int, name: str, wanted: Receipt) -> Receipt:
    """What a put of `wanted` comes to where the name is taken."""
    if not _is_object(folder, name):
        raise FileNotFoundError(errno.ENOENT, "deleted meanwhile", name)
    with os.fdopen(os.open(name, _READ, dir_fd=folder), "rb") as file:
        digest, size = digest_chunks(read_chunks(file))
    if (digest, size) != (wanted.blake3, wanted.size):
        raise VersionConflict(f"object {key!r} exists with blake3 {digest}, not {wanted.blake3}")
    return wanted


def _write(folder: int, name: str, body: Body) -> Hasher:
    hasher = Hasher()
    with os.fdopen(os.open(name, _CREATE, _READ_ONLY_MODE, dir_fd=folder), "wb") as file:
        for chunk in body_chunks(body):
            hasher.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return hasher


def _row(item: os.DirEntry[str]) -> tuple[str, os.stat_result] | None:
    """The name by which a listing orders the item, and its status. A folder sorts with its slash, as its keys do."""
    try:
        status = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if modes.S_ISDIR(status.st_mode):
        return f"{item.name}/", status
    return (item.name, status) if modes.S_ISREG(status.st_mode) else None


def _entry(key: str, status: os.stat_result) -> Entry:
    return Entry(key=key, size=status.st_size, modified_ms=status.st_mtime_ns // 1_000_000)


def open_directory(path: str) -> DirectoryStore:
    """What follows `file://`: absolute, or relative to the working directory of now."""
    if not path or "\0" in path:
        raise InvalidRequest("store: file:// needs a path, as in file:///var/stitch or file://stitch-store", field="store")
    return DirectoryStore(Path(path))
