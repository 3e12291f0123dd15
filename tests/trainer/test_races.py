"""Two publishers at once on one SQLite log, a hundred rounds: one winner for each version and each claim, and the loser knows.

And the append that lands after its time-out, long after everybody went on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from stitch.core.errors import Fenced, OutcomeUnknown, StitchError
from stitch.core.events import RunClaimed, VersionPublished
from stitch.core.lineage import Lineage, PolicyLineage, Position, Verdict
from stitch.log.events import read
from stitch.log.faulty import Fault, FaultyLog, Plan, script
from stitch.log.opening import open_log
from stitch.log.port import Stream
from stitch.log.read import read_all
from stitch.log.views import fold_lineage
from stitch.trainer.author import Publication
from stitch.trainer.portal import LoopThread
from stitch.trainer.publisher import Publisher
from tests.trainer.places import PATIENCE, POLICY, Place, Weights, weights

pytestmark = pytest.mark.chaos

ROUNDS: Final = 100
STEPS: Final = 20
STEP_S: Final = 0.002
"""The owner starts between 0 and STEPS such steps after its rival: over the rounds they meet at every point of an opening."""
SHORT: Final = 0.5
"""A deadline that is meant to pass."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(f"sqlite://{tmp_path / 'log.db'}", f"memory://{tmp_path.name}")


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """What each comes to, its error where it fails; all start at the same moment."""
    barrier = threading.Barrier(len(acts))

    def run(act: Callable[[], Any]) -> Any:
        barrier.wait(PATIENCE)
        try:
            return act()
        except StitchError as error:
            return error

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(run, acts))


def test_two_publishers_race_for_each_of_a_hundred_versions(place: Place) -> None:
    """One holds the policy, the other takes it over and publishes the same number at that moment, with other weights. Whoever was
    told that it published is in the lineage with its own bytes, whoever was told that it is fenced is not; next, roles change."""
    owner = place.publisher()
    told: dict[int, str] = {}
    fenced = 0
    try:
        for round_ in range(ROUNDS):
            number = owner.next_number
            mine, other = at_once(
                partial(_publish, owner, weights(round_), number, round_ % STEPS * STEP_S),
                partial(_take_over, place, weights(round_ + ROUNDS), number),
            )
            assert isinstance(other, tuple), f"who opened last is never fenced: {other}"
            newcomer, theirs = other
            if isinstance(mine, Publication):
                told[mine.ref.number] = mine.manifest_key
                assert theirs.ref.number == number + 1
            else:
                fenced += 1
                assert isinstance(mine, Fenced)
                assert newcomer.writer in str(mine)
                assert theirs.ref.number == number
            told[theirs.ref.number] = theirs.manifest_key
            with pytest.raises(Fenced):
                owner.publish(weights(round_))
            owner.close()
            owner = newcomer
    finally:
        owner.close()
    policy = place.policy()
    assert {ref.number: version.manifest.key for ref, version in policy.versions.items()} == told
    assert policy.epoch == ROUNDS + 1
    assert 0 < fenced < ROUNDS, "always the same one won: the race never was one"


def _publish(owner: Publisher, model: Weights, number: int, after_s: float) -> Publication:
    time.sleep(after_s)
    return owner.publish(model, number)


def _take_over(place: Place, model: Weights, number: int) -> tuple[Publisher, Publication]:
    """The publisher that took over, and its version: `number`, or the next where the owner's was accepted before the claim."""
    newcomer = place.publisher()
    return newcomer, newcomer.publish(model, max(number, newcomer.next_number))


def test_a_hundred_pairs_of_claims_leave_one_owner_each(place: Place) -> None:
    """Two open at once. Both claims count in the end, one after the other, and the later one owns the policy: the earlier learns it
    at its publish, and the later never fails."""
    beaten = 0
    for round_ in range(ROUNDS):
        opened = at_once(place.publisher, place.publisher)
        pubs = [each for each in opened if isinstance(each, Publisher)]
        assert len(pubs) == 2, opened
        first, last = sorted(pubs, key=lambda pub: pub.epoch)
        assert first.epoch == last.epoch - 1 == 2 * round_ + 1
        lost, won = at_once(partial(first.publish, weights(0)), partial(last.publish, weights(1)))
        assert isinstance(lost, Fenced)
        assert last.writer in str(lost)
        assert isinstance(won, Publication)
        assert won.ref.number == round_
        for pub in pubs:
            pub.close()
    policy, verdicts = _judged(place)
    assert policy.epoch == 2 * ROUNDS
    for verdict in verdicts[RunClaimed]:
        beaten += verdict is Verdict.STALE_HEAD
        assert verdict in (Verdict.ACCEPTED, Verdict.STALE_HEAD)
    assert beaten, "no claim was beaten to it: the race never was one"
    assert verdicts[VersionPublished].count(Verdict.ACCEPTED) == ROUNDS


def _judged(place: Place) -> tuple[PolicyLineage, dict[type, list[Verdict]]]:
    """The policy, and what became of each decision, by the order of the log alone."""

    async def look() -> tuple[PolicyLineage, dict[type, list[Verdict]]]:
        lineage, found = Lineage(), dict[type, list[Verdict]]()
        async with open_log(place.log_url) as log:
            for record in await read_all(log, Stream.PUBLICATIONS):
                event = read(record)
                assert isinstance(event, RunClaimed | VersionPublished)
                lineage = fold_lineage(lineage, event, Position(offset=record.offset, time_ms=record.time_ms))
                found.setdefault(type(event), []).append(lineage.policy(POLICY).verdicts[event.event_id])
        return lineage.policy(POLICY), found

    return asyncio.run(look())


# --- after the time-out ------------------------------------------------------------------------------------------------------


def of_publications(fault: Fault) -> Plan:
    return lambda stream, draft: fault if stream is Stream.PUBLICATIONS else Fault.NONE


@contextmanager
def faulty(place: Place) -> Iterator[tuple[FaultyLog, Callable[[], int]]]:
    """A handle of the place's log whose appends can be held, and what lets them land: through another handle, as a broker would
    that had them all the time."""
    loop = LoopThread()
    landing = FaultyLog(open_log(place.log_url))
    held = FaultyLog(open_log(place.log_url))

    async def release() -> int:
        landing._held.extend(held._held)
        held._held.clear()
        return await landing.release()

    try:
        yield held, lambda: loop.call(release)
    finally:
        loop.call(landing.aclose)
        loop.call(held.aclose)
        loop.close()


@pytest.mark.parametrize("when", ["before the next publish", "during the next publish", "after another took over"])
def test_a_produce_that_lands_after_its_time_out_is_settled(place: Place, when: str) -> None:
    """The writer does not know whether it published. It learns it before it decides anything else."""
    with faulty(place) as (log, release), place.publisher(log=log) as pub:
        pub.publish(weights(0))
        log.plan(of_publications(Fault.HOLD))
        with pytest.raises(OutcomeUnknown, match="may still count"):
            pub.publish(weights(1), timeout=SHORT)
        copies = log.held
        assert copies >= 1
        log.plan(script())
        if when == "before the next publish":
            assert release() == copies
            assert pub.publish(weights(1)).ref.number == 1, "the same version again: it is the one that landed"
            assert pub.publish(weights(2)).ref.number == 2
            assert place.numbers() == [0, 1, 2]
        elif when == "during the next publish":
            assert pub.publish(weights(2)).ref.number == 2, "the copy that was appended to settle it counts"
            assert release() == copies
            assert pub.publish(weights(3)).ref.number == 3
            assert place.numbers() == [0, 1, 2, 3]
        else:
            with place.publisher() as other:
                assert other.publish(weights(9)).ref.number == 1
                assert release() == copies
                with pytest.raises(Fenced, match=other.writer):
                    pub.publish(weights(1))
                assert other.publish(weights(10)).ref.number == 2
            assert place.numbers() == [0, 1, 2]
    place.check_durable()
