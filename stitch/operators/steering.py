"""Where channels point: moved by an operator, or by the quarantine of what they name (rule 6).

    async with open_ledger(log, policy, source="/stitch/channel") as ledger:
        done = await move_channel(ledger, "stable", "41", writer=new_operator())

A move is a forward step in the channel's sequence, whatever the number that it goes to: pins and rollbacks are moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stitch.core.errors import InvalidRequest, VersionConflict, VersionGone
from stitch.core.events import ChannelMoved, RunVersion, VersionQuarantined
from stitch.core.ids import LATEST, ChannelName, Sequence, WriterId, channel_name
from stitch.core.lineage import PolicyLineage, Verdict
from stitch.log.views import new_event_id
from stitch.operators.ledger import Ledger
from stitch.operators.versions import find, published

MAX_REASON: Final = 1_000
"""Characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A channel, and what it named before and names now; None where it names no version."""

    channel: ChannelName
    before: RunVersion | None
    after: RunVersion | None
    sequence: Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """`versions`: what no replica takes any more, the version first, then those that it is another name of. `moves`: the channels
    that named any of them. Both are empty where it was quarantined before."""

    version: RunVersion
    versions: tuple[RunVersion, ...]
    moves: tuple[Move, ...]
    is_tip: bool
    """Whether the next publication builds on it all the same."""


async def move_channel(ledger: Ledger, channel: str, version: str, *, writer: WriterId, reason: str = "") -> Move:
    """Makes the channel name the version, as an operator writes it; a new channel begins so. Nothing is appended where it does.

    Raises InvalidRequest for a name that is none, VersionGone for a version that no channel may name, VersionConflict where
    somebody else moved the channel meanwhile, and as Ledger.settle does.
    """
    name = channel_name(channel)
    if name == LATEST:
        raise InvalidRequest(
            f"channel: {LATEST} follows the tip by itself; quarantine a version to move it off, or let replicas follow another one",
            field="channel",
        )
    _check_reason(reason)
    policy = published(await ledger.read_on())
    target = _eligible(policy, version)
    old = policy.channels.get(name)
    if old is not None and old.target == target:
        await ledger.write_pointers()
        return Move(channel=name, before=target, after=target, sequence=old.sequence)
    expected = old.sequence if old is not None else Sequence(0)
    verdict = await ledger.settle(
        ChannelMoved(
            policy=policy.policy,
            channel=name,
            target=target,
            event_id=new_event_id(),
            writer=writer,
            expected_sequence=expected,
            reason=reason,
        )
    )
    now = ledger.policy.channels.get(name)
    if verdict is Verdict.STALE_SEQUENCE:
        names = now.target if now is not None else None
        raise VersionConflict(
            f"channel: {name} was moved by somebody else meanwhile, and names {names or 'none'}; look, and try again"
        )
    if verdict is not Verdict.ACCEPTED:
        raise VersionGone(f"version: {target} was retired or quarantined meanwhile; the channel was not moved")
    await ledger.write_pointers()
    return Move(channel=name, before=old.target if old is not None else None, after=target, sequence=Sequence(expected + 1))


async def quarantine(ledger: Ledger, version: str, *, writer: WriterId, reason: str = "") -> Quarantine:
    """No replica takes the version any more, and channels that name it go back. Its bytes stay: later deltas build on them.

    Raises InvalidRequest, VersionGone for one that is retired, and as Ledger.settle does.
    """
    _check_reason(reason)
    before = published(await ledger.read_on())
    found = find(before, version)
    if not found.quarantined:
        verdict = await ledger.settle(
            VersionQuarantined(policy=before.policy, version=found.ref, event_id=new_event_id(), writer=writer, reason=reason)
        )
        if verdict not in (Verdict.ACCEPTED, Verdict.NOTHING_TO_DO):
            raise VersionGone(f"version: {found.ref} cannot be quarantined: {verdict}")
    await ledger.write_pointers()
    after = ledger.policy
    return Quarantine(
        version=found.ref,
        versions=tuple(ref for ref in _names(after, found.ref) if not before.versions[ref].quarantined),
        moves=tuple(_moves(before, after)),
        is_tip=after.tip == found.ref,
    )


def _eligible(policy: PolicyLineage, text: str) -> RunVersion:
    ref = find(policy, text).ref
    if not policy.eligible(ref):
        raise VersionGone(f"version: {ref} was quarantined; no channel may name it")
    return ref


def _names(policy: PolicyLineage, ref: RunVersion | None) -> Iterator[RunVersion]:
    """The version, and those that it is another name of."""
    while ref is not None:
        yield ref
        ref = policy.versions[ref].alias_of


def _moves(before: PolicyLineage, after: PolicyLineage) -> Iterator[Move]:
    """Of the channels whose target no channel may name any more."""
    for name, old in sorted(before.channels.items()):
        now = after.channels[name]
        if old.target is not None and now.target != old.target and not after.eligible(old.target):
            yield Move(channel=name, before=old.target, after=now.target, sequence=now.sequence)


def _check_reason(reason: str) -> None:
    if len(reason) > MAX_REASON:
        raise InvalidRequest(f"reason: {len(reason)} characters; up to {MAX_REASON} are kept for good", field="reason")
