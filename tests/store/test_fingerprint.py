"""Part checksums and digest from one reading."""

from __future__ import annotations

import base64
import secrets
import zlib
from pathlib import Path

import pytest

from stitch.core.errors import CorruptObject
from stitch.store.fingerprint import crc32, fingerprint, read_part
from stitch.store.hashing import CHUNK_BYTES, digest_bytes

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 3000, CHUNK_BYTES + 1])
@pytest.mark.parametrize("part_bytes", [1000, CHUNK_BYTES, 3 * CHUNK_BYTES])
@pytest.mark.parametrize("as_file", [False, True])
def test_as_if_each_part_was_read_alone(tmp_path: Path, size: int, part_bytes: int, as_file: bool) -> None:
    data = secrets.token_bytes(size)
    file = tmp_path / "file"
    file.write_bytes(data)
    found = fingerprint(file if as_file else data, part_bytes)
    assert (found.blake3, found.size) == (digest_bytes(data), size)
    parts = [data[at : at + part_bytes] for at in range(0, size, part_bytes)] or [b""]
    assert found.checksums == tuple(base64.b64encode(zlib.crc32(part).to_bytes(4, "big")).decode() for part in parts)
    assert found.checksums == tuple(map(crc32, parts))


def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_part(file, 2, 3) == b"345"
    with pytest.raises(CorruptObject, match="changed"):
        read_part(file, 2, 4)
