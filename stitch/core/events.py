"""The facts that Stitch records, as values. What each means to a reader is in `lineage` and `fleet`; its bytes, in `wire`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from stitch.core.ids import (
    ChannelName,
    Digest,
    Epoch,
    EventId,
    Generation,
    Incarnation,
    Offset,
    PolicyId,
    PoolName,
    ReplicaId,
    RunId,
    Sequence,
    VersionNumber,
    VersionRef,
    WriterId,
)
from stitch.core.manifest import Kind, ManifestRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVersion:
    """A version of the policy at hand: a VersionRef without its policy."""

    run: RunId
    number: VersionNumber

    def of(self, policy: PolicyId) -> VersionRef:
        """The full reference."""
        return VersionRef(policy=policy, run=self.run, number=self.number)

    def __str__(self) -> str:
        return f"{self.run}/weight_v{self.number:06d}"


# --- publications: decisions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaimed:
    """A writer takes the policy, to go on from `boot`.

    `boot` is None only for a run without versions. For such a run, `alias` takes a version of another run under the number
    `boot`, or `base` a checkpoint that no publication made; never both.
    """

    policy: PolicyId
    run: RunId
    event_id: EventId
    writer: WriterId
    expected_head: EventId | None
    boot: VersionNumber | None
    alias: RunVersion | None = None
    base: ManifestRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """A version exists. `size` is what its own files weigh, in bytes."""

    policy: PolicyId
    run: RunId
    number: VersionNumber
    event_id: EventId
    writer: WriterId
    epoch: Epoch
    expected_head: EventId
    parent: VersionNumber | None
    kind: Kind
    base: RunVersion | None
    manifest: ManifestRef
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorAdded:
    """A full form of an existing version."""

    policy: PolicyId
    version: RunVersion
    event_id: EventId
    writer: WriterId
    epoch: Epoch
    manifest: ManifestRef
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMoved:
    """An operator moves a channel. Pins and rollbacks are such moves."""

    policy: PolicyId
    channel: ChannelName
    target: RunVersion
    event_id: EventId
    writer: WriterId
    expected_sequence: Sequence
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionQuarantined:
    """No replica takes the version any more; its bytes stay, since later deltas build on them."""

    policy: PolicyId
    version: RunVersion
    event_id: EventId
    writer: WriterId
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRetired:
    """The version's own bytes may go once the grace period is over."""

    policy: PolicyId
    version: RunVersion
    event_id: EventId
    writer: WriterId


FORMAT_LEVEL: Final = 1
"""The greatest format level that this release knows: its schemas and its rules of the fold (docs/adr/0005-format-levels.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRaised:
    """From here on writers may use what readers of `level` know."""

    level: int
    event_id: EventId
    writer: WriterId


Decision = RunClaimed | VersionPublished | AnchorAdded | ChannelMoved | VersionQuarantined | VersionRetired | FormatRaised

# --- pointers ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPointer:
    """Where a channel stands, derived from the publications: enough to load its target without reading them.

    `anchor` is the nearest full form at or below the target. `offset` and `source` are those of the decision behind it.
    """

    policy: PolicyId
    channel: ChannelName
    event_id: EventId
    generation: Generation
    sequence: Sequence
    target: RunVersion
    epoch: Epoch
    manifest: ManifestRef
    anchor: RunVersion
    anchor_manifest: ManifestRef
    offset: Offset
    source: EventId

    @property
    def order(self) -> tuple[int, int, int]:
        """Readers take the greatest."""
        return (self.generation, self.sequence, self.offset)


# --- activations -------------------------------------------------------------------------------------------------------------


class Transition(StrEnum):
    """What caused a ReplicaState record."""

    JOINED = "joined"
    STAGE_STARTED = "stage_started"
    STAGED = "staged"
    STAGE_FAILED = "stage_failed"
    ACTIVATION_WANTED = "activation_wanted"
    ACTIVATION_STARTED = "activation_started"
    ACTIVATED = "activated"
    ACTIVATION_FAILED = "activation_failed"
    HEARTBEAT = "heartbeat"
    DRAINING = "draining"
    LEFT = "left"


class Phase(StrEnum):
    """Where a replica stands in its life."""

    JOINING = "joining"
    LOADING = "loading"
    CATCHING_UP = "catching_up"
    SERVING = "serving"
    ACTIVATING = "activating"
    DRAINING = "draining"
    LEFT = "left"
    FAILED = "failed"

    @property
    def in_rotation(self) -> bool:
        """Whether a gateway may send requests. During an activation they wait at the replica's own gate."""
        return self in (Phase.SERVING, Phase.ACTIVATING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """The whole state of a replica, with the transition that caused the record.

    `life` is the event id of the life's `joined` record, `incarnation` the log's offset of it (None in that record itself).
    `serving` is what the engine confirmed, with the digest of the manifest's weights; `following` the channel sequence behind
    `target`. `want` is the offset of the replica's open `activation_wanted`, once it was read back. `pause_ms` is the
    time with the gate closed at the last activation that there was, `error` what has kept the replica from its target since.
    """

    replica: ReplicaId
    life: EventId
    incarnation: Incarnation | None
    sequence: int
    transition: Transition
    event_id: EventId
    phase: Phase
    policy: PolicyId
    channel: ChannelName
    pool: PoolName
    url: str
    engine: str
    capacity: int
    heartbeat_ms: int
    generation: Generation
    following: Sequence | None = None
    serving: RunVersion | None = None
    weights_digest: Digest | None = None
    staged: RunVersion | None = None
    target: RunVersion | None = None
    want: Offset | None = None
    in_flight: int = 0
    pause_ms: float | None = None
    error: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


# --- rollouts ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpan:
    """Output tokens [start, end) of an answer were computed by this version."""

    number: VersionNumber
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutServed:
    """One answered request. Times in milliseconds of the replica's own clock."""

    request_id: str
    event_id: EventId
    policy: PolicyId
    run: RunId
    replica: ReplicaId
    incarnation: Incarnation
    version_start: VersionNumber
    version_end: VersionNumber
    spans: tuple[ServedSpan, ...]
    prompt_tokens: int | None
    output_tokens: int | None
    started_ms: int
    ended_ms: int
    session: str | None = None


Event = Decision | ChannelPointer | ReplicaState | RolloutServed
