"""A replica beside an engine that somebody else runs: what that engine says of itself before is never believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.core.events import Transition
from stitch.engines.opening import open_engine
from stitch.engines.port import PauseMode
from stitch.engines.reference.serve import init_checkpoint
from tests.replica.world import SMALL, World, check_truth, ref, until
from tests.support.engines import ReferenceProcess, start_reference

pytestmark = pytest.mark.integration


@pytest.fixture
def engine(tmp_path: Path) -> ReferenceProcess:
    """Other weights under the label that version 0 will have, paused by somebody who is gone."""
    init_checkpoint(tmp_path / "other", seed=77, config=SMALL)
    return start_reference(tmp_path / "other", output=tmp_path / "engine.out", label="0")


async def test_it_is_loaded_at_join_whatever_its_label_says(world: World, engine: ReferenceProcess) -> None:
    client = open_engine("reference", engine.url)
    try:
        await client.pause(PauseMode.IN_PLACE)
        replica = await world.replica(engine_url=engine.url)
        async with world.trainer() as trainer:
            await replica.serves(ref(0))
            status, answer = await replica.generate()
            assert status == 200
            check_truth(world, answer)
            await replica.serves(await trainer.publish())
            check_truth(world, (await replica.generate())[1])
            await replica.stop()
            await until(lambda: bool(world.of("replica-0", Transition.LEFT)), "it left in order")
            # A second life at the same version finds its own path and label in the engine, and proves them all the same.
            await client.set_label("0")
            again = await world.replica(engine_url=engine.url)
            await again.serves(ref(1))
            check_truth(world, (await again.generate())[1])
            await again.stop()
        assert await client.ready(), "the engine outlives the replica, and is not left paused"
    finally:
        await client.aclose()
        engine.process.stop()


async def test_an_attached_engine_that_goes_away_is_noticed(world: World, engine: ReferenceProcess) -> None:
    replica = await world.replica(engine_url=engine.url, watchdog_failures=2)
    async with world.trainer():
        await replica.serves(ref(0))
    engine.process.stop()
    status, answer = await replica.generate()
    assert (status, answer["error"]["type"], answer["error"]["generation_started"]) == (503, "Unavailable", False)
    assert await replica.exit_code() == 70


async def test_an_engine_that_somebody_else_changed_is_not_vouched_for(world: World, engine: ReferenceProcess) -> None:
    replica = await world.replica(engine_url=engine.url)
    client = open_engine("reference", engine.url)
    try:
        async with world.trainer():
            await replica.serves(ref(0))
        await client.load(world.folder / "other", "0", flush_cache=True)
        assert await replica.exit_code() == 70
        assert "somebody else" in (world.of("replica-0", Transition.LEFT)[-1].error or "")
    finally:
        await client.aclose()
        engine.process.stop()


async def test_a_refusal_at_join_is_told_and_tried_again(world: World, engine: ReferenceProcess) -> None:
    async with world.http.post(f"{engine.url}/misbehave", json={"refuse_update": True}) as response:
        assert response.status == 200
    try:
        replica = await world.replica(engine_url=engine.url)
        async with world.trainer():
            await until(lambda: bool(world.of("replica-0", Transition.ACTIVATION_FAILED)), "the refusal is told")
            assert (await replica.generate())[0] == 409
            async with world.http.post(f"{engine.url}/misbehave", json={"refuse_update": False}) as response:
                assert response.status == 200
            await replica.serves(ref(0))
    finally:
        engine.process.stop()
