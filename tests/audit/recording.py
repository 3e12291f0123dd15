"""Logs as text: one JSON object for each record.

`python -m tests.audit.recording NAME` records the scripted history as a new golden log. One that was committed is never changed:
every later release must fold it to the same digests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from stitch.audit.replay import view_at
from stitch.core.events import Decision, FormatRaised, Phase, ReplicaState, Transition
from stitch.core.ids import EventId, Incarnation, Offset, ReplicaId, WriterId
from stitch.log.memory import MemoryLog
from stitch.log.port import Draft, Record, Stream
from stitch.log.read import read_all
from stitch.wire.codec import encode
from tests.core.builders import POLICY, History, version
from tests.support.examples import examples

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "logs"
EPOCH_MS: Final = 1_700_000_000_000
STEP_MS: Final = 1000


def lines_of(records: Sequence[Record]) -> Iterator[str]:
    for each in records:
        headers = {name: value.decode() for name, value in each.headers}
        yield json.dumps(
            {
                "stream": each.stream.value,
                "offset": each.offset,
                "time_ms": each.time_ms,
                "key": each.key,
                "headers": headers,
                "value": each.value.hex(),
            }
        )


async def load(lines: Iterable[str]) -> MemoryLog:
    """A log that holds what the lines say, at the same offsets and times."""
    now = [0]
    log = MemoryLog(clock=lambda: now[0])
    for line in lines:
        told: dict[str, Any] = json.loads(line)
        now[0] = told["time_ms"]
        stream = Stream(told["stream"])
        assert (await log.bounds(stream)).end == told["offset"]
        headers = tuple((name, value.encode()) for name, value in told["headers"].items())
        await log.append(stream, Draft(key=told["key"], value=bytes.fromhex(told["value"]), headers=headers))
    return log


# --- the scripted history ----------------------------------------------------------------------------------------------------


def decisions() -> list[Decision]:
    """A base, deltas, an anchor, a channel with a move back, a rewind, a quarantine, a retirement, an alias in a run of its own,
    and decisions of every kind that do not count."""
    history = History()
    history.claimed("a", 0, base="a/0.base")
    history.published("a/1", "a/2", "a/3", base="a/0")
    history.append(history.publication("a/3", base="a/2"))  # a number that is taken
    history.accepted(history.anchor("a/2"))
    history.accepted(history.move("stable", "a/2"))
    history.append(history.move("stable", "a/3", sequence=0))  # what it expects is past
    history.published("a/4", base="a/3")
    late = history.publication("a/5", base="a/4", writer="w0", event_id="late")
    history.claimed("a", 3, writer="w1")  # a rewind: a/4 is abandoned
    history.append(late)  # fenced
    history.published("a/6", base="a/3", writer="w1")
    history.accepted(history.move("stable", "a/6"))
    history.accepted(history.quarantine("a/6"))  # latest and stable go back
    history.append(history.retirement("a/3"))  # needed
    history.accepted(history.retirement("a/4"))
    history.claimed("b", 0, alias="a/3", writer="w2")  # a new run continues from it
    history.append(history.claim("a", 3, writer="w1"))  # a superseded run
    history.published("b/1", writer="w2")
    history.published("b/2", base="b/1", writer="w2")
    history.accepted(history.move("stable", "b/1"))
    history.append(FormatRaised(level=1, event_id=EventId("raise"), writer=WriterId("operator")))  # no higher than it is
    return history.log


def states() -> list[ReplicaState]:
    """Two replicas of one pool and a third that fails; the first is replaced by a newer life, and the older one still speaks."""
    example = examples()["replica_state"]
    assert isinstance(example, ReplicaState)

    def said(
        name: str, life: str, incarnation: int | None, sequence: int, transition: Transition, phase: Phase, serving: str | None
    ) -> ReplicaState:
        return replace(
            example,
            policy=POLICY,
            replica=ReplicaId(name),
            life=EventId(life),
            incarnation=None if incarnation is None else Incarnation(incarnation),
            sequence=sequence,
            transition=transition,
            event_id=EventId(f"{life}-{sequence}"),
            phase=phase,
            serving=None if serving is None else version(serving),
            target=version("a/3"),
            staged=None,
            want=Offset(6) if phase is Phase.ACTIVATING else None,
        )

    return [
        said("one", "one-1", None, 0, Transition.JOINED, Phase.JOINING, None),
        said("two", "two-1", None, 0, Transition.JOINED, Phase.JOINING, None),
        said("one", "one-1", 0, 1, Transition.ACTIVATED, Phase.SERVING, "a/1"),
        said("two", "two-1", 1, 1, Transition.ACTIVATED, Phase.SERVING, "a/1"),
        said("three", "three-1", None, 0, Transition.JOINED, Phase.JOINING, None),
        said("three", "three-1", 4, 1, Transition.ACTIVATION_FAILED, Phase.FAILED, None),
        said("two", "two-1", 1, 2, Transition.ACTIVATION_WANTED, Phase.SERVING, "a/1"),
        said("two", "two-1", 1, 3, Transition.ACTIVATION_STARTED, Phase.ACTIVATING, "a/1"),
        said("two", "two-1", 1, 2, Transition.HEARTBEAT, Phase.SERVING, "a/1"),  # older than what is known
        said("one", "one-2", None, 0, Transition.JOINED, Phase.JOINING, None),
        said("one", "one-1", 0, 2, Transition.HEARTBEAT, Phase.SERVING, "a/1"),  # of the replaced life
        said("two", "two-1", 1, 4, Transition.ACTIVATED, Phase.SERVING, "a/3"),
        said("one", "one-2", 9, 1, Transition.ACTIVATED, Phase.SERVING, "b/1"),
        said("two", "two-1", 1, 5, Transition.LEFT, Phase.LEFT, None),
    ]


async def scripted() -> list[Record]:
    """The records of the history, those of the two streams in turns, one a second."""
    now = [EPOCH_MS]
    log = MemoryLog(clock=lambda: now[0])
    pending: dict[Stream, list[Any]] = {Stream.PUBLICATIONS: decisions(), Stream.ACTIVATIONS: list(states())}
    while any(pending.values()):
        for stream, events in pending.items():
            if events:
                when = datetime.fromtimestamp(now[0] / 1000, UTC)
                encoded = encode(events.pop(0), source="golden", time=when)
                await log.append(stream, Draft(key=encoded.key, value=encoded.value, headers=encoded.headers))
                now[0] += STEP_MS
    found = [record for stream in pending for record in await read_all(log, stream)]
    return sorted(found, key=lambda record: record.time_ms)


def record(name: str) -> None:
    path = GOLDEN / f"{name}.jsonl"
    if path.exists():
        sys.exit(f"{path} was recorded before, and is never changed")
    GOLDEN.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines_of(asyncio.run(scripted()))), encoding="utf-8")
    told = asyncio.run(digests_of(path.read_text(encoding="utf-8").splitlines()))
    path.with_suffix(".digests.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


async def digests_of(lines: Iterable[str]) -> dict[str, str]:
    """The view's digest at each publication, and at the end."""
    async with await load(lines) as log:
        end = (await log.bounds(Stream.PUBLICATIONS)).end
        told = {str(offset): (await view_at(log, offset)).digest for offset in range(end)}
        return {**told, "end": (await view_at(log)).digest}


if __name__ == "__main__":
    record(sys.argv[1])
