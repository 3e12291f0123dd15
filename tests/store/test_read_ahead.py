"""Ranges in order, within their bound, however many downloads share them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stitch.core.errors import Unavailable
from stitch.store.hashing import Stream
from stitch.store.read_ahead import RANGES_AT_ONCE, RANGES_HELD, ReadAhead

pytestmark = pytest.mark.unit

RANGE = 10
CHUNK = 3


class Source:
    """An object in memory whose ranges are counted while they are fetched."""

    def __init__(self, data: bytes, *, pause: float = 0.0) -> None:
        self.data, self.pause = data, pause
        self.asked: list[tuple[int, int | None]] = []
        self.under_way = self.most = 0
        self.broken_from: int | None = None
        self._lock = threading.Lock()

    def fetch(self, start: int, end: int | None) -> Stream:
        with self._lock:
            self.asked.append((start, end))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            time.sleep(self.pause)
            if self.broken_from is not None and start >= self.broken_from:
                raise Unavailable("broken")
            part = self.data[start:end]
            for at in range(0, len(part), CHUNK):
                yield part[at : at + CHUNK]
        finally:
            with self._lock:
                self.under_way -= 1


@pytest.fixture
def ahead() -> Iterator[ReadAhead]:
    made = ReadAhead(range_bytes=RANGE)
    yield made
    assert made._room._value == RANGES_HELD, "room was lost"
    made.close()


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 555])
@pytest.mark.parametrize("start", [0, 1, 10, 17])
def test_all_bytes_in_order(ahead: ReadAhead, size: int, start: int) -> None:
    source = Source(secrets.token_bytes(size))
    assert b"".join(ahead.stream(source.fetch, start, size)) == source.data[start:]


@pytest.mark.parametrize("start", [0, 35])
def test_what_is_shorter_ends_and_what_is_longer_shows(ahead: ReadAhead, start: int) -> None:
    source = Source(secrets.token_bytes(100))
    assert b"".join(ahead.stream(source.fetch, start, 155)) == source.data[start:]
    longer = b"".join(ahead.stream(source.fetch, start, 84))
    assert len(longer) > 84 - start
    assert source.data[start:].startswith(longer)


def test_no_more_than_its_length_of_an_endless_object_is_held(ahead: ReadAhead) -> None:
    source = Source(bytes(100_000))
    assert sum(map(len, ahead.stream(source.fetch, 0, 25))) < 25 + 2 * CHUNK


def test_a_break_ends_the_stream_after_what_came_before(ahead: ReadAhead) -> None:
    source = Source(secrets.token_bytes(200))
    source.broken_from = 70
    got = b""
    with pytest.raises(Unavailable):  # noqa: PT012 - what came before it matters
        for chunk in ahead.stream(source.fetch, 0, 200):
            got += chunk
    assert got == source.data[:70]


def test_a_stream_that_is_closed_leaves_nothing_under_way(ahead: ReadAhead) -> None:
    source = Source(bytes(10_000), pause=0.005)
    stream = ahead.stream(source.fetch, 0, 10_000)
    next(stream)
    stream.close()
    assert source.under_way == 0
    assert len(source.asked) <= 1 + RANGES_AT_ONCE


def test_downloads_share_their_room(ahead: ReadAhead) -> None:
    """More of them than there is room for: all end, and no more than one range each is fetched beside what is held."""
    downloads = 2 * RANGES_HELD
    source = Source(secrets.token_bytes(300), pause=0.001)
    with ThreadPoolExecutor(downloads) as pool:
        futures = [pool.submit(lambda: b"".join(ahead.stream(source.fetch, 0, 300))) for _ in range(downloads)]
        assert all(future.result(60) == source.data for future in futures)
    assert source.most <= downloads + RANGES_AT_ONCE
