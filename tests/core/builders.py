"""Decisions and histories for tests of the core, with names that read well in a failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from stitch.core import lineage as folds
from stitch.core.events import (
    AnchorAdded,
    ChannelMoved,
    Decision,
    RunClaimed,
    RunVersion,
    VersionPublished,
    VersionQuarantined,
    VersionRetired,
)
from stitch.core.ids import ChannelName, Digest, EventId, Offset, PolicyId, RunId, Sequence, VersionNumber, WriterId
from stitch.core.lineage import Lineage, PolicyLineage, Position, Verdict
from stitch.core.manifest import Kind, ManifestRef

POLICY = PolicyId("p")


def hexdigest(text: str) -> Digest:
    """A digest that stands for the text."""
    return Digest(blake3(text.encode()).hexdigest())


def manifest_ref(key: str, weights: str | None = None) -> ManifestRef:
    """A reference to a manifest that nobody needs to read. `weights` defaults to something unique to the key."""
    return ManifestRef(key=key, digest=hexdigest(key), weights_digest=hexdigest(f"weights of {weights or key}"))


def version(text: str) -> RunVersion:
    """`a/3` as a RunVersion."""
    run, number = text.split("/")
    return RunVersion(run=RunId(run), number=VersionNumber(int(number)))


@dataclass
class History:
    """A log of one policy and its fold. Each method appends a decision that would count now, save where told otherwise, and
    returns what became of it."""

    lineage: Lineage = field(default_factory=Lineage)
    log: list[Decision] = field(default_factory=list)

    @property
    def policy(self) -> PolicyLineage:
        return self.lineage.policy(POLICY)

    def latest(self) -> RunVersion | None:
        channel = self.policy.channels.get(ChannelName("latest"))
        return channel.target if channel else None

    def append(self, decision: Decision) -> Verdict:
        """The decision lands as the log's next record."""
        offset = len(self.log)
        self.log.append(decision)
        self.lineage, verdict = folds.apply(self.lineage, decision, Position(offset=Offset(offset), time_ms=1000 * offset))
        return verdict

    def _id(self, event_id: str | None) -> EventId:
        return EventId(event_id or f"e{len(self.log)}")

    # --- decisions, not yet appended ---

    def claim(
        self,
        run: str,
        boot: int | None = None,
        *,
        alias: str | None = None,
        base: str | None = None,
        writer: str = "w0",
        event_id: str | None = None,
        **fields: Any,
    ) -> RunClaimed:
        decision: dict[str, Any] = {
            "policy": POLICY,
            "run": RunId(run),
            "event_id": self._id(event_id),
            "writer": WriterId(writer),
            "expected_head": self.policy.head,
            "boot": None if boot is None else VersionNumber(boot),
            "alias": None if alias is None else version(alias),
            "base": None if base is None else manifest_ref(base),
        }
        return RunClaimed(**{**decision, **fields})

    def publication(
        self, text: str, *, base: str | None = None, writer: str = "w0", event_id: str | None = None, **fields: Any
    ) -> VersionPublished:
        ref = version(text)
        tip = self.policy.tip
        decision: dict[str, Any] = {
            "policy": POLICY,
            "run": ref.run,
            "number": ref.number,
            "event_id": self._id(event_id),
            "writer": WriterId(writer),
            "epoch": self.policy.epoch,
            "expected_head": self.policy.head,
            "parent": tip.number if tip else None,
            "kind": Kind.FULL if base is None else Kind.DELTA,
            "base": None if base is None else version(base),
            "manifest": manifest_ref(f"{text}.e{self.policy.epoch}"),
            "size": 10,
        }
        return VersionPublished(**{**decision, **fields})

    def anchor(self, text: str, *, event_id: str | None = None, **fields: Any) -> AnchorAdded:
        ref = version(text)
        known = self.policy.versions.get(ref)
        weights = known.manifest.weights_digest if known else hexdigest("unknown")
        decision: dict[str, Any] = {
            "policy": POLICY,
            "version": ref,
            "event_id": self._id(event_id),
            "writer": WriterId("compactor"),
            "epoch": self.policy.epoch,
            "manifest": ManifestRef(key=f"{text}.anchor", digest=hexdigest(f"{text}.anchor"), weights_digest=weights),
            "size": 100,
        }
        return AnchorAdded(**{**decision, **fields})

    def move(self, channel: str, target: str, *, sequence: int | None = None, event_id: str | None = None) -> ChannelMoved:
        known = self.policy.channels.get(ChannelName(channel))
        return ChannelMoved(
            policy=POLICY,
            channel=ChannelName(channel),
            target=version(target),
            event_id=self._id(event_id),
            writer=WriterId("operator"),
            expected_sequence=Sequence(sequence if sequence is not None else known.sequence if known else 0),
        )

    def quarantine(self, text: str, *, event_id: str | None = None) -> VersionQuarantined:
        return VersionQuarantined(
            policy=POLICY, version=version(text), event_id=self._id(event_id), writer=WriterId("operator"), reason="bad"
        )

    def retirement(self, text: str, *, event_id: str | None = None) -> VersionRetired:
        return VersionRetired(policy=POLICY, version=version(text), event_id=self._id(event_id), writer=WriterId("collector"))

    # --- decisions, appended, of which the test is sure that they count ---

    def claimed(self, run: str, boot: int | None = None, **fields: Any) -> RunClaimed:
        decision = self.claim(run, boot, **fields)
        assert self.append(decision) is Verdict.ACCEPTED
        return decision

    def published(self, *texts: str, base: str | None = None, **fields: Any) -> VersionPublished:
        """Publishes each; `base` is that of the first, and where it is given each later one is a delta on the one before."""
        for text in texts:
            decision = self.publication(text, base=base, **fields)
            assert self.append(decision) is Verdict.ACCEPTED
            base = text if base is not None else None
        return decision

    def accepted(self, decision: Decision) -> None:
        assert self.append(decision) is Verdict.ACCEPTED


def chain_of(*texts: str) -> History:
    """A run whose first version is full and whose later ones are deltas, each on the one before."""
    history = History()
    history.claimed(texts[0].split("/")[0])
    before: str | None = None
    for text in texts:
        history.published(text, base=before)
        before = text
    return history
