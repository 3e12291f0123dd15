"""Traces of the protocol's review at the replica; docs/reliability.md lists where each of the others is held."""

from __future__ import annotations

import asyncio

import pytest

from stitch.core.events import FORMAT_LEVEL, FormatRaised, Phase
from stitch.core.ids import EventId, WriterId
from stitch.log import events as log_events
from tests.replica.world import World, check_truth, ref, until

pytestmark = [pytest.mark.integration, pytest.mark.chaos]


async def test_d20_a_joiner_serves_although_publications_outrun_it(world: World) -> None:
    """It enters rotation at the target that was fixed when its last staging began; were it the newest, it never would."""
    async with world.trainer() as trainer:
        await trainer.publish()
        serving = asyncio.Event()

        async def publish_on() -> None:
            while not serving.is_set():
                await trainer.publish()

        publishing = asyncio.create_task(publish_on())
        try:
            replica = await world.replica()
            await until(lambda: any(r.phase is Phase.SERVING for r in world.of("replica-0")), "it serves meanwhile")
            status, answer = await replica.generate()
            assert status == 200, answer
            assert not publishing.done()
        finally:
            serving.set()
            await publishing
        check_truth(world, answer)
        await replica.stop()


async def test_d13_a_replica_of_an_older_release_serves_on_and_follows_the_pointer(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log's format is raised above what it knows: it judges no decision any more, and strands nobody."""
    async with world.trainer():
        replica = await world.replica()
        await replica.serves(ref(0))
    # From here on this process writes as a later release; what has stopped by then stays stopped.
    raised = FormatRaised(level=FORMAT_LEVEL + 1, event_id=EventId("f"), writer=WriterId("operator"))
    with monkeypatch.context() as later:
        later.setattr(log_events, "FORMAT_LEVEL", FORMAT_LEVEL + 1)
        record = log_events.draft(raised, source="a later release")
    await world.events.append(log_events.stream_of(raised), record)
    await until(lambda: "the pointer is followed alone" in caplog.text, "the replica stops at the level")
    assert "upgrade it" in caplog.text

    monkeypatch.setattr(log_events, "FORMAT_LEVEL", FORMAT_LEVEL + 1)
    async with world.trainer(boot_version=None) as trainer:
        version = await trainer.publish()
        await replica.serves(version)
    assert (await replica.info())["target"]["origin"] == "pointer"
    status, answer = await replica.generate(weight_version={"run": "r1", "min_version": version.number})
    assert status == 200, answer
    check_truth(world, answer)
    await replica.stop()
