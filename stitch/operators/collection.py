"""Retention: versions that nobody needs are retired by event, and bytes that nobody can name any more are deleted (rule 7).

What is kept, retired and free is `stitch.core.retention`'s to say. Here is the order of the steps, each of which may be the last
one of a process: retirements first, those that build on a version before it; then, once the grace is over, of each version its
manifest and then its objects, so that a manifest which is there has all that it names. What is left to do is found in the log and
the store alone, so the next run goes on from wherever this one ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Self

from stitch.core import retention
from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.events import RunVersion, VersionRetired
from stitch.core.fleet import Fleet
from stitch.core.ids import Offset, WriterId
from stitch.core.lineage import PolicyLineage, Position, Verdict, Version
from stitch.core.manifest import ManifestRef
from stitch.core.retention import GRACE_MS, RETAIN, Attempt, Fate, Judgement
from stitch.log.views import new_event_id
from stitch.operators.layout import Placed, attempt_path, placed, policy_prefix
from stitch.operators.ledger import Ledger
from stitch.store.manifests import read_manifest
from stitch.store.port import BlobStore

THREADS: Final = 8
"""Requests to the store at a time: each is small, and waits for the network."""
UNKNOWN_SHOWN: Final = 20
"""Keys of others that a report names; the rest is counted."""

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is, and of how much."""


def silent(step: str, done: int, total: int) -> None:
    """Listens to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Objects of the store, and their bytes."""

    objects: int = 0
    size: int = 0

    @classmethod
    def of(cls, sizes: Collection[int]) -> Self:
        return cls(objects=len(sizes), size=sum(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A version, what lies under its number in the store, and why it is kept or not."""

    ref: RunVersion
    size: int
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Objects of one attempt that are free: its manifests first."""

    attempt: Attempt
    path: str
    keys: tuple[str, ...]
    size: int
    why: str


@dataclass(slots=True, kw_only=True)
class Report:
    """What a run did; of a dry run, what one would do now.

    `retired` were retired by this run, `refused` are those that turned out to be needed. `deleted` bytes are gone, `waiting` ones
    go with a later run. `pending` ones may still come to be named: of an upload under way, say, or of an event that may land.
    `unknown` are keys under the policy's name that no writer of it makes, or none that this log knows.
    """

    policy: str
    dry_run: bool
    kept: tuple[Holding, ...] = ()
    retired: list[Holding] = field(default_factory=list)
    refused: list[tuple[RunVersion, str]] = field(default_factory=list)
    deleted: list[Group] = field(default_factory=list)
    waiting: Amount = Amount()
    pending: Amount = Amount()
    unknown: Amount = Amount()
    unknown_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One listing of the policy's part of the store."""

    objects: tuple[Placed, ...]
    strange: tuple[tuple[str, int], ...]
    sizes: Mapping[RunVersion, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """What objects are judged by: the keys that unretired versions name, and those that retired ones do which are not due."""

    policy: PolicyLineage
    due: frozenset[RunVersion]
    named: frozenset[str]
    lingering: frozenset[str]

    def judge(self, attempt: Attempt, key: str) -> Judgement:
        return retention.judge(self.policy, attempt, due=self.due, named=key in self.named, lingers=key in self.lingering)


class Collector:
    """Of one policy. `grace_ms` by the log's clock. `run` raises Unavailable where a view is not caught up or the store is away,
    CorruptObject where the manifest of a version that must be kept is missing or damaged, OutcomeUnknown. What was done by then
    stays done, and another run goes on."""

    def __init__(
        self,
        ledger: Ledger,
        store: BlobStore,
        *,
        writer: WriterId,
        retain: int = RETAIN,
        grace_ms: int = GRACE_MS,
        progress: Progress = silent,
    ) -> None:
        if retain < 1:
            raise InvalidRequest(f"retain: {retain} versions; keep one at least", field="retain")
        if grace_ms < 0:
            raise InvalidRequest(f"grace: {grace_ms} ms is before the retirement", field="grace")
        self._ledger, self._store, self._writer = ledger, store, writer
        self._retain, self._grace_ms, self._progress = retain, grace_ms, progress
        self._names: dict[ManifestRef, frozenset[str] | None] = {}
        """What each manifest that was read names, itself included; None where there is none."""

    async def run(self, *, dry_run: bool = False) -> Report:
        """Retires and deletes. A dry run looks at what a run would do: it appends nothing, and asks no silent log for its time."""
        earlier, fleet = await self._look()
        plan = retention.plan(earlier, fleet, retain=self._retain)
        report = Report(policy=earlier.policy, dry_run=dry_run)
        await self._check_store(earlier, plan.kept)
        held = await asyncio.to_thread(self._list, earlier)
        if dry_run:
            now_ms = await self._ledger.now_ms()
            report.retired = [_holding(held, ref) for ref in plan.retire]
            policy = retention.after(earlier, plan, Position(offset=Offset(0), time_ms=now_ms or 0))
        else:
            await self._retire(held, report)
            policy, fleet = await self._look()
            plan = retention.plan(policy, fleet, retain=self._retain)
            now_ms = await self._time(held, earlier)
        report.kept = tuple(_holding(held, ref, why) for ref, why in plan.kept.items())
        due = frozenset() if now_ms is None else retention.due(policy, fleet, now_ms=now_ms, grace_ms=self._grace_ms)
        await self._sweep(held, policy, due, report)
        return report

    async def _look(self) -> tuple[PolicyLineage, Fleet]:
        """Both views, caught up; the fleet's last, since replicas act on what was decided."""
        policy = await self._ledger.read_on()
        if policy.owner is None:
            raise InvalidRequest(f"policy: nothing was decided of {policy.policy!r} in this log", field="policy")
        return policy, await self._ledger.read_fleet()

    async def _check_store(self, policy: PolicyLineage, kept: Iterable[RunVersion]) -> None:
        """Before anything is decided: a wrong --store must not end in retirements."""
        await self._names_of(policy, [policy.versions[ref] for ref in kept], strict=True)

    # --- retirements ---------------------------------------------------------------------------------------------------------

    async def _retire(self, held: _Held, report: Report) -> None:
        """One after the other, each on views that are caught up; planned anew where what counts has changed."""
        basis: object = None
        queue: deque[RunVersion] = deque()
        refused: set[RunVersion] = set()
        while True:
            policy, fleet = await self._look()
            now = (policy.head, policy.channels, frozenset(retention.used(policy, fleet)))
            if now != basis:
                basis = now
                queue = deque(retention.plan(policy, fleet, retain=self._retain).retire)
            if not queue:
                return
            ref = queue.popleft()
            if ref in refused or policy.versions[ref].retired is not None:
                continue
            event = VersionRetired(policy=policy.policy, version=ref, event_id=new_event_id(), writer=self._writer)
            verdict = await self._ledger.settle(event)
            if verdict is Verdict.ACCEPTED:
                report.retired.append(_holding(held, ref))
            elif verdict is not Verdict.NOTHING_TO_DO:  # another collector was first
                refused.add(ref)
                report.refused.append((ref, verdict.value))
            self._progress("retiring", len(report.retired), len(report.retired) + len(queue))

    # --- bytes ---------------------------------------------------------------------------------------------------------------

    async def _time(self, held: _Held, earlier: PolicyLineage) -> int | None:
        """The log's time, as its newest decision tells it. Where it fell silent since earlier retirements, it is asked."""
        now_ms = await self._ledger.now_ms()
        times = [v.retired.time_ms for v in earlier.versions.values() if v.retired is not None and v.ref in held.sizes]
        if now_ms is not None and any(now_ms < time_ms + self._grace_ms for time_ms in times):
            return await self._ledger.ask_time()
        return now_ms

    async def _sweep(self, held: _Held, policy: PolicyLineage, due: frozenset[RunVersion], report: Report) -> None:
        """Deletes what is free."""
        sight = await self._sight(policy, due)
        groups = _sort_out(held, sight, report)
        if report.dry_run:
            report.deleted = groups
            return
        if groups:
            # Who knows no more than a pointer must not be led to what goes.
            await self._ledger.write_pointers()
        for number, group in enumerate(groups):
            self._progress("deleting", number, len(groups))
            sight = await self._look_again(sight)
            if all(sight.judge(group.attempt, key).fate is Fate.FREE for key in group.keys):
                await asyncio.to_thread(self._delete, group)
                report.deleted.append(group)

    async def _look_again(self, sight: _Sight) -> _Sight:
        """By views of this moment. What was free stays so by the log; but a replica may have come back to a retired version."""
        policy, fleet = await self._look()
        in_use = {version.ref for ref in retention.used(policy, fleet) for version in policy.chain(ref)}
        if policy is sight.policy and in_use.isdisjoint(sight.due):
            return sight
        return await self._sight(policy, sight.due - in_use)

    def _delete(self, group: Group) -> None:
        """Manifests first, and only then what they name."""
        manifests = [key for key in group.keys if key.endswith(".json")]
        for key in manifests:
            self._store.delete(key)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="stitch-collect") as pool:
            for _ in pool.map(self._store.delete, group.keys[len(manifests) :]):
                pass

    # --- what manifests name -------------------------------------------------------------------------------------------------

    async def _sight(self, policy: PolicyLineage, due: frozenset[RunVersion]) -> _Sight:
        """Reads the manifests of all versions that are not due, for what they share with those that are.

        A retired version's are looked at only where bytes of accepted versions go: nothing else can be shared with it.
        """
        unretired = [version for version in policy.versions.values() if version.retired is None]
        named = await self._names_of(policy, unretired, strict=True)
        retired = [v for v in policy.versions.values() if v.retired is not None and v.ref not in due] if due else []
        lingering = await self._names_of(policy, retired, strict=False)
        return _Sight(policy=policy, due=due, named=frozenset(named), lingering=frozenset(lingering))

    async def _names_of(self, policy: PolicyLineage, versions: Iterable[Version], *, strict: bool) -> set[str]:
        """Raises CorruptObject where `strict` and a manifest is missing."""
        found: set[str] = set()
        forms = [(version, ref) for version in versions for ref in (version.manifest, version.anchor) if ref is not None]
        unread = list({ref for _, ref in forms if ref not in self._names})
        await asyncio.to_thread(self._read_all, unread)
        for version, ref in forms:
            names = self._names[ref]
            if names is not None:
                found |= names
            elif strict:
                raise CorruptObject(
                    f"{version.ref} of policy {policy.policy}: its manifest {ref.key} is not in {self._store.url};"
                    " is this the store that the trainer writes to?"
                )
        return found

    def _read_all(self, refs: list[ManifestRef]) -> None:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="stitch-collect") as pool:
            for number, (ref, names) in enumerate(zip(refs, pool.map(self._read, refs), strict=True), 1):
                self._names[ref] = names
                self._progress("reading manifests", number, len(refs))

    def _read(self, ref: ManifestRef) -> frozenset[str] | None:
        try:
            manifest = read_manifest(self._store, ref)
        except KeyError:
            return None
        return frozenset({ref.key, *(file.key for file in (*manifest.weights, *manifest.files))})

    def _list(self, policy: PolicyLineage) -> _Held:
        objects: list[Placed] = []
        strange: list[tuple[str, int]] = []
        sizes: dict[RunVersion, int] = {}
        for entry in self._store.entries(policy_prefix(policy.policy)):
            found = placed(policy.policy, entry)
            if found is None:
                strange.append((entry.key, entry.size))
                continue
            objects.append(found)
            sizes[found.attempt.ref] = sizes.get(found.attempt.ref, 0) + entry.size
        return _Held(objects=tuple(objects), strange=tuple(strange), sizes=sizes)


def _sort_out(held: _Held, sight: _Sight, report: Report) -> list[Group]:
    """What may be deleted, in order. The report is told of the rest that no version needs."""
    free: dict[Attempt, list[Placed]] = {}
    why: dict[Attempt, str] = {}
    sizes: dict[Fate, list[int]] = {fate: [] for fate in Fate}
    strange = [key for key, _ in held.strange]
    for each in held.objects:
        judged = sight.judge(each.attempt, each.key)
        if judged.fate is Fate.FREE:
            free.setdefault(each.attempt, []).append(each)
            why[each.attempt] = judged.why
        elif judged.fate is Fate.UNKNOWN:
            strange.append(each.key)
        if judged.fate is not Fate.KEPT or each.key not in sight.named:
            sizes[judged.fate].append(each.entry.size)
    report.waiting, report.pending = Amount.of(sizes[Fate.WAITING]), Amount.of(sizes[Fate.KEPT])
    report.unknown = Amount.of([*sizes[Fate.UNKNOWN], *(size for _, size in held.strange)])
    report.unknown_keys = tuple(strange[:UNKNOWN_SHOWN])
    groups = [_group(sight.policy, attempt, objects, why[attempt]) for attempt, objects in free.items()]
    return sorted(groups, key=lambda group: _newest_first(sight.policy, group))


def _holding(held: _Held, ref: RunVersion, why: tuple[str, ...] = ()) -> Holding:
    return Holding(ref=ref, size=held.sizes.get(ref, 0), why=why)


def _group(policy: PolicyLineage, attempt: Attempt, objects: list[Placed], why: str) -> Group:
    ordered = sorted(objects, key=lambda each: (not each.is_manifest, each.key))
    return Group(
        attempt=attempt,
        path=attempt_path(policy.policy, attempt),
        keys=tuple(each.key for each in ordered),
        size=sum(each.entry.size for each in ordered),
        why=why,
    )


def _newest_first(policy: PolicyLineage, group: Group) -> tuple[int, str]:
    """What builds on a version goes before it, so that a manifest which is there leads to all that it needs."""
    version = policy.versions.get(group.attempt.ref)
    return (0 if version is None else -version.position.offset, group.path)
