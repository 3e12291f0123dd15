"""A state of the whole system, and the reductions that keep the number of states small.

Lineages, events, openings and pointers are kept once and named by a number, so that states are small and compare fast, and so
that the real fold judges each event on each lineage once.

What is left out of a state, and why that is sound:

- Verdicts of ids that nobody waits for and that are not in flight: no copy of them can land any more, so nobody asks again.
- Which writer published a version and when: no rule reads it. The log's offsets count accepted decisions only: no rule reads
  them, and pointers compare them, which keeps the order.
- A record in flight that the real fold refuses now and whose expected head (or epoch) has passed: ids are unique, so the head
  never returns, and every later judgement is the same. `Scope.reduce=False` explores without this one.
- Of the pointers that landed, the greatest and the last: nobody reads another.
- Ids of events are used again once nothing in the state names them: two histories that differ in names only are one state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from immutables import Map

from stitch.core import lineage as folds
from stitch.core import pointers
from stitch.core.events import AnchorAdded, ChannelPointer, Decision, RunClaimed, RunVersion, VersionPublished, VersionRetired
from stitch.core.ids import LATEST, EventId, Generation, Offset
from stitch.core.lineage import Lineage, PolicyLineage, Position, Verdict
from stitch.core.writer import Candidate, Opening
from tests.core.builders import POLICY
from tests.core.model import laws

NONE: Final = -1
BUDGETS: Final = (
    "timeouts",
    "losses",
    "doubles",
    "crashes",
    "giveups",
    "retirements",
    "anchors",
    "collections",
    "pointer_losses",
    "compactions",
    "joins",
)
OVER: Final = frozenset({"done", "fenced", "conflict", "dead"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What is explored: two writers, what they try, and how often each fault may strike.

    `runs` are those of the two writers, `todo` how many versions each publishes (0: there is no such writer), `lives` how often
    each may be started. `boots` is where an opener wants to go on from: the `tip`, or one version `back`. `start` is what a new
    run begins with: `nothing`, a `base` checkpoint, or an `alias` of the tip. `bases` is what versions are published against:
    nothing (`full`), the `tip`, or the run's `oldest` version. `first`: the second writer waits until the first one is open.
    `followers` are the replicas: of the `log`, of the `pointers`, or of `either`.
    """

    name: str
    runs: tuple[str, str] = ("a", "a")
    todo: tuple[int, int] = (1, 1)
    lives: tuple[int, int] = (1, 1)
    boots: tuple[str, ...] = ("tip",)
    start: str = "nothing"
    bases: tuple[str, ...] = ("full",)
    first: bool = False
    followers: tuple[str, ...] = ()
    reduce: bool = True
    faults: tuple[tuple[str, int], ...] = ()


class Writer(NamedTuple):
    """One writer in one life. `event` is the decision whose fate it waits for, `candidate` the version that it uploaded."""

    at: str = "idle"
    life: int = 0
    todo: int = 0
    opening: int = NONE
    event: int = NONE
    epoch: int = 0
    candidate: int = NONE
    full: bool = False


class Following(NamedTuple):
    """What a replica follows: a channel sequence, its pointer's order, and the target."""

    sequence: int = 0
    offset: int = NONE
    target: RunVersion | None = None


class State(NamedTuple):
    """Everything that matters for what can happen from here on."""

    lineage: int
    flying: tuple[int, ...]
    store: frozenset[str]
    writers: tuple[Writer, ...]
    told_no: frozenset[EventId]
    listed: frozenset[str]
    topic: tuple[int, ...]
    sent: tuple[int, ...]
    followers: tuple[Following, ...]
    budgets: tuple[int, ...]


T = TypeVar("T")


@dataclass
class Kept(Generic[T]):
    """Values that are named by a number; the same key, the same number."""

    values: list[T] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, value: T, key: object = None) -> int:
        key = value if key is None else key
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.values)
            self.values.append(value)
        return number

    def __getitem__(self, number: int) -> T:
        return self.values[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A lineage after an event."""

    lineage: Lineage
    verdict: Verdict


class World:
    """The values that states name, the real fold, and the canonical form of a state."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.lineages: Kept[Lineage] = Kept()
        self.events: Kept[Decision] = Kept()
        self.openings: Kept[Opening] = Kept()
        self.candidates: Kept[Candidate] = Kept()
        self.pointers: Kept[ChannelPointer] = Kept()
        self._needs: dict[int, laws.Needs] = {}
        self._judged: dict[tuple[int, int], Judged] = {}
        self._pruned: dict[tuple[int, frozenset[EventId]], int] = {}
        self._derived: dict[int, int] = {}
        self._alive: list[Lineage] = []  # keeps what `_pruned` names by its id

    def initial(self) -> State:
        allowed = dict(self.scope.faults)
        assert set(allowed) <= set(BUDGETS), set(allowed) - set(BUDGETS)
        return State(
            lineage=self.lineages.number(Lineage(), "empty"),
            flying=(),
            store=frozenset(),
            writers=tuple(Writer(todo=todo) if todo else Writer(at="dead") for todo in self.scope.todo),
            told_no=frozenset(),
            listed=frozenset(),
            topic=(),
            sent=(),
            followers=tuple(Following() for _ in self.scope.followers),
            budgets=tuple(allowed.get(name, 0) for name in BUDGETS),
        )

    # --- what states name ---

    def policy(self, lineage: int) -> PolicyLineage:
        return self.lineages[lineage].policy(POLICY)

    def needs(self, lineage: int) -> laws.Needs:
        known = self._needs.get(lineage)
        if known is None:
            known = self._needs[lineage] = laws.needs(self.policy(lineage))
        return known

    def judge(self, lineage: int, event: int) -> Judged:
        """What the real fold makes of the event, held against the laws of a step."""
        known = self._judged.get((lineage, event))
        if known is None:
            before = self.lineages[lineage]
            at = Position(offset=Offset(_accepted(before.policy(POLICY))), time_ms=0)
            after, verdict = folds.apply(before, self.events[event], at)
            laws.check_step(before.policy(POLICY), after.policy(POLICY), self.events[event], verdict)
            known = self._judged[lineage, event] = Judged(lineage=after, verdict=verdict)
        return known

    def derived(self, lineage: int) -> int:
        """The pointer that a reader of the lineage would write; NONE where there is none."""
        known = self._derived.get(lineage)
        if known is None:
            made = pointers.pointer(self.policy(lineage), LATEST, event_id=EventId("pointer"), generation=Generation(0))
            # Which decision lies behind it, and of what writer, does not matter to a reader.
            key = None if made is None else (made.order, made.target, made.anchor, made.anchor_manifest.key)
            known = self._derived[lineage] = NONE if made is None else self.pointers.number(made, key)
        return known

    def fresh(self, state: State, who: str) -> EventId:
        """An id of the writer that nothing in the state names."""
        policy = self.policy(state.lineage)
        used = {policy.head, *policy.verdicts, *state.told_no}
        if policy.owner:
            used.add(policy.owner.event_id)
        for number in self._live_events(state):
            event = self.events[number]
            used.add(event.event_id)
            used.add(getattr(event, "expected_head", None))
        return next(EventId(f"{who}#{n}") for n in range(1000) if f"{who}#{n}" not in used)

    def _live_events(self, state: State) -> Iterable[int]:
        yield from state.flying
        for writer in state.writers:
            if writer.event != NONE:
                yield writer.event

    # --- the canonical form ---

    def canonical(self, state: State, after: Lineage | None = None) -> State:
        """The state without what cannot matter. `after` is the lineage where a record just landed."""
        writers = tuple(Writer(at=w.at, life=w.life) if w.at in OVER else w for w in state.writers)
        state = state._replace(writers=writers)
        lineage = self.lineages[state.lineage] if after is None else after
        number = self._prune(lineage, state)
        flying = tuple(sorted(e for e in state.flying if not self._spent(number, e)))
        if flying != state.flying:
            state = state._replace(flying=flying)
            number = self._prune(self.lineages[number], state)
        live = [self.events[e] for e in {*self._live_events(state)}]
        ids = {e.event_id for e in live}
        keys = {e.manifest.key for e in live if isinstance(e, VersionPublished | AnchorAdded)}
        keys |= {e.base.key for e in live if isinstance(e, RunClaimed) and e.base is not None}
        keys |= {self.candidates[w.candidate].manifest.key for w in writers if w.candidate != NONE}
        keys |= self.needs(number).named
        store = state.store if state.store <= keys else state.store & keys
        return state._replace(
            lineage=number,
            store=store,
            told_no=state.told_no & ids,
            listed=state.listed & store,
            topic=self._read(state.topic),
            sent=tuple(sorted({*state.sent})),
        )

    def _read(self, topic: tuple[int, ...]) -> tuple[int, ...]:
        if len(topic) < 2:
            return topic
        greatest = max(topic, key=lambda n: self.pointers[n].order)
        return topic[-1:] if self.pointers[greatest].order == self.pointers[topic[-1]].order else (greatest, topic[-1])

    def _prune(self, lineage: Lineage, state: State) -> int:
        wanted = frozenset(self.events[e].event_id for e in self._live_events(state))
        memo = self._pruned.get((id(lineage), wanted))
        if memo is not None:
            return memo
        policy = lineage.policy(POLICY)
        pruned = replace(policy, verdicts=Map({i: v for i, v in policy.verdicts.items() if i in wanted}))
        number = self.lineages.number(Lineage(policies=Map({POLICY: pruned})), _key(pruned, wanted))
        self._pruned[id(lineage), wanted] = number
        self._alive.append(lineage)
        return number

    def _spent(self, lineage: int, number: int) -> bool:
        """Whether the record in flight can only ever be refused."""
        if not self.scope.reduce:
            return False
        event = self.events[number]
        policy = self.policy(lineage)
        match event:
            case RunClaimed() | VersionPublished():
                passed = event.expected_head != policy.head
            case AnchorAdded():
                passed = event.epoch < policy.epoch
            case VersionRetired():
                passed = event.version in policy.versions and policy.versions[event.version].retired is not None
            case _:
                return False
        return passed and self.judge(lineage, number).verdict is not Verdict.ACCEPTED


def _key(policy: PolicyLineage, wanted: frozenset[EventId]) -> object:
    """What tells two lineages apart, as far as any rule reads them."""
    owner = policy.owner
    return (
        policy.head,
        owner and (owner.run, owner.writer, owner.epoch, owner.event_id if owner.event_id in wanted else None),
        policy.tip,
        tuple(sorted((run, r.greatest, r.superseded) for run, r in policy.runs.items())),
        frozenset(
            (v.ref, v.parent, v.kind, v.base, v.alias_of, v.manifest.key, v.anchor and v.anchor.key, v.abandoned, v.retired is None)
            for v in policy.versions.values()
        ),
        tuple(sorted((name, c.sequence, str(c.target), c.position.offset) for name, c in policy.channels.items())),
        frozenset(policy.verdicts.items()),
    )


def _accepted(policy: PolicyLineage) -> int:
    """How many decisions were accepted: the offset of the next one."""
    count = int(policy.epoch)
    for v in policy.versions.values():
        brought = v.alias_of is not None or (v.parent is None and v.manifest.key.endswith(".base"))
        count += (not brought) + (v.retired is not None) + (v.anchor is not None)
    return count
