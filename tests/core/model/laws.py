"""What must hold of every step and every state: the invariants of the design, in terms of the lineage."""

from __future__ import annotations

from typing import NamedTuple

from stitch.core.events import Decision, RunVersion, VersionPublished
from stitch.core.ids import LATEST
from stitch.core.lineage import PolicyLineage, Verdict, Version
from tests.core.model.search import Broken


class Needs(NamedTuple):
    """What a lineage says of the store.

    `required`: the manifests that must exist. `named`: all that an accepted version names, retired or not. `free`: those that no
    unretired version names any more. `wrong`: what is wrong with the lineage itself.
    """

    required: frozenset[str]
    named: frozenset[str]
    free: frozenset[str]
    wrong: str | None


def needs(policy: PolicyLineage) -> Needs:
    """What the lineage needs of the store."""
    required: set[str] = set()
    named: set[str] = set()
    kept: set[str] = set()
    for version in policy.versions.values():
        own = _keys(version)
        named |= own
        if version.retired is None:
            kept |= own
            required |= own
            for link in policy.chain(version.ref):
                required.add(link.anchor.key if link.anchor else link.manifest.key)
    return Needs(frozenset(required), frozenset(named), frozenset(named - kept), _wrong(policy))


def _keys(version: Version) -> set[str]:
    return {version.manifest.key} | ({version.anchor.key} if version.anchor else set())


def _wrong(policy: PolicyLineage) -> str | None:
    latest = policy.channels.get(LATEST)
    if latest is None:
        return None
    for name, channel in policy.channels.items():
        if channel.target is not None and not policy.eligible(channel.target):
            return f"I2 channel {name} names {channel.target}, which is not eligible"
    if policy.tip is not None and policy.versions[policy.tip].retired is not None:
        return "I1 the tip is retired"
    return None


def load_keys(policy: PolicyLineage, target: RunVersion, anchor: RunVersion, anchor_key: str) -> set[str]:
    """The manifests that a replica reads that knows no more than a pointer: from the target down to the anchor that it names."""
    keys = {anchor_key}
    at: RunVersion | None = target
    while at is not None and at != anchor:
        version = policy.versions[at]
        if version.alias_of is None:
            keys.add(version.manifest.key)
        at = version.alias_of or version.base
    return keys


def check_step(before: PolicyLineage, after: PolicyLineage, decision: Decision, verdict: Verdict) -> None:
    """Raises Broken where a decision changed what stands for good, or counted when it must not."""
    first = decision.event_id not in before.verdicts
    if not first:
        if verdict is not Verdict.DUPLICATE or after != before:
            raise Broken(f"I6 a second copy of {decision.event_id} was judged again: {verdict}")
        return
    if verdict is not Verdict.ACCEPTED and (after.head, after.versions, after.channels) != (
        before.head,
        before.versions,
        before.channels,
    ):
        raise Broken(f"I8 {decision.event_id} was refused ({verdict}) and changed the lineage all the same")
    if verdict is Verdict.ACCEPTED and isinstance(decision, VersionPublished):
        ref = RunVersion(run=decision.run, number=decision.number)
        if ref in before.versions:
            raise Broken(f"I6 two publications were accepted as {ref}")
        greatest = before.greatest(ref.run)
        if greatest is not None and ref.number < greatest:
            raise Broken(f"I2 {ref} was accepted after {greatest}")
    if after.epoch < before.epoch:
        raise Broken("I6 an epoch went back")
    for ref, version in before.versions.items():
        _check_kept(version, after.versions.get(ref))
    for name, channel in before.channels.items():
        now = after.channels[name]
        if now.sequence < channel.sequence or (now.sequence == channel.sequence and now.target != channel.target):
            raise Broken(f"I2 channel {name} went from {channel.sequence} to {now.sequence}")


def _check_kept(was: Version, now: Version | None) -> None:
    if now is None or now.manifest != was.manifest:
        raise Broken(f"I7 accepted version {was.ref} was lost or replaced")
    if (was.retired is not None and now.retired is None) or (was.abandoned and not now.abandoned):
        raise Broken(f"I2 {was.ref} came back")
