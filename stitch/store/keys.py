"""What a key may be, the same for every store.

Keys come from manifests, thus from outside: a key that passes here is safe as a relative path of any POSIX file system and as
an S3 key, and cannot leave its prefix. A key must not be a folder of another (`x` beside `x/y`): trees refuse that.
"""

from __future__ import annotations

from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.store.port import MAX_KEY_BYTES, MAX_SEGMENT_BYTES

RESERVED_SEGMENT: Final = ".stitch-uploads"
"""Where the directory store keeps unfinished files. No key begins with it, in any store, so that objects move between them."""

_SHOWN: Final = 64
"""Characters of a refused key in the message: enough to find it, whatever was sent."""


def check_key(key: str) -> str:
    """The key itself, or InvalidRequest that names `key`."""
    segments = _checked_segments(key)
    for segment in segments:
        _check_segment(key, segment)
    if segments[0] == RESERVED_SEGMENT:
        raise _refused(key, f"{RESERVED_SEGMENT} is reserved")
    return key


def check_prefix(prefix: str) -> str:
    """The beginning of keys, perhaps empty or cut within a segment; or InvalidRequest that names `key`."""
    if prefix:
        *folders, _cut = _checked_segments(prefix)
        for segment in folders:
            _check_segment(prefix, segment)
    return prefix


def is_key(key: str) -> bool:
    """Whether a name found in a store can be a key; what is none was put there by others."""
    try:
        check_key(key)
    except InvalidRequest:
        return False
    return True


def folders_of(key: str) -> list[str]:
    """`a`, `a/b` for `a/b/c`."""
    parts = key.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def tree_conflict(key: str) -> InvalidRequest:
    """The refusal of a key that is a folder of an existing one, or lies below an object."""
    return _refused(key, "a folder stands where the object would, or something else where it needs a folder")


def _checked_segments(key: str) -> list[str]:
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise _refused(key, "it is not valid Unicode") from error
    if size > MAX_KEY_BYTES:
        raise _refused(key, f"it is longer than {MAX_KEY_BYTES} bytes")
    if any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c == "\\" for c in key):
        raise _refused(key, "it has a control character or a backslash")
    return key.split("/")


def _check_segment(key: str, segment: str) -> None:
    if segment in ("", ".", ".."):
        raise _refused(key, "it has an empty, `.` or `..` segment")
    if len(segment.encode()) > MAX_SEGMENT_BYTES:
        raise _refused(key, f"it has a segment of more than {MAX_SEGMENT_BYTES} bytes")


def _refused(key: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"key: {key[:_SHOWN]!r} is refused: {reason}", field="key")
