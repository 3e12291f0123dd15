"""Bearer tokens: one per surface, compared in constant time, shown nowhere."""

from __future__ import annotations

import hmac
import re
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.http.headers import RawHeaders

AUTHORIZATION: Final = b"authorization"

_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}\Z")


class Bearer:
    """Who may use a surface: all where the token is None, else those who send it."""

    __slots__ = ("_token",)

    def __init__(self, token: str | None) -> None:
        """Raises InvalidRequest where the token could not stand in a header; the message does not repeat it."""
        if token is not None and not _TOKEN.match(token):
            raise InvalidRequest("token: not 1 to 4096 printable ASCII characters without a space", field="token")
        self._token = None if token is None else token.encode("ascii")

    def __repr__(self) -> str:
        return f"Bearer({'open' if self._token is None else '***'})"

    @property
    def open(self) -> bool:
        """Whether no token is asked for."""
        return self._token is None

    def allows(self, headers: RawHeaders) -> bool:
        """Whether the request carries the token. Two Authorization headers are none."""
        if self._token is None:
            return True
        given = [value for name, value in headers if name == AUTHORIZATION]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)

    def header(self) -> list[tuple[bytes, bytes]]:
        """What a client of the surface sends; nothing where it is open."""
        return [] if self._token is None else [(AUTHORIZATION, b"Bearer " + self._token)]
