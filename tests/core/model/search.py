"""Breadth-first exploration of a transition system, with shortest traces and a check for livelocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
S_co = TypeVar("S_co", bound=Hashable, covariant=True)


class Broken(Exception):
    """A law that a step or a state breaks; the message says which."""


class Step(NamedTuple, Generic[S_co]):
    """Something that may happen. `fault` marks what need never happen: a loss, a crash, a time-out, an operator's whim."""

    label: str
    state: S_co
    fault: bool


class System(Protocol[S]):
    """What can be explored."""

    def initial(self) -> S: ...

    def steps(self, state: S) -> Iterator[Step[S]]:
        """Raises Broken where the next step could only be a wrong one."""
        ...

    def check(self, state: S) -> None:
        """Raises Broken where the state is a wrong one."""
        ...

    def check_quiescent(self, state: S) -> None:
        """Raises Broken where nothing is left to do but something should be."""
        ...


@dataclass
class Outcome:
    """What an exploration found. `complete`: every state was explored, none left out for the bound."""

    states: int = 0
    edges: int = 0
    quiescent: int = 0
    depth: int = 0
    complete: bool = True
    broken: str | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        size = f"{self.states} states, {self.edges} edges, {self.quiescent} quiescent, depth {self.depth}"
        if self.broken is None:
            return size
        return "\n".join([f"{self.broken}  ({size})", *(f"  {n:2}. {label}" for n, label in enumerate(self.trace, 1))])


def explore(system: System[S], *, max_states: int, livelocks: bool = True) -> Outcome:
    """Every state that can be reached, up to `max_states`; stops at the first law that is broken."""
    first = system.initial()
    known: dict[S, int] = {first: 0}
    states: list[S] = [first]
    origin: list[tuple[int, str, int]] = [(-1, "", 0)]
    fair: list[list[int]] = []
    outcome = Outcome()
    at = 0
    while at < len(states):
        state = states[at]
        onward: list[int] = []
        quiet = True
        broken = _guard(lambda state=state: system.check(state))
        if broken is None:
            steps, broken = _steps(system, state)
            for step in steps:
                outcome.edges += 1
                quiet = quiet and step.fault
                index = known.get(step.state)
                if index is None:
                    if len(states) >= max_states:
                        outcome.complete = False
                        continue
                    index = known[step.state] = len(states)
                    states.append(step.state)
                    origin.append((at, step.label, origin[at][2] + 1))
                if not step.fault and index != at:
                    onward.append(index)
        if broken is None and quiet:
            outcome.quiescent += 1
            broken = _guard(lambda state=state: system.check_quiescent(state))
        outcome.states += 1
        outcome.depth = max(outcome.depth, origin[at][2])
        if broken is not None:
            outcome.broken, outcome.trace = broken, [*_trace(origin, at)]
            return outcome
        fair.append(onward)
        at += 1
    if livelocks and outcome.complete:
        cycle = _on_a_cycle(fair)
        if cycle is not None:
            outcome.broken, outcome.trace = "livelock: steps without any fault go round for ever", [*_trace(origin, cycle)]
    return outcome


def _guard(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Broken as error:
        return str(error)
    return None


def _steps(system: System[S], state: S) -> tuple[list[Step[S]], str | None]:
    steps: list[Step[S]] = []
    try:
        steps.extend(system.steps(state))
    except Broken as error:
        return steps, str(error)
    return steps, None


def _trace(origin: Sequence[tuple[int, str, int]], at: int) -> Iterable[str]:
    labels = []
    while at > 0:
        before, label, _ = origin[at]
        labels.append(label)
        at = before
    return reversed(labels)


def _on_a_cycle(edges: list[list[int]]) -> int | None:
    """A state that lies on or behind a cycle: Kahn's order leaves it over."""
    waiting = [0] * len(edges)
    for targets in edges:
        for target in targets:
            waiting[target] += 1
    free = [n for n, count in enumerate(waiting) if count == 0]
    sorted_out = 0
    while free:
        at = free.pop()
        sorted_out += 1
        for target in edges[at]:
            waiting[target] -= 1
            if waiting[target] == 0:
                free.append(target)
    if sorted_out == len(edges):
        return None
    return next(n for n, count in enumerate(waiting) if count > 0)
