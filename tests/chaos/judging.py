"""The judgement over a whole run, from the log, the store and what clients were told. Each function is one invariant."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing

import stitch
from stitch.core.events import Phase, ReplicaState, RunVersion, Transition
from stitch.core.fleet import Fleet, slots
from stitch.core.ids import PolicyId, RunId, VersionNumber, parse_version
from stitch.core.lineage import PolicyLineage, Position
from stitch.log.events import read
from stitch.log.opening import open_log
from stitch.log.port import Stream
from stitch.log.read import pages
from stitch.log.views import fold_fleet
from stitch.store.manifests import verify_version
from tests.chaos.clients import Told
from tests.support.cluster import POLICY

Heard = list[tuple[ReplicaState, Position]]


def lineage(log: str) -> PolicyLineage:
    return stitch.replay(log).lineage.policy(PolicyId(POLICY))


def activations(log: str) -> Heard:
    """The whole activation stream, in its order."""
    return asyncio.run(_activations(log))


async def _activations(log: str) -> Heard:
    found: Heard = []
    async with open_log(log) as events, aclosing(pages(events, Stream.ACTIVATIONS)) as all_pages:
        async for page in all_pages:
            for record in page:
                event = read(record)
                assert isinstance(event, ReplicaState)
                found.append((event, Position(offset=record.offset, time_ms=record.time_ms)))
    return found


def version(run: str, number: int) -> RunVersion:
    return RunVersion(run=RunId(run), number=VersionNumber(number))


def durable(known: PolicyLineage, store: str) -> int:
    """I1: every accepted and unretired version is there and verifies. Returns how many."""
    checked = 0
    with stitch.open_store(store) as opened:
        for each in known.versions.values():
            if each.retired is None:
                verify_version(opened, each.manifest, deep=True)
                if each.anchor is not None:
                    verify_version(opened, each.anchor, deep=True)
                checked += 1
    return checked


def monotone(heard: Heard) -> None:
    """I2: no incarnation follows an older sequence."""
    newest: dict[str, int] = {}
    for state, at in heard:
        if state.following is not None:
            assert state.following >= newest.get(state.life, 0), f"{state.replica} at {at.offset} went back to {state.following}"
            newest[state.life] = state.following


def truthful(answers: Sequence[Told], known: PolicyLineage) -> None:
    """I3: token for token, the digest in the engine's memory is that of the version that the answer names."""
    for told in answers:
        claimed = {
            n: known.versions[version(told.run, number)].manifest.weights_digest
            for number, start, end in told.spans
            for n in range(start, end)
        }
        computed = {n: digest for digest, start, end in told.digests for n in range(start, end)}
        assert claimed == computed, told
        assert (told.spans[0][0], told.spans[-1][0]) == (told.start, told.end), told


def admitted(answers: Sequence[Told], known: PolicyLineage, *, slack_ms: float) -> None:
    """I4: no answer violates its constraint, as it was judged at admission.

    A version that was abandoned longer than `slack_ms` before the request was sent satisfies no number.
    """
    ended = _abandoned_at(known)
    for told in answers:
        asked, numbers = told.asked, [number for number, _, _ in told.spans]
        assert asked.get("run", told.run) == told.run, told
        assert min(numbers) >= asked.get("min_version", 0), told
        if "exact_version" in asked:
            assert set(numbers) == {asked["exact_version"]}, told
        if "max_lag" in asked:
            assert told.tip is not None, told
            ref = parse_version(told.tip, PolicyId(POLICY))
            tip = RunVersion(run=ref.run, number=ref.number)
            path = [each.ref for each, _ in zip(known.path(tip), range(asked["max_lag"] + 1), strict=False)]
            newer = known.versions[version(told.run, told.start)].position.offset > known.versions[tip].position.offset
            assert version(told.run, told.start) in path or newer, told
        if asked and asked.keys() != {"run"}:
            for number in numbers:
                assert told.sent_ms <= ended.get(version(told.run, number), float("inf")) + slack_ms, told


def _abandoned_at(known: PolicyLineage) -> dict[RunVersion, float]:
    """When, by the log's clock, versions left the living path: at the latest when the first version of another branch came."""
    ended: dict[RunVersion, float] = {}
    for each in sorted(known.versions.values(), key=lambda found: found.position.offset):
        path = {found.ref for found in known.path(each.ref)}
        for other in known.versions.values():
            if other.position.offset < each.position.offset and other.ref not in path and other.ref.run == each.ref.run:
                ended.setdefault(other.ref, float(each.position.time_ms))
    return ended


def within_budget(heard: Heard) -> int:
    """I9: whoever starts an activation finds fewer than the budget activating. Returns the number of activations.

    One that lost its lease counts no more: its capacity is gone anyway, and nobody can know what it does.
    """
    fleet, started = Fleet(), 0
    lost: set[str] = set()
    last: dict[str, int] = {}
    for state, at in heard:
        silence = at.time_ms - last.get(state.life, at.time_ms)
        last[state.life] = at.time_ms
        if silence > 5 * state.heartbeat_ms:
            lost.add(state.life)
        before = fleet
        fleet = fold_fleet(fleet, state, at)
        if state.transition is Transition.ACTIVATED:
            lost.discard(state.life)
        if state.transition is not Transition.ACTIVATION_STARTED or state.phase is not Phase.ACTIVATING:
            continue
        started += 1
        busy = [
            m.state.replica
            for m in before.pool(state.pool)
            if m.state.phase is Phase.ACTIVATING and m.state.life not in {state.life, *lost} and not before.silent(m)
        ]
        if state.life not in lost:
            assert len(busy) < slots(fleet, state.pool), f"{state.replica} began at {at.offset} while {busy} were activating"
    return started


def by_replica(heard: Heard) -> dict[str, ReplicaState]:
    newest: dict[str, ReplicaState] = defaultdict()
    for state, _ in heard:
        newest[state.replica] = state
    return newest
