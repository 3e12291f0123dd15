"""Names and numbers: what identifies a policy, a run, a version, a record, a replica.

Policies, runs, channels, pools and replicas share one alphabet, so that any of them can be a path segment, a Kafka key and a
header value without escaping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NewType

from stitch.core.errors import InvalidRequest

PolicyId = NewType("PolicyId", str)
RunId = NewType("RunId", str)
ChannelName = NewType("ChannelName", str)
ReplicaId = NewType("ReplicaId", str)
PoolName = NewType("PoolName", str)
EventId = NewType("EventId", str)
WriterId = NewType("WriterId", str)
VersionNumber = NewType("VersionNumber", int)
Epoch = NewType("Epoch", int)
Sequence = NewType("Sequence", int)
"""A channel's count of accepted moves."""
Generation = NewType("Generation", int)
Offset = NewType("Offset", int)
Incarnation = NewType("Incarnation", int)
"""The log's own offset of a replica's `joined` record."""
Digest = NewType("Digest", str)
"""Lower-case hex blake3 of 32 bytes: 64 characters."""
StateDigest = NewType("StateDigest", str)
"""Lower-case hex of a tensor's additive 64-bit digest: 16 characters."""

LATEST: Final = ChannelName("latest")
MAX_NAME: Final = 128
_NAMED_AT_MOST: Final = 8
"""Of the names that a message offers instead of a wrong one."""
MAX_VERSION: Final = 2**53 - 1
"""Greatest number that every JSON reader holds exactly (RFC 8785)."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*\Z")
_VERSION_TEXT = re.compile(r"(?P<run>[^/]+)/weight_v(?P<number>[0-9]+)\Z")


def listed(names: Iterable[str]) -> str:
    """The first few in order, for a message; nothing where there are none."""
    found = sorted(names)
    return ", ".join(found[:_NAMED_AT_MOST]) + (" and others" if len(found) > _NAMED_AT_MOST else "")


def check_name(value: str, field: str) -> str:
    """The name itself, or InvalidRequest that names the field."""
    if len(value) > MAX_NAME or not _NAME.match(value):
        raise InvalidRequest(
            f"{field}: {value[:MAX_NAME]!r} is not a name; use up to {MAX_NAME} of a-z 0-9 . _ -, a letter or digit first",
            field=field,
        )
    return value


def policy_id(value: str) -> PolicyId:
    return PolicyId(check_name(value, "policy"))


def run_id(value: str) -> RunId:
    return RunId(check_name(value, "run"))


def replica_id(value: str) -> ReplicaId:
    return ReplicaId(check_name(value, "replica"))


def pool_name(value: str) -> PoolName:
    return PoolName(check_name(value, "pool"))


def channel_name(value: str) -> ChannelName:
    """A channel's name; all digits is refused, since `policy@41` means version 41."""
    if value.isdigit():
        raise InvalidRequest(f"channel: {value!r} is all digits; that form names a version", field="channel")
    return ChannelName(check_name(value, "channel"))


def version_number(value: int, field: str = "version") -> VersionNumber:
    """A whole number from 0 to 2^53-1. bool is refused, though Python counts it as int."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_VERSION:
        raise InvalidRequest(f"{field}: {value!r} is not a whole number from 0 to 2^53-1", field=field)
    return VersionNumber(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRef:
    """One version of a policy. Numbers compare within a run only, so the class has no order of its own."""

    policy: PolicyId
    run: RunId
    number: VersionNumber

    def __str__(self) -> str:
        return f"{self.run}/weight_v{self.number:06d}"

    @property
    def label(self) -> str:
        """What an engine is told: the bare digits, which trainers' filters understand."""
        return str(self.number)


def parse_version(text: str, policy: PolicyId) -> VersionRef:
    """`run/weight_v000007` as a VersionRef of the given policy."""
    match = _VERSION_TEXT.match(text)
    if match is None:
        raise InvalidRequest(f"version: {text[:MAX_NAME]!r} is not of the form run/weight_v000007", field="version")
    return VersionRef(policy=policy, run=run_id(match["run"]), number=version_number(int(match["number"][:20])))
