"""A trainer killed at any step (SIGKILL), and the next one: no accepted version is lost, and publishing goes on."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from stitch.store.opening import open_store
from stitch.trainer.attempt import Step
from tests.support.provision import start
from tests.trainer.places import Place, same, weights

pytestmark = pytest.mark.chaos

ROOT = Path(__file__).parents[2]
DIES_WITHIN = 120.0
STEPS = [Step.ENCODING, Step.ENCODED, Step.UPLOADING, Step.UPLOADED, Step.DESCRIBED, Step.APPENDED, Step.ACCEPTED, Step.DONE]


def run_until_dead(place: Place, step: Step, phase: str, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.trainer.dying_trainer", place.log_url, place.store_url, step, phase]
    trainer = start(command, output=folder / "trainer.log", cwd=ROOT)
    try:
        assert trainer.process.wait(DIES_WITHIN) == -signal.SIGKILL, trainer.tail()
    finally:
        trainer.kill()


@pytest.mark.parametrize("step", STEPS)
def test_killed_while_publishing(step: Step, tmp_path: Path) -> None:
    place = Place.on_disk(tmp_path)
    run_until_dead(place, step, "publish", tmp_path)
    accepted = step in (Step.APPENDED, Step.ACCEPTED, Step.DONE)
    assert place.numbers() == ([0, 1] if accepted else [0])
    place.check_durable()
    with place.publisher() as pub:
        assert pub.epoch == 2
        assert pub.next_number == (2 if accepted else 1)
        place.check_pointers()
        again = pub.publish(weights(1), 1)
        assert again.ref.number == 1
        assert pub.publish(weights(2)).ref.number == 2
    assert place.numbers() == [0, 1, 2]
    assert place.manifest(1).epoch == (1 if accepted else 2)
    place.check_durable()
    place.check_pointers()
    for number in range(3):
        assert same(place.read_back(number)[0], weights(number))


@pytest.mark.parametrize("step", [Step.APPENDED, Step.ACCEPTED])
def test_killed_while_claiming(step: Step, tmp_path: Path) -> None:
    place = Place.on_disk(tmp_path)
    with place.publisher() as pub:
        pub.publish(weights(0))
    run_until_dead(place, step, "claim", tmp_path)
    with place.publisher() as pub:
        assert pub.epoch == 3
        place.check_pointers()
        assert pub.publish(weights(1)).ref.number == 1
    place.check_durable()


def test_killed_between_event_and_pointer_is_repaired_by_the_next_one(tmp_path: Path) -> None:
    place = Place.on_disk(tmp_path)
    run_until_dead(place, Step.ACCEPTED, "publish", tmp_path)
    pointer = place.latest_pointer()
    assert pointer is not None
    assert pointer.target.number == 0, "the pointer of version 1 was never written"
    with place.publisher():
        place.check_pointers()
    repaired = place.latest_pointer()
    assert repaired is not None
    assert repaired.target.number == 1


def test_what_a_dead_trainer_left_is_never_deleted_nor_overwritten(tmp_path: Path) -> None:
    place = Place.on_disk(tmp_path)
    run_until_dead(place, Step.DESCRIBED, "publish", tmp_path)
    with open_store(place.store_url) as store:
        left = {entry.key: entry.modified_ms for entry in store.entries("")}
    assert any(key.startswith("p/r1/1.e1/") for key in left), "the dead one's bytes"
    with place.publisher() as pub:
        pub.publish(weights(7), 1)
    with open_store(place.store_url) as store:
        now = {entry.key: entry.modified_ms for entry in store.entries("")}
    assert left.items() <= now.items()
    assert same(place.read_back(1)[0], weights(7))
