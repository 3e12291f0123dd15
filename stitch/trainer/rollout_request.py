"""A rollout request: what may be asked for, how it is sent, and the bookkeeping of its retries."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

from stitch.core.errors import InvalidRequest, Unavailable
from stitch.core.ids import VersionRef, channel_name
from stitch.http import headers as names
from stitch.http.headers import raw
from stitch.http.upstream import UpstreamError

GENERATE_SECONDS: Final = 600.0
"""A long chain of thought on a busy fleet, with an update in between."""
RETRY_SECONDS: Final = (0.25, 5.0)
"""First and longest pause where the server named none."""
JITTER: Final = 0.25
"""Of a pause, on top: workers that were refused together do not come back together."""
WAIT_SHARE: Final = 0.9
"""Of the time that is left, what may be waited before the next answer, by a gateway or by a pause: it should still arrive."""

VersionLike = int | str | VersionRef
"""A number of the run, or `run/weight_v000007`."""


class Request(TypedDict, total=False):
    """The arguments of `generate`; what they mean is said there."""

    prompt: str | None
    input_ids: Sequence[int] | None
    sampling_params: Mapping[str, Any] | None
    channel: str | None
    min_version: VersionLike | None
    exact_version: VersionLike | None
    max_lag: int | None
    wait: float | None
    session: str | None
    timeout: float
    extra: Mapping[str, Any] | None


class Call:
    """One request with all its retries, under one deadline. A request id names one generation at most."""

    def __init__(self, headers: Mapping[str, object], body: bytes, *, wait: float | None, timeout: float) -> None:
        """`headers` by name; None is not sent. Raises InvalidRequest for a value that cannot stand in a header."""
        self.body: Final = body
        self._headers = [(raw(name), _value(name, value)) for name, value in headers.items() if value is not None]
        self._wait = wait
        self._deadline = time.monotonic() + timeout
        self._chain = uuid.uuid4().hex
        self._tries = 0
        self._generations = 0

    @property
    def request_id(self) -> str:
        """Of the present try. Those of one call begin alike."""
        return self._chain if self._generations == 0 else f"{self._chain}:{self._generations}"

    @property
    def remaining(self) -> float:
        """Seconds to the deadline, never negative."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of the present try."""
        headers = [*self._headers, (raw(names.REQUEST_ID), self.request_id.encode())]
        if self._wait is not None:
            headers.append((raw(names.WAIT), f"{min(self._wait, WAIT_SHARE * self.remaining):.3f}".encode()))
        return headers

    def pause(self, retry_after: float | None) -> float | None:
        """Seconds before the next try, at least what the server asked for; None where that leaves no time for its answer."""
        own = min(RETRY_SECONDS[0] * 2.0 ** min(self._tries, 10), RETRY_SECONDS[1])
        pause = (own if retry_after is None else retry_after) * (1.0 + random.uniform(0.0, JITTER))  # noqa: S311 # no secret
        return pause if pause < WAIT_SHARE * self.remaining else None

    def again(self, *, started: bool) -> None:
        """Counts a try that was refused. Where its generation may have begun, the next one has an id of its own."""
        self._tries += 1
        self._generations += started

    def late(self) -> Unavailable:
        return Unavailable(f"request {self.request_id}: not answered to its end before the deadline; it was cancelled")

    def lost(self, error: UpstreamError) -> Unavailable:
        state = "generation may have begun" if error.may_have_started else "nothing was sent"
        return Unavailable(f"request {self.request_id}: {error} ({state})")


def version_headers(
    channel: str | None, least: VersionLike | None, exact: VersionLike | None, max_lag: int | None
) -> dict[str, object]:
    """What is asked of the version."""
    return {
        names.CHANNEL: None if channel is None else channel_name(channel),
        names.MIN_VERSION: least,
        names.EXACT_VERSION: exact,
        names.MAX_LAG: max_lag,
    }


def needs_run(*versions: VersionLike | None) -> bool:
    """Whether there is a number, and none of them says of which run."""
    return any(isinstance(v, int) for v in versions) and not any(isinstance(v, str | VersionRef) for v in versions)


def encode_body(
    prompt: str | None,
    input_ids: Sequence[int] | None,
    sampling_params: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
    *,
    stream: bool,
) -> bytes:
    """The body of `/generate`. Raises InvalidRequest naming the argument."""
    if (prompt is None) == (input_ids is None):
        raise InvalidRequest("prompt: give either prompt or input_ids", field="prompt")
    body: dict[str, Any] = {**(extra or {}), "sampling_params": dict(sampling_params or {})}
    if prompt is not None:
        body["text"] = prompt
    if input_ids is not None:
        body["input_ids"] = [int(token) for token in input_ids]
    if stream:
        body["stream"] = True
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"sampling_params: not representable as JSON: {error}", field="sampling_params") from error


def _value(name: str, value: object) -> bytes:
    """The server checks what a value means; here only what could end the header."""
    text = str(value)
    if not text.isprintable() or not text.isascii():
        field = name.removeprefix("X-Stitch-").lower().replace("-", "_")
        raise InvalidRequest(f"{field}: not printable ASCII", field=field)
    return text.encode("ascii")
