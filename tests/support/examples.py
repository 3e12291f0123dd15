"""One example of every event, with every optional field set, and again with none."""

from __future__ import annotations

from stitch.core.events import (
    AnchorAdded,
    ChannelMoved,
    ChannelPointer,
    Event,
    FormatRaised,
    Phase,
    ReplicaState,
    RolloutServed,
    RunClaimed,
    RunVersion,
    ServedSpan,
    Transition,
    VersionPublished,
    VersionQuarantined,
    VersionRetired,
)
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
    WriterId,
)
from stitch.core.manifest import Kind, ManifestRef

POLICY, RUN, WRITER = PolicyId("math"), RunId("r1"), WriterId("trainer-1")
MANIFEST = ManifestRef(key="math/r1/7.e1.0123456789abcdef.json", digest=Digest("a" * 64), weights_digest=Digest("b" * 64))
ANCHOR = ManifestRef(key="math/r1/0.base-0123456789abcdef.json", digest=Digest("c" * 64), weights_digest=Digest("d" * 64))


def version(number: int, run: str = RUN) -> RunVersion:
    return RunVersion(run=RunId(run), number=VersionNumber(number))


def examples() -> dict[str, Event]:
    """Name -> event. Names of golden files: never rename one, never change what it holds."""
    common = {"policy": POLICY, "event_id": EventId("e-1"), "writer": WRITER}
    state = {
        "replica": ReplicaId("replica-0"),
        "life": EventId("life-0"),
        "event_id": EventId("e-1"),
        "policy": POLICY,
        "channel": ChannelName("latest"),
        "pool": PoolName("default"),
        "url": "http://127.0.0.1:9000",
        "engine": "reference",
        "capacity": 64,
        "heartbeat_ms": 2000,
        "generation": Generation(0),
    }
    return {
        "run_claimed": RunClaimed(run=RUN, expected_head=None, boot=None, **common),
        "run_claimed_base": RunClaimed(run=RUN, expected_head=EventId("h"), boot=VersionNumber(0), base=MANIFEST, **common),
        "run_claimed_alias": RunClaimed(
            run=RUN, expected_head=EventId("h"), boot=VersionNumber(0), alias=version(41, "r0"), **common
        ),
        "version_published": VersionPublished(
            run=RUN,
            number=VersionNumber(7),
            epoch=Epoch(1),
            expected_head=EventId("h"),
            parent=VersionNumber(6),
            kind=Kind.DELTA,
            base=version(6),
            manifest=MANIFEST,
            size=123_456_789_012,
            **common,
        ),
        "version_published_first": VersionPublished(
            run=RUN,
            number=VersionNumber(0),
            epoch=Epoch(1),
            expected_head=EventId("h"),
            parent=None,
            kind=Kind.FULL,
            base=None,
            manifest=MANIFEST,
            size=0,
            **common,
        ),
        "anchor_added": AnchorAdded(version=version(7), epoch=Epoch(2), manifest=ANCHOR, size=5, **common),
        "channel_moved": ChannelMoved(
            channel=ChannelName("stable"), target=version(7), expected_sequence=Sequence(3), reason="good", **common
        ),
        "version_quarantined": VersionQuarantined(version=version(7), reason="répète", **common),
        "version_retired": VersionRetired(version=version(7), **common),
        "format_raised": FormatRaised(level=2, event_id=EventId("e-1"), writer=WRITER),
        "channel_pointer": ChannelPointer(
            policy=POLICY,
            channel=ChannelName("latest"),
            event_id=EventId("e-1"),
            generation=Generation(1),
            sequence=Sequence(8),
            target=version(7),
            epoch=Epoch(1),
            manifest=MANIFEST,
            anchor=version(0),
            anchor_manifest=ANCHOR,
            offset=Offset(12),
            source=EventId("h"),
        ),
        "replica_state_joined": ReplicaState(
            incarnation=None, sequence=0, transition=Transition.JOINED, phase=Phase.JOINING, **state
        ),
        "replica_state": ReplicaState(
            incarnation=Incarnation(4),
            sequence=9,
            transition=Transition.ACTIVATED,
            phase=Phase.SERVING,
            following=Sequence(8),
            serving=version(7),
            weights_digest=Digest("b" * 64),
            staged=version(7),
            target=version(8),
            want=Offset(40),
            in_flight=3,
            pause_ms=12.5,
            error="none",
            labels={"zone": "a"},
            **state,
        ),
        "rollout_served": RolloutServed(
            request_id="q-1",
            event_id=EventId("e-1"),
            policy=POLICY,
            run=RUN,
            replica=ReplicaId("replica-0"),
            incarnation=Incarnation(4),
            version_start=VersionNumber(6),
            version_end=VersionNumber(7),
            spans=(ServedSpan(number=VersionNumber(6), start=0, end=3), ServedSpan(number=VersionNumber(7), start=3, end=9)),
            prompt_tokens=5,
            output_tokens=9,
            started_ms=1_700_000_000_000,
            ended_ms=1_700_000_000_900,
            session="s",
        ),
    }
