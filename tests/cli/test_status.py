"""`stitch status`: which weights a replica serves, held against those that were published under that name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from stitch.core.events import Phase, ReplicaState, RunVersion, Transition
from stitch.core.ids import (
    Digest,
    EventId,
    Incarnation,
    Offset,
    RunId,
    VersionNumber,
)
from stitch.log.events import append
from stitch.log.opening import open_log
from stitch.store.memory import MemoryStore
from tests.operators.published import POLICY, Published, model
from tests.support.commands import command
from tests.support.examples import examples

pytestmark = pytest.mark.integration

EXAMPLE = examples()["replica_state_joined"]
assert isinstance(EXAMPLE, ReplicaState)
JOINED: Final = replace(EXAMPLE, policy=POLICY)


def serving(url: str, digest: Digest) -> None:
    """A replica says that it serves version 0 with weights of this digest."""

    async def say() -> None:
        async with open_log(url) as log:
            await append(log, JOINED, source="a")
            state = replace(
                JOINED,
                incarnation=Incarnation(Offset(0)),
                sequence=1,
                transition=Transition.ACTIVATED,
                event_id=EventId("act"),
                phase=Phase.SERVING,
                serving=RunVersion(run=RunId("r1"), number=VersionNumber(0)),
                weights_digest=digest,
            )
            await append(log, state, source="a")

    asyncio.run(say())


@pytest.fixture
def published(tmp_path: Path) -> tuple[str, Digest]:
    """A log with one version, and that version's weights digest."""
    line = Published(MemoryStore())
    line.full(model())
    url = f"sqlite://{tmp_path / 'log.db'}"
    asyncio.run(line.write_log(url))
    return url, line.version(0).manifest.weights_digest


def test_the_weights_served_are_those_that_were_published(published: tuple[str, Digest]) -> None:
    url, digest = published
    serving(url, digest)
    told = command("status", "--log", url, "--json").json
    assert told["policies"][0]["weights_digest"] == digest
    (row,) = told["replicas"]
    assert (row["serving"], row["weights_digest"], row["as_published"]) == ("r1/weight_v000000", digest, True)
    assert "other weights" not in command("status", "--log", url).out


def test_other_weights_under_the_same_name_are_said(published: tuple[str, Digest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    url, _ = published
    serving(url, Digest("0" * 64))
    (row,) = command("status", "--log", url, "--json").json["replicas"]
    assert row["as_published"] is False
    assert "serves other weights than were published" in command("status", "--log", url).out
