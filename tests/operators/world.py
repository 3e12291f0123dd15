"""A log and a store with versions in them, and what operators do to both; each moment may be the last one of a process."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import uuid
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from stitch.core.anchors import AnchorRule
from stitch.core.events import ChannelPointer, Event, Phase, ReplicaState, RunClaimed, RunVersion, Transition, VersionRetired
from stitch.core.ids import ChannelName, EventId, Generation, Incarnation, PoolName, ReplicaId, RunId, VersionNumber, WriterId
from stitch.core.lineage import PolicyLineage
from stitch.core.manifest import Manifest, ManifestRef, StoredFile
from stitch.core.pointers import greatest
from stitch.log.events import append, read
from stitch.log.memory import MemoryLog, now_ms
from stitch.log.port import EventLog, Stream
from stitch.log.read import read_all
from stitch.log.views import new_event_id
from stitch.operators import collection, compaction
from stitch.operators.collection import Collector
from stitch.operators.compaction import Compactor
from stitch.operators.ledger import Ledger, new_operator, open_ledger
from stitch.operators.versions import added_anchors, read_lineage
from stitch.store.manifests import base_prefix, read_manifest, verify_version, write_manifest
from stitch.store.memory import MemoryStore
from stitch.store.opening import open_store
from stitch.store.port import BlobStore
from stitch.weights.digest import specs, weights_digest
from stitch.weights.encode import encode_full
from stitch.weights.host import host_tensors
from stitch.weights.staging import Staged, Staging
from tests.operators.published import CONFIG, POLICY, Published, Weights, model, stepped
from tests.support.commands import Said, command

HOUR_MS = 3_600_000
T = TypeVar("T")


class Made(Published):
    """As a trainer makes them whose deltas leave unchanged carried files where the base has them, if `sharing`."""

    def __init__(self, store: BlobStore, *, sharing: bool = False) -> None:
        self.sharing = sharing
        self.weights: list[Weights] = []
        self._of: dict[str, Weights] = {}
        self._shared: StoredFile | None = None
        super().__init__(store)

    def forms(self, forms: str) -> Made:
        """`Fds`: a full version, a delta of whole tensors, a sparse one; each on the one before."""
        for form in forms:
            if form == "F":
                self._remember(model(len(self.weights)))
                self.full(self.weights[-1])
                continue
            old = self._of[self._tip().weights_digest]
            self._remember(stepped(old, seed=len(self.weights)))
            self._shared = self._tip().files[0] if self.sharing else None
            if form == "s":
                self.sparse(old, self.weights[-1])
            else:
                self.changed(self.weights[-1])
            self._shared = None
        return self

    def _remember(self, weights: Weights) -> None:
        self.weights.append(weights)
        self._of[weights_digest(specs(host_tensors(weights)))] = weights

    def open_with_base(self, run: str, weights: Weights, *, claim: bool = True) -> str:
        """A new run that begins with a base checkpoint as its version 0; returns what its keys begin with. Where it does not
        `claim`, the opener died after the upload."""
        with tempfile.TemporaryDirectory() as scratch:
            encoded = encode_full(weights, Path(scratch))
            prefix = base_prefix(POLICY, RunId(run), VersionNumber(0), encoded.weights_digest)
            manifest = Manifest(
                policy=POLICY,
                run=RunId(run),
                number=VersionNumber(0),
                epoch=None,
                kind=encoded.kind,
                codec=encoded.codec,
                parent=None,
                base=None,
                tensors=encoded.tensors,
                weights_digest=encoded.weights_digest,
                weights=tuple(self._put(prefix, file.path, file.source.read_bytes()) for file in encoded.weights),
                files=(self._put(prefix, "config.json", CONFIG),),
            )
        base = write_manifest(self.store, manifest)
        if claim:
            self._remember(weights)
            self._claim(RunId(run), VersionNumber(0), base=base)
        return prefix

    def rewind(self, number: int) -> None:
        """The run's own trainer opens it again, to go on from an older version."""
        owner = self.policy.owner
        assert owner is not None
        self._claim(owner.run, VersionNumber(number))

    def _claim(self, run: RunId, boot: VersionNumber, base: ManifestRef | None = None) -> None:
        self._decide(
            RunClaimed(
                policy=POLICY,
                run=run,
                event_id=self._id(),
                writer=WriterId("w"),
                expected_head=self.policy.head,
                boot=boot,
                base=base,
            )
        )

    def _put(self, prefix: str, path: str, data: bytes) -> StoredFile:
        return self._shared if self._shared is not None and path == "config.json" else super()._put(prefix, path, data)


class World:
    """`ahead_ms` is how far the log's clock is ahead of this machine's: set it to let time pass."""

    def __init__(self, store: BlobStore | None = None, *, sharing: bool = False, log: EventLog | None = None) -> None:
        self.ahead_ms = 0
        self.log = log or MemoryLog(f"t{uuid.uuid4().hex}", clock=lambda: now_ms() + self.ahead_ms)
        self.store = store or MemoryStore()
        self.made = Made(self.store, sharing=sharing)
        self._written = 0

    async def publish(self, forms: str = "") -> None:
        """Makes versions, and appends what is not in the log yet."""
        self.made.forms(forms)
        await self.flush()

    async def flush(self) -> None:
        for decision in self.made.decisions[self._written :]:
            await self.say(decision)
        self._written = len(self.made.decisions)

    async def say(self, event: Event) -> None:
        await append(self.log, event, source="test")

    async def policy(self) -> PolicyLineage:
        return (await read_lineage(self.log)).policy(POLICY)

    def now(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs a coroutine on another thread, to its end, from wherever this is called."""
        found: list[T] = []
        errors: list[BaseException] = []

        async def run() -> T:
            return await work()

        def act() -> None:
            try:
                found.append(asyncio.run(run()))
            except BaseException as error:  # noqa: BLE001 # raised again where it is waited for
                errors.append(error)

        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return found[0]

    # --- what operators do ---

    @asynccontextmanager
    async def ledger(self, log: EventLog | None = None) -> Any:
        async with open_ledger(log or self.log, POLICY, source="/test") as ledger:
            yield ledger

    async def gc(
        self,
        *,
        retain: int = 1,
        grace_ms: int = HOUR_MS,
        dry_run: bool = False,
        progress: collection.Progress = collection.silent,
        store: BlobStore | None = None,
        log: EventLog | None = None,
        tap: Callable[[Ledger], None] | None = None,
    ) -> collection.Report:
        async with self.ledger(log) as ledger:
            if tap is not None:
                tap(ledger)
            collector = Collector(
                ledger, store or self.store, writer=new_operator(), retain=retain, grace_ms=grace_ms, progress=progress
            )
            return await collector.run(dry_run=dry_run)

    async def compact(
        self,
        *numbers: int,
        every: int = 16,
        dry_run: bool = False,
        progress: compaction.Progress = compaction.silent,
        store: BlobStore | None = None,
        log: EventLog | None = None,
        tap: Callable[[Ledger], None] | None = None,
        run: str = "r1",
    ) -> compaction.Report:
        with tempfile.TemporaryDirectory() as workdir:
            async with self.ledger(log) as ledger:
                if tap is not None:
                    tap(ledger)
                compactor = Compactor(
                    ledger,
                    store or self.store,
                    Path(workdir),
                    writer=new_operator(),
                    rule=AnchorRule(every=every, ratio=1e9),
                    progress=progress,
                )
                return await compactor.run([ref(number, run) for number in numbers], dry_run=dry_run)

    # --- what replicas do ---

    async def replica(self, name: str, **fields: Any) -> ReplicaState:
        """A replica joins and says where it stands."""
        state = ReplicaState(
            replica=ReplicaId(name),
            life=new_event_id(),
            incarnation=None,
            sequence=0,
            transition=Transition.JOINED,
            event_id=new_event_id(),
            phase=Phase.SERVING,
            policy=POLICY,
            channel=ChannelName("latest"),
            pool=PoolName("pool"),
            url="http://r",
            engine="reference",
            capacity=1,
            heartbeat_ms=2000,
            generation=Generation(0),
        )
        state = replace(state, event_id=EventId(state.life))
        await self.say(state)
        joined = await self.log.newest(Stream.ACTIVATIONS)
        assert joined is not None
        return await self.speak(replace(state, incarnation=Incarnation(joined.offset)), **fields)

    async def speak(self, state: ReplicaState, **fields: Any) -> ReplicaState:
        transition = Transition.HEARTBEAT
        state = replace(state, sequence=state.sequence + 1, transition=transition, event_id=new_event_id(), **fields)
        await self.say(state)
        return state

    async def stage(self, number: int, run: str = "r1", staging: Staging | None = None) -> Staged:
        """As a replica does that joins with nothing, unless it is given its staging area."""
        policy = await self.policy()
        version = policy.versions[ref(number, run)]
        with tempfile.TemporaryDirectory() as folder:
            area = staging or Staging(Path(folder), self.store)
            try:
                return area.stage(version.ref.of(POLICY), version.manifest, anchors=added_anchors(policy, version.ref))
            finally:
                if staging is None:
                    area.close()

    async def latest_pointer(self) -> ChannelPointer | None:
        events = [read(record) for record in await read_all(self.log, Stream.POINTERS)]
        return greatest(event for event in events if isinstance(event, ChannelPointer))

    # --- what must hold ---

    def held(self) -> set[str]:
        return {entry.key for entry in self.store.entries("")}

    async def check(self, *, stage: bool = True) -> None:
        """I1: all that an accepted and unretired version names is there and right; to `stage` the tip as well takes longer."""
        policy = await self.policy()
        for version in policy.versions.values():
            if version.retired is None:
                for form in (version.manifest, version.anchor):
                    if form is not None:
                        verify_version(self.store, form, deep=True)
                assert all(link.retired is None for link in policy.chain(version.ref))
        if stage and policy.tip is not None:
            staged = await self.stage(policy.tip.number, policy.tip.run)
            assert staged.weights_digest == policy.versions[policy.tip].manifest.weights_digest

    def check_manifests_lead_to_objects(self) -> None:
        """A manifest that is there has all objects of its own."""
        keys = self.held()
        for key in keys:
            if key.endswith(".json"):
                for file in self._files(key):
                    assert file.key in keys, f"{key} names {file.key}, which is gone"

    def _files(self, key: str) -> tuple[StoredFile, ...]:
        refs = {r.key: r for v in self.made.policy.versions.values() for r in (v.manifest, v.anchor) if r is not None}
        found: ManifestRef | None = refs.get(key)
        if found is None:
            return ()
        manifest = read_manifest(self.store, found)
        return (*manifest.weights, *manifest.files)


def ref(number: int, run: str = "r1") -> RunVersion:
    return RunVersion(run=RunId(run), number=VersionNumber(number))


def numbers(policy: PolicyLineage, *, retired: bool) -> set[int]:
    return {int(v.ref.number) for v in policy.versions.values() if (v.retired is not None) == retired}


async def retired_and_hours_later(world: World, forms: str = "FddFdd") -> None:
    """All but the newest chain was retired, and the grace is over by the log's clock; the log was silent since."""
    await world.publish(forms)
    await world.gc()
    world.ahead_ms += HOUR_MS


def retirement(number: int) -> VersionRetired:
    return VersionRetired(policy=POLICY, version=ref(number), event_id=new_event_id(), writer=WriterId("other"))


async def publications(world: World) -> list[Any]:
    return [read(record) for record in await read_all(world.log, Stream.PUBLICATIONS)]


def before_first_decision(act: Callable[[], Any]) -> Callable[[Ledger], None]:
    """`act` happens after the plan was made, just before its first decision is appended."""

    def tap(ledger: Ledger) -> None:
        settle = ledger.settle
        done = False

        async def after(decision: Any, timeout: float = 60.0) -> Any:
            nonlocal done
            if not done:
                done = True
                await act()
            return await settle(decision, timeout)

        ledger.settle = after  # type: ignore[method-assign]

    return tap


class Shop:
    """A log and a store on disk, for the command line."""

    def __init__(self, folder: Path, forms: str) -> None:
        self.log, self.store = f"sqlite://{folder / 'log.db'}", f"file://{folder / 'store'}"
        with open_store(self.store) as store:
            asyncio.run(Made(store).forms(forms).write_log(self.log))

    def gc(self, *options: object) -> Said:
        return command("gc", "--log", self.log, "--store", self.store, "--policy", "p", *options)

    def numbers(self) -> set[int]:
        with open_store(self.store) as store:
            return {int(entry.key.split("/")[2].split(".")[0]) for entry in store.entries("p/")}
