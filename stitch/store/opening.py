"""`open_store(URL)`: the one place that knows which store a URL means."""

from __future__ import annotations

from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.store.directory import open_directory
from stitch.store.memory import open_memory
from stitch.store.port import BlobStore

_FORMS: Final = "file:///PATH, s3://BUCKET/PREFIX?endpoint=URL&region=R or memory://NAME"


def open_store(url: str) -> BlobStore:
    """The store behind the URL; InvalidRequest names the forms that there are.

    Nothing is asked of a server yet: an S3 store that cannot be reached raises Unavailable at its first use.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidRequest(f"store: not a URL; use {_FORMS}", field="store")
    if scheme == "memory":
        return open_memory(rest)
    if scheme == "file":
        return open_directory(rest)
    if scheme == "s3":
        from stitch.store.s3 import open_s3  # boto3 is an extra, and slow to import

        return open_s3(url)
    raise InvalidRequest(f"store: unknown scheme {scheme[:16]!r}; use {_FORMS}", field="store")
