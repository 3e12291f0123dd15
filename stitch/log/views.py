"""The folds of the streams, kept abreast: lineage, fleet, pointers; and the repair of pointers that lag behind the lineage."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from immutables import Map

from stitch.core import fleet as fleet_fold
from stitch.core import lineage as lineage_fold
from stitch.core.events import (
    AnchorAdded,
    ChannelMoved,
    ChannelPointer,
    Event,
    FormatRaised,
    ReplicaState,
    RunClaimed,
    VersionPublished,
    VersionQuarantined,
    VersionRetired,
)
from stitch.core.fleet import LEASE_PERIODS, Fleet
from stitch.core.ids import EventId, Generation, Offset
from stitch.core.lineage import Lineage, Position
from stitch.core.pointers import is_behind, pointer, pointer_key, stale_channels
from stitch.log.events import append
from stitch.log.follow import Follower
from stitch.log.port import EventLog, Stream

GENERATION: Final = Generation(0)
"""No log was recovered yet; `recover` counts it up."""
LONGEST_HEARTBEAT_MS: Final = 10_000
"""Bound on a replica's period of heartbeats, from which the part of the stream follows that a new reader needs."""

_DECISIONS: Final = (
    RunClaimed,
    VersionPublished,
    AnchorAdded,
    ChannelMoved,
    VersionQuarantined,
    VersionRetired,
    FormatRaised,
)


def new_event_id() -> EventId:
    """A fresh, unguessable id."""
    return EventId(uuid.uuid4().hex)


def fold_lineage(state: Lineage, event: Event, at: Position) -> Lineage:
    """One record of the publications; what is no decision changes nothing."""
    return lineage_fold.apply(state, event, at)[0] if isinstance(event, _DECISIONS) else state


def fold_fleet(state: Fleet, event: Event, at: Position) -> Fleet:
    """One record of the activations."""
    return fleet_fold.apply(state, event, at)[0] if isinstance(event, ReplicaState) else state


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointers:
    """By record key: the pointer that was written last, and the greatest one, which readers follow."""

    last: Map[str, ChannelPointer] = field(default_factory=Map)
    greatest: Map[str, ChannelPointer] = field(default_factory=Map)


def fold_pointers(state: Pointers, event: Event, at: Position) -> Pointers:
    """One record of the pointers."""
    if not isinstance(event, ChannelPointer):
        return state
    key = pointer_key(event.policy, event.channel)
    best = state.greatest.get(key)
    greatest = state.greatest.set(key, event) if best is None or best.order < event.order else state.greatest
    return Pointers(last=state.last.set(key, event), greatest=greatest)


def lineage_follower(log: EventLog) -> Follower[Lineage]:
    """Follows the publications from the first."""
    return Follower(log, Stream.PUBLICATIONS, Lineage(), fold_lineage)


def fleet_follower(log: EventLog) -> Follower[Fleet]:
    """Follows the activations from one lease before the newest record, however long the history is."""
    return Follower(log, Stream.ACTIVATIONS, Fleet(), fold_fleet, start=_one_lease_back)


def pointers_follower(log: EventLog) -> Follower[Pointers]:
    """Follows the pointers from the first that compaction left."""
    return Follower(log, Stream.POINTERS, Pointers(), fold_pointers)


async def _one_lease_back(log: EventLog) -> Offset:
    newest = await log.newest(Stream.ACTIVATIONS)
    if newest is None:
        return (await log.bounds(Stream.ACTIVATIONS)).start
    return await log.offset_at(Stream.ACTIVATIONS, newest.time_ms - LEASE_PERIODS * LONGEST_HEARTBEAT_MS)


async def write_pointers(
    log: EventLog,
    lineage: Callable[[], Lineage],
    pointers: Follower[Pointers],
    *,
    source: str,
    pause: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Writes every pointer that is behind the lineage; returns how many.

    A writer calls it at once. Anyone else gives a `pause` of random length, after which the stream's last records are looked at
    again, so that a fleet of readers does not write the same pointer all together.
    """
    if not stale_channels(lineage(), dict((await pointers.catch_up()).last)):
        return 0
    if pause is not None:
        await pause()
    last = (await pointers.catch_up()).last
    now, written = lineage(), 0
    for policy, channel in stale_channels(now, dict(last)):
        derived = pointer(now.policy(policy), channel, event_id=new_event_id(), generation=GENERATION)
        if derived is not None and is_behind(last.get(pointer_key(policy, channel)), derived):
            await append(log, derived, source=source, level=now.level)
            written += 1
    return written
