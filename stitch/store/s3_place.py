"""What an S3 store's URL says: `s3://BUCKET/PREFIX?endpoint=URL&region=R&addressing=path`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from stitch.core.errors import InvalidRequest
from stitch.store.keys import is_key
from stitch.store.port import MAX_KEY_BYTES

_MAX_PREFIX_BYTES: Final = 1024 - MAX_KEY_BYTES - 1
"""S3 allows a whole key 1,024 bytes; one is the slash between."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_REGION = re.compile(r"[a-z0-9-]{1,64}\Z")


class Addressing(StrEnum):
    """Where the bucket stands in a request's address."""

    PATH = "path"
    """https://host/bucket/key: what servers of one's own mostly want."""
    VIRTUAL = "virtual"
    """https://bucket.host/key: what AWS and most clouds want."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Place:
    """`prefix` is empty or ends with a slash; `endpoint` None means AWS itself.

    `addressing` None is path-style where an endpoint is given, and what botocore finds right where none is.
    """

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None
    addressing: Addressing | None = None

    @property
    def url(self) -> str:
        query = "&".join(
            f"{name}={quote(value, safe=':/')}"
            for name, value in (("endpoint", self.endpoint), ("region", self.region), ("addressing", self.addressing))
            if value is not None
        )
        place = quote(f"{self.bucket}/{self.prefix}".rstrip("/"))
        return f"s3://{place}?{query}" if query else f"s3://{place}"


def parse_s3(url: str) -> S3Place:
    """The place that a URL names (the form is above); InvalidRequest says which part is wrong, without repeating it."""
    try:
        parts = urlsplit(url)
        prefix = unquote(parts.path, errors="strict").strip("/")
    except ValueError as error:
        raise _bad("not a URL of the form s3://BUCKET/PREFIX?endpoint=URL&region=R&addressing=path|virtual") from error
    if "@" in parts.netloc:
        raise _bad("credentials do not belong into the URL; boto3 finds them in the environment or its files")
    if not _BUCKET.match(parts.netloc):
        raise _bad("s3:// needs a bucket's name of 3 to 63 of a-z 0-9 . -")
    if parts.fragment:
        raise _bad("an s3:// URL has no fragment")
    if prefix and (not is_key(prefix) or len(prefix.encode()) > _MAX_PREFIX_BYTES):
        raise _bad(f"the prefix must be a key of at most {_MAX_PREFIX_BYTES} bytes, without empty or dotted segments")
    given = _parameters(parts.query)
    endpoint, region = given.get("endpoint"), given.get("region")
    if endpoint is not None:
        _check_endpoint(endpoint)
    if region is not None and not _REGION.match(region):
        raise _bad("region is not a region's name")
    return S3Place(
        bucket=parts.netloc,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=endpoint,
        region=region,
        addressing=_addressing(given.get("addressing")),
    )


def _parameters(query: str) -> dict[str, str]:
    found = parse_qsl(query, keep_blank_values=True)
    names = [name for name, _ in found]
    if not set(names) <= {"endpoint", "region", "addressing"} or len(names) > len(set(names)):
        raise _bad("an s3:// URL takes endpoint, region and addressing, each once, and nothing else")
    return dict(found)


def _addressing(name: str | None) -> Addressing | None:
    if name is None:
        return None
    try:
        return Addressing(name)
    except ValueError:
        raise _bad("addressing is path or virtual") from None


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        parts.port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise _bad("endpoint is not a URL") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _bad("endpoint must be an http:// or https:// URL")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise _bad("endpoint must hold a host, a port and perhaps a path, and no credentials")


def _bad(reason: str) -> InvalidRequest:
    return InvalidRequest(f"store: {reason}", field="store")
