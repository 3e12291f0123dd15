"""Which version an operator means, and where its full forms lie: by number, by full name, or by a channel."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

from stitch.core.errors import InvalidRequest, VersionGone
from stitch.core.events import RunVersion
from stitch.core.ids import MAX_NAME, ChannelName, PolicyId, listed, parse_version, policy_id, run_id, version_number
from stitch.core.lineage import Lineage, PolicyLineage, Position, Version
from stitch.core.manifest import ManifestRef
from stitch.log.events import read
from stitch.log.opening import open_log
from stitch.log.port import EventLog, Stream
from stitch.log.read import pages
from stitch.log.views import fold_lineage
from stitch.wire.codec import Skipped

FORMS: Final = "a number (41), a full name (run/weight_v000041) or a channel (latest)"
_MAX_DIGITS: Final = 16
"""Of a number; the greatest has as many."""


async def read_lineage(log: EventLog) -> Lineage:
    """What all decisions come to that the log holds now. Raises Unavailable, UnreadableEvent, InvalidRequest for a log that is
    not set up."""
    await log.setup(create=False)
    lineage = Lineage()
    async with aclosing(pages(log, Stream.PUBLICATIONS)) as found:
        async for page in found:
            for record in page:
                event = read(record)
                if not isinstance(event, Skipped):
                    lineage = fold_lineage(lineage, event, Position(offset=record.offset, time_ms=record.time_ms))
    return lineage


async def read_policy(log_url: str, policy: str) -> PolicyLineage:
    """One policy's lineage, as the log behind a URL has it now. Raises as `read_lineage` and `known_policy` do."""
    async with open_log(log_url) as log:
        return known_policy(await read_lineage(log), policy_id(policy))


def known_policy(lineage: Lineage, policy: PolicyId) -> PolicyLineage:
    """The policy's lineage. InvalidRequest names the policies that there are."""
    found = lineage.policies.get(policy)
    if found is None:
        there = listed(lineage.policies) or "none yet"
        raise InvalidRequest(f"policy: nothing was published under {policy!r}; the log has {there}", field="policy")
    return found


def published(policy: PolicyLineage) -> PolicyLineage:
    """The policy itself. InvalidRequest where nothing was published under its name."""
    if policy.owner is None:
        raise InvalidRequest(f"policy: nothing was published under {policy.policy!r} in this log", field="policy")
    return policy


def find(policy: PolicyLineage, text: str) -> Version:
    """The version that the text means: `41` of the run that owns the head, `run/weight_v000041`, or what a channel names.

    Raises InvalidRequest where there is none, VersionGone where it was retired, so that its bytes may be gone.
    """
    number = text.isascii() and text.isdigit()
    ref = _of_name(policy, text) if "/" in text else _of_number(policy, text) if number else _of_channel(policy, text)
    version = policy.versions.get(ref)
    if version is None:
        raise InvalidRequest(f"version: there is no {ref} of policy {policy.policy}; {_nearest(policy, ref)}", field="version")
    if version.retired is not None:
        raise VersionGone(f"version: {ref} was retired at offset {version.retired.offset}: its bytes may be gone")
    return version


def unretired(policy: PolicyLineage) -> tuple[Version, ...]:
    """All versions whose bytes must be there, oldest first."""
    return tuple(sorted((v for v in policy.versions.values() if v.retired is None), key=_age))


def with_chains(policy: PolicyLineage, versions: Iterable[Version]) -> tuple[Version, ...]:
    """The versions and all whose bytes they are built from; each once, oldest first."""
    refs = {link.ref for version in versions for link in policy.chain(version.ref)}
    return tuple(sorted((policy.versions[ref] for ref in refs), key=_age))


def added_anchors(policy: PolicyLineage, ref: RunVersion) -> tuple[ManifestRef, ...]:
    """Full forms on the version's chain that the manifests do not show, since they were added later."""
    return tuple(version.anchor for version in policy.chain(ref) if version.anchor is not None)


def _age(version: Version) -> tuple[int, str, int]:
    return version.position.offset, version.ref.run, version.ref.number


def _of_name(policy: PolicyLineage, text: str) -> RunVersion:
    ref = parse_version(text, policy.policy)
    return RunVersion(run=ref.run, number=ref.number)


def _of_number(policy: PolicyLineage, text: str) -> RunVersion:
    if policy.owner is None:
        raise InvalidRequest(
            f"version: no run owns policy {policy.policy}; name the version as run/weight_v000041", field="version"
        )
    return RunVersion(run=policy.owner.run, number=version_number(int(text[: _MAX_DIGITS + 1])))


def _of_channel(policy: PolicyLineage, text: str) -> RunVersion:
    channel = policy.channels.get(ChannelName(text))
    if channel is None:
        there = listed(policy.channels) or "none yet"
        raise InvalidRequest(
            f"version: {text[:MAX_NAME]!r} means none; give {FORMS}. Policy {policy.policy} has the channels {there}",
            field="version",
        )
    if channel.target is None:
        raise InvalidRequest(f"version: channel {text} of policy {policy.policy} names no version at present", field="version")
    return channel.target


def _nearest(policy: PolicyLineage, ref: RunVersion) -> str:
    greatest = policy.greatest(run_id(ref.run))
    if greatest is not None:
        return f"the run's greatest number is {greatest}"
    return f"there is no such run, but {listed(policy.runs) or 'none at all'}"
