"""Pointers: where a channel stands, derived from the lineage and never from another pointer (rule 5)."""

from __future__ import annotations

from collections.abc import Iterable

from stitch.core.events import ChannelPointer
from stitch.core.ids import ChannelName, EventId, Generation, PolicyId
from stitch.core.lineage import Lineage, PolicyLineage


def pointer_key(policy: PolicyId, channel: ChannelName) -> str:
    """The record's key, by which the stream is compacted."""
    return f"{policy}/{channel}"


def pointer(policy: PolicyLineage, name: ChannelName, *, event_id: EventId, generation: Generation) -> ChannelPointer | None:
    """What a reader of the lineage would write for the channel; None where the channel has no target."""
    channel = policy.channels.get(name)
    if channel is None or channel.target is None:
        return None
    target = policy.versions[channel.target]
    anchor, anchor_manifest = policy.nearest_anchor(target.ref)
    return ChannelPointer(
        policy=policy.policy,
        channel=name,
        event_id=event_id,
        generation=generation,
        sequence=channel.sequence,
        target=target.ref,
        epoch=target.epoch,
        manifest=target.manifest,
        anchor=anchor,
        anchor_manifest=anchor_manifest,
        offset=channel.position.offset,
        source=channel.source,
    )


def is_behind(last_written: ChannelPointer | None, derived: ChannelPointer) -> bool:
    """Whether the stream's last record of the channel must be written again.

    Held against the last record, not the greatest one seen: compaction keeps the last, so a late, older record in that place
    would strand whoever reads pointers alone.
    """
    return last_written is None or last_written.order < derived.order


def greatest(pointers: Iterable[ChannelPointer]) -> ChannelPointer | None:
    """The one that a reader follows."""
    return max(pointers, key=lambda p: p.order, default=None)


def stale_channels(lineage: Lineage, written: dict[str, ChannelPointer]) -> list[tuple[PolicyId, ChannelName]]:
    """The channels whose last written pointer is behind the lineage."""
    stale = []
    for policy in lineage.policies.values():
        for name, channel in policy.channels.items():
            last = written.get(pointer_key(policy.policy, name))
            now = (channel.sequence, channel.position.offset)
            if channel.target is not None and (last is None or (last.sequence, last.offset) < now):
                stale.append((policy.policy, name))
    return sorted(stale)
