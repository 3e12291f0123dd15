"""All that an upload has to know of its bytes, from reading them once: blake3 of the whole and CRC-32 of each part.

CRC-32 is what every S3 server checks (boto3 sends it by default), at a third of SHA-256's cost on both sides. It is there against
bytes mangled on the way; against all else there is the blake3, which every reader checks.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from pathlib import Path

from stitch.core.errors import CorruptObject
from stitch.core.ids import Digest
from stitch.store.hashing import Hasher, body_chunks, until_cancelled
from stitch.store.port import Body, Cancelled, never


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """`checksums`: CRC-32 of each `part_bytes` of the body, the last one shorter, as S3 writes them. An empty body has one part."""

    blake3: Digest
    size: int
    part_bytes: int
    checksums: tuple[str, ...]


def body_size(body: Body) -> int:
    """Bytes, of a checked body."""
    return body.stat().st_size if isinstance(body, Path) else len(body)


def crc32(data: bytes | memoryview) -> str:
    """As S3 writes it."""
    return _written(zlib.crc32(data))


def fingerprint(body: Body, part_bytes: int, cancelled: Cancelled = never) -> Fingerprint:
    """Of a checked body. Raises PutCancelled."""
    hasher = Hasher()
    checksums: list[str] = []
    crc, room = 0, part_bytes
    for chunk in until_cancelled(body_chunks(body), cancelled):
        hasher.update(chunk)
        view = memoryview(chunk)
        while len(view) >= room:
            checksums.append(_written(zlib.crc32(view[:room], crc)))
            view, crc, room = view[room:], 0, part_bytes
        crc = zlib.crc32(view, crc)
        room -= len(view)
    if room < part_bytes or not checksums:
        checksums.append(_written(crc))
    return Fingerprint(blake3=hasher.digest, size=hasher.size, part_bytes=part_bytes, checksums=tuple(checksums))


def read_part(body: Body, start: int, length: int) -> bytes | memoryview:
    """The bytes of one part. CorruptObject where the file became shorter."""
    if not isinstance(body, Path):
        return memoryview(body)[start : start + length]
    with body.open("rb") as file:
        file.seek(start)
        data = file.read(length)
    if len(data) != length:
        raise changed(body)
    return data


def changed(body: Body) -> CorruptObject:
    return CorruptObject(f"{body if isinstance(body, Path) else 'the body'} was changed while it was uploaded")


def _written(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
