"""Bearer tokens."""

from __future__ import annotations

import pytest

from stitch.core.errors import InvalidRequest
from stitch.http.auth import Bearer

pytestmark = pytest.mark.unit


def test_open_allows_all() -> None:
    assert Bearer(None).open
    assert Bearer(None).allows([])
    assert Bearer(None).header() == []


def test_only_the_token_is_allowed() -> None:
    bearer = Bearer("s3cret")
    assert bearer.allows(bearer.header())
    assert bearer.allows([(b"authorization", b"bearer s3cret")])
    assert not bearer.allows([])
    assert not bearer.allows([(b"authorization", b"Bearer s3cre")])
    assert not bearer.allows([(b"authorization", b"Basic s3cret")])
    assert not bearer.allows([(b"authorization", b"Bearer \xff")])
    assert not bearer.allows(bearer.header() * 2)


def test_never_shown() -> None:
    assert "s3cret" not in repr(Bearer("s3cret"))
    with pytest.raises(InvalidRequest) as refused:
        Bearer("s3cret with spaces")
    assert "s3cret" not in str(refused.value)
    with pytest.raises(InvalidRequest):
        Bearer("")
