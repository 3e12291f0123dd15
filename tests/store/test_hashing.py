"""Digests against published values, and in bounded pieces."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stitch.core.errors import InvalidRequest
from stitch.store.hashing import CHUNK_BYTES, Hasher, body_chunks, checked_body, digest_body, digest_bytes, digest_file

pytestmark = pytest.mark.unit

EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
ABC = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"


def test_known_digests() -> None:
    assert digest_bytes(b"") == EMPTY
    assert digest_bytes(b"abc") == ABC
    assert digest_bytes(memoryview(b"-abc-")[1:4]) == ABC


def test_bytes_file_and_stream_agree(tmp_path: Path) -> None:
    data = random.Random(7).randbytes(2 * CHUNK_BYTES + 17)
    path = tmp_path / "file"
    path.write_bytes(data)
    expected = (digest_bytes(data), len(data))
    assert digest_file(path) == digest_body(path) == digest_body(data) == digest_body(memoryview(data)) == expected
    for body in (path, data, memoryview(data)):
        hasher = Hasher()
        for chunk in body_chunks(body):
            assert len(chunk) <= CHUNK_BYTES
            hasher.update(chunk)
        assert (hasher.digest, hasher.size) == expected


def test_views_of_any_form_become_bytes(tmp_path: Path) -> None:
    assert digest_body(checked_body(memoryview(b"-a-b-c")[1::2])) == (ABC, 3)
    assert digest_body(checked_body(memoryview(b"\x01\x00\x02\x00").cast("H"))) == (digest_bytes(b"\x01\x00\x02\x00"), 4)
    with pytest.raises(InvalidRequest):
        checked_body(tmp_path)
