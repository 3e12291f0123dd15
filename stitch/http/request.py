"""What a request asks for: policy, channel, constraint, wait, session.

Headers and body are read apart and merged; a contradiction between the two is refused. Whatever a value looks like, the outcome
is a `RequestSpec`, or InvalidRequest whose `field` names the part: never another error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from stitch.core.admission import Constraint
from stitch.core.errors import InvalidRequest
from stitch.core.ids import (
    ChannelName,
    PolicyId,
    RunId,
    VersionNumber,
    channel_name,
    parse_version,
    policy_id,
    run_id,
    version_number,
)
from stitch.engines.port import RouteKind
from stitch.http import headers as names
from stitch.http.headers import RawHeaders, raw

MAX_WAIT_SECONDS: Final = 3600.0
"""Longest wait for a version that a request may ask for; past an hour, ask again."""
MAX_SESSION: Final = 256
"""Longest session name, in bytes."""
SHOWN: Final = 64
"""Characters of a refused value that an error repeats."""

_NUMBER = re.compile(r"[0-9]{1,17}\Z")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?\Z")
_PRINTABLE = re.compile(rb"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?\Z")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")
_BODY_FIELDS: Final = frozenset({"min_version", "exact_version", "run"})
_NO_POLICY: Final = PolicyId("")
"""`parse_version` wants a policy; only run and number of its answer are used here."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a request asks for; None is left to the defaults. `wait` is in seconds."""

    policy: PolicyId | None = None
    channel: ChannelName | None = None
    constraint: Constraint = field(default_factory=Constraint)
    wait: float | None = None
    session: str | None = None
    request_id: str | None = None


def parse_headers(headers: RawHeaders) -> RequestSpec:
    """The part that headers ask for. Raises InvalidRequest, naming the header."""
    given = _given(headers)
    if not given:
        return RequestSpec()
    least = _versions(given, names.MIN_VERSION, "min_version")
    exact = _versions(given, names.EXACT_VERSION, "exact_version")
    run = _one(given, names.RUN, "run", run_id)
    return RequestSpec(
        policy=_one(given, names.POLICY, "policy", policy_id),
        channel=_one(given, names.CHANNEL, "channel", channel_name),
        constraint=_constraint(run, least, exact, max_lag=_one(given, names.MAX_LAG, "max_lag", _max_lag)),
        wait=_one(given, names.WAIT, "wait", _wait),
        session=_session(given),
        request_id=_request_id(given),
    )


def parse_body(kind: RouteKind, body: Mapping[str, Any]) -> RequestSpec:
    """The part that a JSON body asks for: `weight_version`, and on the OpenAI routes `model`. Raises InvalidRequest."""
    run, least, exact = _weight_version(body.get("weight_version"))
    policy, channel = None, None
    if kind is not RouteKind.GENERATE and body.get("model") is not None:
        policy, channel, named = _model(body["model"])
        if named is not None:
            if exact is not None and exact[1] != named[1]:
                raise InvalidRequest("model: it names another version than weight_version.exact_version", field="model")
            run_of_model, run_of_exact = named[0], exact[0] if exact else None
            exact = (_agreed("run", run_of_model, run_of_exact), named[1])
    return RequestSpec(policy=policy, channel=channel, constraint=_constraint(run, least, exact))


def merge(headers_spec: RequestSpec, body_spec: RequestSpec) -> RequestSpec:
    """Both together. Raises InvalidRequest where they contradict each other, naming the field."""
    if body_spec == _NOTHING:
        return headers_spec
    first, second = headers_spec.constraint, body_spec.constraint
    constraint = Constraint(
        run=_agreed("run", first.run, second.run),
        min_version=_agreed("min_version", first.min_version, second.min_version),
        exact_version=_agreed("exact_version", first.exact_version, second.exact_version),
        max_lag=_agreed("max_lag", first.max_lag, second.max_lag),
    )
    _check_order(constraint.min_version, constraint.exact_version)
    return replace(
        headers_spec,
        policy=_agreed("policy", headers_spec.policy, body_spec.policy),
        channel=_agreed("channel", headers_spec.channel, body_spec.channel),
        constraint=constraint,
        wait=_agreed("wait", headers_spec.wait, body_spec.wait),
        session=_agreed("session", headers_spec.session, body_spec.session),
        request_id=_agreed("request_id", headers_spec.request_id, body_spec.request_id),
    )


_NOTHING: Final = RequestSpec()

_Version = tuple[RunId | None, VersionNumber]


def _constraint(run: RunId | None, least: _Version | None, exact: _Version | None, *, max_lag: int | None = None) -> Constraint:
    for part, version in (("min_version", least), ("exact_version", exact)):
        if version is not None and version[0] is not None:
            if run is not None and run != version[0]:
                raise InvalidRequest(f"{part}: a version of run {version[0]!r}, but the run asked for is {run!r}", field=part)
            run = version[0]
    constraint = Constraint(
        run=run,
        min_version=None if least is None else least[1],
        exact_version=None if exact is None else exact[1],
        max_lag=max_lag,
    )
    _check_order(constraint.min_version, constraint.exact_version)
    return constraint


def _check_order(least: VersionNumber | None, exact: VersionNumber | None) -> None:
    if least is not None and exact is not None and exact < least:
        raise InvalidRequest(f"exact_version: {exact} is below min_version {least}", field="exact_version")


def _agreed(part: str, first: T | None, second: T | None) -> T | None:
    if first is not None and second is not None and first != second:
        raise InvalidRequest(f"{part}: the request asks for two different ones", field=part)
    return second if first is None else first


# --- headers ---------------------------------------------------------------------------------------------------------------

READ_HEADERS: Final = {
    raw(name): name
    for name in (
        names.POLICY,
        names.CHANNEL,
        names.RUN,
        names.MIN_VERSION,
        names.EXACT_VERSION,
        names.MAX_LAG,
        names.WAIT,
        names.SESSION,
        *names.SESSION_ALIASES,
        names.REQUEST_ID,
    )
}
"""As they stand in a request -> as they are named here: what `parse_headers` reads, and so what a gateway writes anew."""


def _given(headers: RawHeaders) -> dict[str, bytes]:
    given: dict[str, bytes] = {}
    for key, value in headers:
        name = READ_HEADERS.get(key)
        if name is None:
            continue
        value = value.strip()
        if given.setdefault(name, value) != value:
            part = _part(name)
            raise InvalidRequest(f"{part}: header {name} is given twice, with different values", field=part)
    return given


def _part(name: str) -> str:
    if name in names.SESSION_ALIASES:
        return "session"
    return name.removeprefix("X-Stitch-").lower().replace("-", "_")


def _one(given: Mapping[str, bytes], name: str, part: str, read: Callable[[str], T]) -> T | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        return read(value.decode("ascii"))
    except UnicodeDecodeError:
        raise InvalidRequest(f"{part}: header {name} is not ASCII", field=part) from None
    except InvalidRequest as error:
        raise InvalidRequest(f"{error} (header {name})", field=part) from None


def _versions(given: Mapping[str, bytes], name: str, part: str) -> _Version | None:
    return _one(given, name, part, lambda text: _version_of_text(text, part))


def _version_of_text(text: str, part: str) -> _Version:
    if _NUMBER.match(text):
        return None, version_number(int(text), part)
    return _version_with_run(text, part)


def _version_with_run(text: str, part: str) -> _Version:
    try:
        ref = parse_version(text, _NO_POLICY)
    except InvalidRequest:
        raise InvalidRequest(
            f"{part}: {text[:SHOWN]!r} is neither a whole number from 0 to 2^53-1 nor of the form run/weight_v000007", field=part
        ) from None
    return ref.run, ref.number


def _max_lag(text: str) -> int:
    if not _NUMBER.match(text):
        raise InvalidRequest(f"max_lag: {text[:SHOWN]!r} is not a whole number of versions", field="max_lag")
    return version_number(int(text), "max_lag")


def _wait(text: str) -> float:
    seconds = float(text) if _SECONDS.match(text) else -1.0
    if not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise InvalidRequest(f"wait: {text[:SHOWN]!r} is not a number of seconds from 0 to {MAX_WAIT_SECONDS:g}", field="wait")
    return seconds


def _session(given: Mapping[str, bytes]) -> str | None:
    for name in (names.SESSION, *names.SESSION_ALIASES):
        value = given.get(name)
        if value is not None:
            if len(value) > MAX_SESSION or not _PRINTABLE.match(value):
                raise InvalidRequest(f"session: header {name} is not 1 to {MAX_SESSION} printable characters", field="session")
            return value.decode("ascii")
    return None


def _request_id(given: Mapping[str, bytes]) -> str | None:
    value = given.get(names.REQUEST_ID)
    if value is None:
        return None
    if not _REQUEST_ID.match(value):
        raise InvalidRequest(f"request_id: header {names.REQUEST_ID} is not 1 to 128 of A-Z a-z 0-9 . _ : -", field="request_id")
    return value.decode("ascii")


# --- body ------------------------------------------------------------------------------------------------------------------


def _weight_version(value: object) -> tuple[RunId | None, _Version | None, _Version | None]:
    if value is None:
        return None, None, None
    if not isinstance(value, Mapping):
        raise InvalidRequest("weight_version: not an object with min_version, exact_version or run", field="weight_version")
    unknown = next((key for key in value if key not in _BODY_FIELDS), None)
    if unknown is not None:
        # A misspelt bound that counted for nothing would break the promise that an answer keeps its constraint.
        raise InvalidRequest(
            f"weight_version: unknown field {str(unknown)[:SHOWN]!r}; use min_version, exact_version, run", field="weight_version"
        )
    run = value.get("run")
    if run is not None and not isinstance(run, str):
        raise InvalidRequest("run: weight_version.run is not text", field="run")
    return (
        None if run is None else run_id(run),
        _version_of_json(value.get("min_version"), "min_version"),
        _version_of_json(value.get("exact_version"), "exact_version"),
    )


def _version_of_json(value: object, part: str) -> _Version | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _version_with_run(value, part)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(
            f"{part}: weight_version.{part} is neither a whole number nor of the form run/weight_v000007", field=part
        )
    if not 0 <= value.bit_length() <= 64:
        raise InvalidRequest(f"{part}: weight_version.{part} is not a whole number from 0 to 2^53-1", field=part)
    return None, version_number(value, part)


def _model(value: object) -> tuple[PolicyId, ChannelName | None, _Version | None]:
    """`policy`, `policy@channel`, or `policy@version`."""
    if not isinstance(value, str):
        raise InvalidRequest("model: not text", field="model")
    policy, separator, rest = value.partition("@")
    try:
        if not separator:
            return policy_id(policy), None, None
        if rest.isdigit() or "/" in rest:
            return policy_id(policy), None, _version_of_text(rest, "model")
        return policy_id(policy), channel_name(rest), None
    except InvalidRequest as error:
        raise InvalidRequest(
            f"model: {value[:SHOWN]!r} is not policy, policy@channel or policy@number ({error})", field="model"
        ) from None
