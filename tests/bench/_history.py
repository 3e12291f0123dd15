"""Histories for the benches of the log: publications of one run, and the heartbeats of a fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from aiokafka import AIOKafkaProducer

from stitch.core.events import Phase, ReplicaState, RunClaimed, RunVersion, Transition, VersionPublished
from stitch.core.ids import EventId, Incarnation, PolicyId, ReplicaId, RunId, VersionNumber
from stitch.core.manifest import Kind
from stitch.log.events import draft
from stitch.log.port import Draft
from tests.support.examples import examples

FLEET: Final = 50
"""Replicas that beat."""
BATCH_BYTES: Final = 512 * 1024
UNCONFIRMED: Final = 20_000
"""Records on their way at a time."""


def publications(policy: str, run: str, count: int, *, anchor_every: int = 50) -> Iterator[Draft]:
    """A claim, then versions 0 to count - 2, deltas but for each `anchor_every`th."""
    claim, published = examples()["run_claimed"], examples()["version_published"]
    assert isinstance(claim, RunClaimed)
    assert isinstance(published, VersionPublished)
    name, owner = PolicyId(policy), RunId(run)
    yield draft(replace(claim, policy=name, run=owner, event_id=EventId(f"{run}-claim")), source="bench")
    head, parent = EventId(f"{run}-claim"), None
    for number in range(count - 1):
        full = number % anchor_every == 0
        event = replace(
            published,
            policy=name,
            run=owner,
            number=VersionNumber(number),
            event_id=EventId(f"{run}-{number}"),
            expected_head=head,
            parent=parent,
            kind=Kind.FULL if full else Kind.DELTA,
            base=None if full else RunVersion(run=owner, number=VersionNumber(number - 1)),
        )
        head, parent = event.event_id, event.number
        yield draft(event, source="bench")


def heartbeats(policy: str, count: int) -> Iterator[Draft]:
    """What FLEET replicas of one policy say in turns: each joins, then beats."""
    state = examples()["replica_state"]
    assert isinstance(state, ReplicaState)
    for index in range(count):
        member, turn = index % FLEET, index // FLEET
        joins = turn == 0
        yield draft(
            replace(
                state,
                policy=PolicyId(policy),
                replica=ReplicaId(f"replica-{member:03}"),
                life=EventId(f"life-{member}"),
                incarnation=None if joins else Incarnation(member),
                sequence=turn,
                event_id=EventId(f"beat-{index}"),
                transition=Transition.JOINED if joins else Transition.HEARTBEAT,
                phase=Phase.JOINING if joins else Phase.SERVING,
                want=None,
                pause_ms=None,  # as heartbeats are
                error=None,
            ),
            source="bench",
        )


async def fill_topic(
    servers: str, topic: str, drafts: Iterable[Draft], *, step_ms: int | None = None, count: int | None = None
) -> int:
    """Appends all in their order by one producer, which batches them; returns how many.

    With `step_ms` and `count` the records bear times so far apart, of which the last is now; the topic must allow that.
    """
    first_ms = None if step_ms is None or count is None else time.time_ns() // 1_000_000 - step_ms * (count - 1)
    waiting: list[asyncio.Future[Any]] = []
    written = 0
    async with AIOKafkaProducer(
        bootstrap_servers=servers, acks="all", enable_idempotence=True, max_batch_size=BATCH_BYTES, linger_ms=5
    ) as producer:
        for each in drafts:
            stamp = None if first_ms is None or step_ms is None else first_ms + step_ms * written
            headers = list(each.headers)
            sent = await producer.send(topic, value=each.value, key=each.key.encode(), headers=headers, timestamp_ms=stamp)
            waiting.append(sent)
            written += 1
            if len(waiting) == UNCONFIRMED:
                await asyncio.gather(*waiting)
                waiting.clear()
        await asyncio.gather(*waiting)
    return written
