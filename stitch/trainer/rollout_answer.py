"""What a gateway or a replica answers to a rollout request, read into an `Answer` or an error of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stitch.core.errors import InvalidRequest, Rejected, StitchError, Unavailable, VersionGone, WeightVersionNotReady
from stitch.core.ids import VersionRef, policy_id, run_id, version_number
from stitch.http import headers as names
from stitch.http.headers import RawHeaders, find, raw

SHOWN: Final = 500
"""Characters of a message from outside that an error repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A generated text and the versions that computed it.

    `spans` are (version, start, end): output tokens [start, end) are that version's. Numbers are of `run`. `raw` is the
    engine's own answer (of a stream: its last event), with whatever else was asked for, such as log-probabilities.
    """

    text: str
    output_ids: tuple[int, ...]
    version_start: int
    version_end: int
    spans: tuple[tuple[int, int, int], ...]
    policy: str | None
    run: str | None
    replica: str | None
    request_id: str
    raw: Mapping[str, Any]

    @property
    def ref(self) -> VersionRef | None:
        """The version of the last token, where the answer named its policy and run."""
        if self.policy is None or self.run is None:
            return None
        return VersionRef(policy=policy_id(self.policy), run=run_id(self.run), number=version_number(self.version_end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An answer that is none. `started`: generation may have begun, so that a retry may compute it twice."""

    error: StitchError
    retryable: bool
    started: bool
    retry_after: float | None


def read_answer(headers: RawHeaders, body: Mapping[str, Any], request_id: str) -> Answer:
    """Of a whole answer, or of a stream's last event. Raises StitchError where it says no versions."""
    meta = body.get("meta_info")
    meta = meta if isinstance(meta, Mapping) else {}
    try:
        start = int(meta["weight_version_start"] if "weight_version_start" in meta else _text(headers, names.VERSION_START) or "")
        end = int(meta.get("weight_version_end", start))
        spans = tuple((int(s["version"]), int(s["start"]), int(s["end"])) for s in meta.get("weight_versions") or ())
        output_ids = tuple(int(token) for token in body.get("output_ids") or ())
    except (KeyError, TypeError, ValueError) as error:
        raise StitchError(
            f"the answer does not tell the versions that computed it ({error!r}); is this a Stitch gateway?"
        ) from error
    return Answer(
        text=str(body.get("text") or ""),
        output_ids=output_ids,
        version_start=start,
        version_end=end,
        spans=spans,
        policy=_text(headers, names.POLICY),
        run=_text(headers, names.RUN),
        replica=_text(headers, names.REPLICA),
        request_id=_text(headers, names.REQUEST_ID) or request_id,
        raw=body,
    )


def read_json(data: bytes) -> Mapping[str, Any]:
    """An object. Raises StitchError where it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StitchError(f"the answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StitchError("the answer is not a JSON object")
    return value


def read_refusal(status: int, headers: RawHeaders, data: bytes) -> Refusal:
    """Of any status but 200. What is no answer of Stitch, a load balancer's own 502 for one, counts as started."""
    try:
        told = read_json(data).get("error")
    except StitchError:
        told = None
    return refusal_of(status, told if isinstance(told, Mapping) else {}, headers)


def refusal_of(status: int, told: Mapping[str, Any], headers: RawHeaders = ()) -> Refusal:
    """The meaning of a status and an `error` object; of an error in the midst of a stream too."""
    message = str(told.get("message") or f"HTTP {status}")[:SHOWN]
    retry_after = _seconds(_text(headers, "Retry-After"))
    retryable = told.get("retryable") is True
    started = status >= 500 and told.get("generation_started") is not False
    return Refusal(
        error=_error(status, told, message, retryable=retryable, retry_after=retry_after),
        retryable=retryable or status == 429,
        started=started,
        retry_after=retry_after,
    )


def _error(status: int, told: Mapping[str, Any], message: str, *, retryable: bool, retry_after: float | None) -> StitchError:
    match status:
        case 400 | 413 | 422:
            field = told.get("field")
            return InvalidRequest(message, field=field if isinstance(field, str) else None)
        case 409 if retryable:
            return WeightVersionNotReady(message, retry_after=retry_after)
        case 410:
            return VersionGone(message)
        case 429 | 502 | 503 | 504:
            return Unavailable(message)
        case _ if 400 <= status < 500:
            return Rejected(f"HTTP {status}: {message}")
        case _:
            return StitchError(f"HTTP {status}: {message}")


def _text(headers: RawHeaders, name: str) -> str | None:
    value = find(headers, raw(name))
    return None if value is None else value.decode("latin-1")


def _seconds(text: str | None) -> float | None:
    """Retry-After in its form of seconds; a date is left out, since clocks differ."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 9 else None
