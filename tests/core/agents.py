"""An activation stream and the agents that speak on it, for tests of the fleet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stitch.core import fleet as folds
from stitch.core.events import Phase, ReplicaState, Transition
from stitch.core.fleet import Fleet, Heard, Member
from stitch.core.ids import ChannelName, EventId, Generation, Incarnation, Offset, PoolName, ReplicaId
from stitch.core.lineage import Position
from tests.core.builders import POLICY, version

POOL = PoolName("pool")
HEARTBEAT_MS = 2000


class Stream:
    """An activation stream and its fold. Time goes on by 10 ms with each record, or as told."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.records: list[tuple[ReplicaState, Position]] = []
        self.now_ms = 0

    def append(self, state: ReplicaState, *, after_ms: int = 10) -> Heard:
        self.now_ms += after_ms
        at = Position(offset=Offset(len(self.records)), time_ms=self.now_ms)
        self.records.append((state, at))
        self.fleet, heard = folds.apply(self.fleet, state, at)
        return heard

    def member(self, replica: str) -> Member:
        return self.fleet.members[ReplicaId(replica)]


class Agent:
    """One life of a replica, which numbers its records and reads its own back where `read` is told."""

    def __init__(self, stream: Stream, replica: str, life: str = "1") -> None:
        self.stream, self.sequence = stream, 0
        self.state = ReplicaState(
            replica=ReplicaId(replica),
            life=EventId(f"{replica}.{life}.0"),
            incarnation=None,
            sequence=0,
            transition=Transition.JOINED,
            event_id=EventId(f"{replica}.{life}.0"),
            phase=Phase.JOINING,
            policy=POLICY,
            channel=ChannelName("latest"),
            pool=POOL,
            url=f"http://{replica}",
            engine="reference",
            capacity=4,
            heartbeat_ms=HEARTBEAT_MS,
            generation=Generation(0),
        )
        self.base = f"{replica}.{life}"

    def join(self, **fields: Any) -> Heard:
        heard = self.stream.append(self.state)
        self.state = replace(self.state, incarnation=Incarnation(len(self.stream.records) - 1), **fields)
        return heard

    def next(self, transition: Transition = Transition.HEARTBEAT, **fields: Any) -> ReplicaState:
        """The agent's next record; not appended."""
        self.sequence += 1
        event_id = EventId(f"{self.base}.{self.sequence}")
        self.state = replace(self.state, transition=transition, sequence=self.sequence, event_id=event_id, **fields)
        return self.state

    def say(self, transition: Transition = Transition.HEARTBEAT, *, after_ms: int = 10, **fields: Any) -> Heard:
        return self.stream.append(self.next(transition, **fields), after_ms=after_ms)

    def want(self) -> Offset:
        """Appends a want; returns its offset, not yet read back."""
        assert self.say(Transition.ACTIVATION_WANTED) is Heard.ACCEPTED
        return Offset(len(self.stream.records) - 1)


def serving(stream: Stream, *replicas: str) -> list[Agent]:
    agents = [Agent(stream, replica) for replica in replicas]
    for agent in agents:
        agent.join(phase=Phase.SERVING, serving=version("a/0"), target=version("a/1"))
        agent.say()
    return agents
