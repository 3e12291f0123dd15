"""The port BlobStore: immutable objects under keys.

Blocking by design: its work is disk, network and hashing, which run in threads whoever calls. Promises that one behaviour suite
checks on every implementation:

- An object appears whole or not at all, and is durable when `put` returns.
- A `put` is create-once. The same bytes again are no error; other bytes under a key are a VersionConflict, and the first stay.
- What is read is verified against the digest that the caller expects, while it streams.
- Any method raises Unavailable where the store cannot be reached; every one of them may then be called again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from stitch.core.errors import Unavailable
from stitch.core.ids import Digest

MAX_KEY_BYTES: Final = 900
MAX_SEGMENT_BYTES: Final = 255

Body = bytes | memoryview | Path
"""What is uploaded: bytes in memory, or a file that does not change meanwhile. Either can be read again for a retry."""


Cancelled = Callable[[], bool]


def never() -> bool:
    return False


class PutCancelled(Unavailable):
    """Nobody waits for the object any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What the store holds under a key. `size` in bytes."""

    key: str
    size: int
    blake3: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row of a listing. `modified_ms` is the store's clock, not to be compared with any other."""

    key: str
    size: int
    modified_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What a store was found to do on trial, beyond what the methods of the port show.

    `checksums`: it refuses bytes that do not fit the checksum sent with them. `conditional_parts`: large objects are created once,
    too. `clock_skew_s`: how far its clock is ahead; None where there is but one clock.
    """

    checksums: bool = True
    conditional_parts: bool = True
    clock_skew_s: float | None = None


class BlobStore(ABC):
    """A prefix of a store. Keys are relative to it, `/`-separated, and cannot leave it. Safe for concurrent use by threads."""

    @property
    @abstractmethod
    def url(self) -> str:
        """As it may be shown: without secrets."""

    @abstractmethod
    def put(self, key: str, body: Body) -> Receipt:
        """Creates the object; see above for a key that exists."""

    @abstractmethod
    def put_named(self, key_of: Callable[[Digest], str], body: Body, *, cancelled: Cancelled = never) -> Receipt:
        """As `put`, under the key that `key_of` makes of the body's digest, so that a store may read the body only once.

        CorruptObject where the body changes meanwhile. `cancelled` is asked between the pieces of a large body: PutCancelled where
        it says so, and what was begun is undone.
        """

    @abstractmethod
    def get(self, key: str, *, limit: int, expect: Digest | None = None) -> bytes:
        """The whole object, of at most `limit` bytes. KeyError where there is none; CorruptObject where it is longer or differs
        from `expect`."""

    @abstractmethod
    def download(self, expect: Receipt, path: Path) -> None:
        """The object of `expect.key` into the file `path`, verified against size and digest while it streams.

        A part left in the file by an earlier, interrupted call is checked and continued. KeyError where there is no object;
        CorruptObject where it differs, and then the file is removed.
        """

    @abstractmethod
    def stat(self, key: str) -> Entry | None:
        """The object's entry, or None."""

    @abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """All objects whose key begins with `prefix`, in key order."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes the object; none under the key is no error."""

    def sweep(self, older_than_s: float) -> int:
        """Removes what uploads that never ended left behind, where they began (or were last written to) so many seconds ago;
        returns how many. What is still under way and older fails, so the age must be longer than any upload takes."""
        return 0

    def trials(self, prefix: str) -> Trials:
        """Tries what lies between this process and the store's disk, and may leave the objects `mangled` and `parts` below the
        prefix. A store of this machine has nothing in between."""
        return Trials()

    def close(self) -> None:  # noqa: B027 # a store that holds nothing has nothing to do here
        """Frees what the store holds. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
