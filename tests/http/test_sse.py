"""Server-sent events: cut at any place, nothing changes but what is rewritten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.core.errors import InvalidRequest
from stitch.http.sse import SseEvent, SseParser, event

pytestmark = pytest.mark.unit


def parse(stream: bytes, cuts: list[int] | None = None) -> tuple[list[SseEvent], bytes]:
    parser = SseParser()
    events, at = [], 0
    for cut in sorted(c % (len(stream) + 1) for c in cuts or []):
        events += parser.feed(stream[at:cut])
        at = cut
    events += parser.feed(stream[at:])
    return events, parser.rest()


def test_openai_stream() -> None:
    events, rest = parse(b'data: {"a":1}\n\ndata: {"a":2}\n\ndata: [DONE]\n\n')
    assert [e.data for e in events] == [b'{"a":1}', b'{"a":2}', b"[DONE]"]
    assert [e.done for e in events] == [False, False, True]
    assert rest == b""


def test_other_fields_comments_and_line_ends() -> None:
    events, rest = parse(b": hi\n\nid: 7\r\nevent: x\r\ndata:a\r\ndata: b\r\n\r\ndata: c\r\rdata: unfinished")
    assert [e.data for e in events] == [None, b"a\nb", b"c"]
    assert events[1].with_data(b"new\nlines").raw == b"id: 7\nevent: x\ndata: new\ndata: lines\n\n"
    assert rest == b"data: unfinished"


def test_bounded() -> None:
    parser = SseParser(limit=100)
    assert parser.feed(b"x" * 100) == []
    with pytest.raises(InvalidRequest):
        parser.feed(b"x")


def test_event() -> None:
    encoded = event(b"a\nb", name="n", id="s/1")
    assert encoded == b"id: s/1\nevent: n\ndata: a\ndata: b\n\n"
    assert parse(encoded)[0][0].data == b"a\nb"


PIECES = st.lists(
    st.sampled_from([b"data: x", b"data:y", b"id: 1", b": c", b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", b"", b"z"])
)


@given(PIECES, st.lists(st.integers(0, 10_000)))
def test_any_cut_gives_the_same_bytes_and_events(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    whole, whole_rest = parse(stream)
    events, rest = parse(stream, cuts)
    assert b"".join(e.raw for e in events) + rest == stream
    assert b"".join(e.raw for e in whole) + whole_rest == stream
    assert [e.data for e in events if e.data is not None] == [e.data for e in whole if e.data is not None]


@given(st.binary(max_size=60).filter(lambda b: b"\r" not in b and not b.startswith(b" ")))
def test_rewritten_data_is_read_back(data: bytes) -> None:
    rewritten = SseEvent(b"event: e\ndata: old\n\n").with_data(data)
    [found], rest = parse(rewritten.raw)
    assert found.data == data
    assert rest == b""
