"""Values that the parts of a replica hand each other: what it shall serve, and what it serves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stitch.core.events import ChannelPointer, RunVersion
from stitch.core.ids import ChannelName, Digest, Generation, Offset, Sequence
from stitch.core.lineage import PolicyLineage
from stitch.core.manifest import ManifestRef


class Origin(StrEnum):
    """Where a replica learned its target."""

    LOG = "log"
    POINTER = "pointer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the replica's channel names. `anchors` are full forms that the chain of manifests does not show; `offset` is that of
    the decision behind it, which moved the channel or added a nearer anchor to where it stands."""

    generation: Generation
    sequence: Sequence
    offset: Offset
    ref: RunVersion
    manifest: ManifestRef
    anchors: tuple[ManifestRef, ...] = ()
    origin: Origin

    @property
    def order(self) -> tuple[int, int]:
        """Of two, the greater is followed."""
        return (self.generation, self.sequence)

    def better_than(self, other: Target) -> bool:
        """Whether it names the same, told later: with anchors that the other did not know, and without those that may go."""
        return self.order == other.order and self.offset > other.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What the engine confirmed. `label` is what it calls the version, `model_path` where it loaded the weights from."""

    target: Target
    label: str
    model_path: str

    @property
    def ref(self) -> RunVersion:
        return self.target.ref

    @property
    def weights_digest(self) -> Digest:
        return self.target.manifest.weights_digest


def target_of_log(lineage: PolicyLineage, channel: ChannelName, generation: Generation) -> Target | None:
    """The channel's target by the fold; None where it has none."""
    known = lineage.channels.get(channel)
    if known is None or known.target is None:
        return None
    return target_at(lineage, known.target, generation, known.sequence, known.position.offset)


def target_at(lineage: PolicyLineage, ref: RunVersion, generation: Generation, sequence: Sequence, offset: Offset) -> Target:
    """The version as a target of that order."""
    added = tuple(version.anchor for version in lineage.chain(ref) if version.anchor is not None)
    return Target(
        generation=generation,
        sequence=sequence,
        offset=offset,
        ref=ref,
        manifest=lineage.versions[ref].manifest,
        anchors=added,
        origin=Origin.LOG,
    )


def target_of_pointer(pointer: ChannelPointer) -> Target:
    """The target that a pointer names, with the anchor that it brings along."""
    own = pointer.anchor_manifest == pointer.manifest
    return Target(
        generation=pointer.generation,
        sequence=pointer.sequence,
        offset=pointer.offset,
        ref=pointer.target,
        manifest=pointer.manifest,
        anchors=() if own else (pointer.anchor_manifest,),
        origin=Origin.POINTER,
    )
