"""Every outcome becomes known: lost, late and doubled appends, outages, and writers in each other's way.

D1, D2 and others are the defects of an earlier draft of the protocol by which these traces are known.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from stitch.core.errors import Fenced, InvalidRequest, LogDiverged, OutcomeUnknown, StitchError, Unavailable
from stitch.core.events import RunClaimed
from stitch.core.ids import EventId, RunId, WriterId
from stitch.log.events import append, read
from stitch.log.faulty import Fault, FaultyLog, Plan, script, seeded
from stitch.log.memory import MemoryLog
from stitch.log.port import Draft, EventLog, Stream
from stitch.log.read import read_all
from stitch.store.faulty import ALWAYS, FaultyStore
from stitch.store.faulty import Fault as StoreFault
from stitch.store.faulty import Kind as StoreFaultKind
from stitch.store.opening import open_store
from stitch.trainer.attempt import Progress, Step
from stitch.trainer.author import Publication
from stitch.trainer.publisher import Publisher
from tests.support.closing_log import ClosingLog
from tests.support.provision import wait_until
from tests.trainer.places import PATIENCE, Place, same, weights

pytestmark = pytest.mark.chaos

SHORT = 0.5
"""A deadline that is meant to pass."""
T = TypeVar("T")


@pytest.fixture
def place() -> Place:
    return Place.in_memory()


@pytest.fixture
def faulty(place: Place) -> FaultyLog:
    """A publisher's own handle of the log."""
    return FaultyLog(place.memory_log())


def only_publications(fault: Fault) -> Plan:
    """The fault for every decision; pointers go through."""
    return lambda stream, draft: fault if stream is Stream.PUBLICATIONS else Fault.NONE


class Interposed(FaultyLog):
    """Does something of its own right before the first decision that is appended."""

    def __init__(self, inner: EventLog, act: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._act: Callable[[], Awaitable[None]] | None = act

    async def append(self, stream: Stream, draft: Draft, *, timeout: float | None = None) -> None:
        act = self._act
        if act is not None and stream is Stream.PUBLICATIONS:
            self._act = None
            await act()
        await super().append(stream, draft, timeout=timeout)


# --- one writer, an unreliable log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", list(Fault))
def test_one_fault_of_the_log_changes_no_outcome(place: Place, faulty: FaultyLog, fault: Fault) -> None:
    faulty.plan(script(fault))
    with place.publisher(log=faulty) as pub:
        assert pub.epoch == 1
        faulty.plan(script(fault, fault))
        assert pub.publish(weights(0)).ref.number == 0
        asyncio.run(faulty.release())
        assert pub.publish(weights(1)).ref.number == 1
    assert place.numbers() == [0, 1]
    place.check_durable()


def test_the_same_event_is_appended_again_never_another_one(place: Place, faulty: FaultyLog) -> None:
    with place.publisher(log=faulty) as pub:
        faulty.plan(script(Fault.LOSE, Fault.HOLD, Fault.MUTE))
        pub.publish(weights(0))
        asyncio.run(faulty.release())
        pub.publish(weights(1))
    events = decisions(place.memory_log())
    assert len(events) == 4
    assert events[1] == events[2], "the late copy"
    assert len({event.event_id for event in events}) == 3


def test_an_unknown_outcome_is_settled_by_the_next_publish(place: Place, faulty: FaultyLog) -> None:
    with place.publisher(log=faulty) as pub:
        faulty.plan(only_publications(Fault.HOLD))
        with pytest.raises(OutcomeUnknown, match="version 0"):
            pub.publish(weights(0), timeout=SHORT)
        assert pub.next_number == 0
        with pytest.raises(OutcomeUnknown, match="version 0"):
            pub.publish(weights(1), timeout=SHORT)
        asyncio.run(faulty.release(1))
        faulty.plan(script())
        assert pub.publish(weights(1)).ref.number == 1
        asyncio.run(faulty.release())
        assert pub.publish(weights(2)).ref.number == 2
    assert place.numbers() == [0, 1, 2]
    assert same(place.read_back(0)[0], weights(0))


def test_a_copy_that_is_refused_says_nothing_of_the_one_before(place: Place) -> None:
    """It may land whatever the log says of this one."""
    closing = ClosingLog(place.memory_log())
    with place.publisher(log=closing) as pub:
        closing.plan(only_publications(Fault.HOLD))
        with pytest.raises(OutcomeUnknown, match="version 0"):
            pub.publish(weights(0), timeout=SHORT)
        asyncio.run(closing.release())
        closing.plan(script())
        assert pub.publish(weights(1)).ref.number == 1
    assert place.numbers() == [0, 1]


def test_a_publisher_outlives_a_log_that_refused(place: Place, faulty: FaultyLog) -> None:
    with place.publisher(log=faulty) as pub:
        pub.publish(weights(0))
        faulty.bar()
        with pytest.raises(InvalidRequest):
            pub.publish(weights(1), timeout=SHORT)
        faulty.mend()
        assert pub.publish(weights(1)).ref.number == 1


def test_an_unknown_outcome_that_never_landed_is_made_to_count_first(place: Place, faulty: FaultyLog) -> None:
    with place.publisher(log=faulty) as pub:
        faulty.plan(only_publications(Fault.LOSE))
        with pytest.raises(OutcomeUnknown):
            pub.publish(weights(0), timeout=SHORT)
        faulty.plan(script())
        assert pub.publish(weights(1)).ref.number == 1
    assert place.numbers() == [0, 1]
    place.check_durable()


@pytest.mark.parametrize("number", [None, 0])
def test_the_same_publish_again_after_an_unknown_outcome_is_one_version(
    place: Place, faulty: FaultyLog, number: int | None
) -> None:
    with place.publisher(log=faulty) as pub:
        faulty.plan(only_publications(Fault.HOLD))
        with pytest.raises(OutcomeUnknown):
            pub.publish(weights(0), number, timeout=SHORT)
        faulty.plan(script())
        asyncio.run(faulty.release())
        assert pub.publish(weights(0), number).ref.number == 0
        assert pub.publish(weights(0)).ref.number == 1, "a later publish of equal weights is a version of its own"
    assert place.numbers() == [0, 1]


def test_where_nothing_was_appended_it_is_unavailable(place: Place, faulty: FaultyLog) -> None:
    with place.publisher(log=faulty) as pub:
        faulty.plan(only_publications(Fault.REFUSE))
        with pytest.raises(Unavailable, match="nothing was appended"):
            pub.publish(weights(0), timeout=SHORT)
        faulty.plan(script())
        assert pub.publish(weights(1)).ref.number == 0
    assert same(place.read_back(0)[0], weights(1))


@pytest.mark.parametrize(("fault", "error"), [(Fault.REFUSE, Unavailable), (Fault.LOSE, OutcomeUnknown)])
def test_a_claim_has_the_same_outcomes(place: Place, faulty: FaultyLog, fault: Fault, error: type[StitchError]) -> None:
    before = threading.active_count()
    faulty.plan(only_publications(fault))
    with pytest.raises(error, match="claim of run r1"):
        place.publisher(log=faulty, timeout=SHORT)
    assert threading.active_count() == before


def test_a_log_that_is_away_is_waited_out(place: Place, faulty: FaultyLog) -> None:
    waiting = threading.Event()

    def listen(progress: Progress) -> None:
        if progress.step is Step.WAITING:
            assert progress.waiting
            waiting.set()

    with place.publisher(log=faulty, progress=listen) as pub:
        faulty.cut()
        future = pub_in_thread(lambda: pub.publish(weights(0)))
        assert waiting.wait(PATIENCE)
        faulty.mend()
        assert future.result(PATIENCE).ref.number == 0


def test_a_log_that_is_away_at_open_is_waited_out(place: Place, faulty: FaultyLog) -> None:
    faulty.cut()
    with pytest.raises(Unavailable):
        place.publisher(log=faulty, timeout=SHORT)
    waiting = threading.Event()
    future = pub_in_thread(lambda: place.publisher(log=faulty, progress=lambda progress: waiting.set()))
    assert waiting.wait(PATIENCE)
    faulty.mend()
    with future.result(PATIENCE) as pub:
        assert pub.epoch == 1


def test_a_store_that_is_away_is_waited_out(place: Place) -> None:
    with open_store(place.store_url) as inner:
        store = FaultyStore(inner, StoreFault(call="put", kind=StoreFaultKind.FAIL_BEFORE, times=ALWAYS))
        waiting = threading.Event()

        def listen(progress: Progress) -> None:
            if progress.step is Step.WAITING:
                waiting.set()

        with place.publisher(store=store, progress=listen) as pub:
            with pytest.raises(Unavailable):
                pub.publish(weights(0), timeout=SHORT)
            waiting.clear()
            future = pub_in_thread(lambda: pub.publish(weights(1)))
            assert waiting.wait(PATIENCE)
            store.clear()
            assert future.result(PATIENCE).ref.number == 0
    assert same(place.read_back(0)[0], weights(1))


def test_a_lost_answer_of_the_store_is_no_fault(place: Place) -> None:
    with open_store(place.store_url) as inner:
        store = FaultyStore(inner, StoreFault(call="put", kind=StoreFaultKind.FAIL_AFTER, times=2))
        with place.publisher(store=store) as pub:
            pub.publish(weights(0))
    place.check_durable()


def test_pointers_that_cannot_be_written_never_fail_a_publish(place: Place, faulty: FaultyLog) -> None:
    faulty.plan(lambda stream, draft: Fault.REFUSE if stream is Stream.POINTERS else Fault.NONE)
    with place.publisher(log=faulty) as pub:
        assert pub.publish(weights(0)).ref.number == 0
        assert place.latest_pointer() is None
        faulty.plan(script())
        pub.publish(weights(1))
    place.check_pointers()


def test_a_log_that_was_recreated_is_reported_and_never_written(tmp_path: Path) -> None:
    place = Place.on_disk(tmp_path)
    with place.publisher() as pub:
        for number in range(3):
            pub.publish(weights(number))
        for file in tmp_path.glob("log.db*"):
            file.unlink()
        with pytest.raises(LogDiverged):
            pub.publish(weights(3))
        Place.on_disk(tmp_path).publisher().close()
        with pytest.raises(LogDiverged):
            pub.publish(weights(3))
    assert place.numbers() == []


# --- several writers -----------------------------------------------------------------------------------------------------------


def test_d1a_a_slow_publication_never_fences_its_own_writer(place: Place, faulty: FaultyLog) -> None:
    """It times out again and again, then its copies land all at once: the first counts, and the writer goes on."""
    with place.publisher(log=faulty) as pub:
        faulty.plan(only_publications(Fault.HOLD))
        for _ in range(2):
            with pytest.raises(OutcomeUnknown):
                pub.publish(weights(0), timeout=SHORT)
        assert faulty.held >= 2
        faulty.plan(script())
        asyncio.run(faulty.release())
        for number in (1, 2):
            assert pub.publish(weights(number)).ref.number == number
    assert place.policy().epoch == 1


@pytest.mark.parametrize("number", [None, 0])
def test_d1b_an_accepted_publication_is_never_reported_as_fenced(place: Place, faulty: FaultyLog, number: int | None) -> None:
    """It counts, and then another trainer's claim does, before its writer reads on."""
    with place.publisher(log=faulty) as old:
        faulty.plan(only_publications(Fault.HOLD))
        with pytest.raises(OutcomeUnknown):
            old.publish(weights(0), number, timeout=SHORT)
        asyncio.run(faulty.release(1))
        with place.publisher() as new:
            new.publish(weights(1))
            done = old.publish(weights(0), number)
            assert done.ref.number == 0
            with pytest.raises(Fenced):
                old.publish(weights(2))
            new.publish(weights(3))
    assert place.numbers() == [0, 1, 2]


def test_d1b_within_one_publish(place: Place, faulty: FaultyLog) -> None:
    with place.publisher(log=faulty) as old:
        faulty.plan(only_publications(Fault.HOLD))
        future = pub_in_thread(lambda: old.publish(weights(0)))
        wait_until(lambda: faulty.held > 0, "the publication is on its way")
        asyncio.run(faulty.release(1))
        with place.publisher() as new:
            assert new.next_number == 1
            assert future.result(PATIENCE).ref.number == 0


def test_a_publication_that_lost_to_a_claim_is_fenced_for_good(place: Place, faulty: FaultyLog) -> None:
    with place.publisher(log=faulty) as old:
        faulty.plan(only_publications(Fault.HOLD))
        with pytest.raises(OutcomeUnknown):
            old.publish(weights(0), timeout=SHORT)
        with place.publisher() as new:
            asyncio.run(faulty.release())
            with pytest.raises(Fenced):
                old.publish(weights(0))
            assert new.publish(weights(1)).ref.number == 0
    assert same(place.read_back(0)[0], weights(1))


def test_d2a_a_zombies_late_publication_does_not_fence_the_opener(place: Place, faulty: FaultyLog) -> None:
    """The old trainer's publication lands between the new one's read and its claim."""
    with place.publisher(log=faulty) as zombie:
        faulty.plan(only_publications(Fault.HOLD))
        with pytest.raises(OutcomeUnknown):
            zombie.publish(weights(0), timeout=SHORT)

        async def late() -> None:
            assert await faulty.release(1) == 1

        with place.publisher(log=Interposed(place.memory_log(), late)) as new:
            assert (new.epoch, new.next_number) == (2, 1)
            assert new.publish(weights(1)).ref.number == 1
    assert place.numbers() == [0, 1]


def test_d2b_the_claim_of_a_dead_life_does_not_fence_the_living(place: Place) -> None:
    """An earlier life's claim lands before the new one's."""
    log = place.memory_log()

    async def dead_claim() -> None:
        claim = RunClaimed(
            policy=place.policy().policy,
            run=RunId("r1"),
            event_id=EventId("dead"),
            writer=WriterId("dead"),
            expected_head=place.policy().head,
            boot=None,
        )
        await append(log, claim, source="test")

    with place.publisher(log=Interposed(place.memory_log(), lambda: asyncio.to_thread(asyncio.run, dead_claim()))) as pub:
        assert pub.epoch == 2
        assert pub.publish(weights(0)).ref.number == 0


def test_a_claim_that_was_accepted_and_overtaken_opens_and_is_fenced_at_its_publish(place: Place, faulty: FaultyLog) -> None:
    """Of two openers the last wins; the other learns it at its next publish, and never steals back."""
    faulty.plan(only_publications(Fault.HOLD))
    opening = pub_in_thread(lambda: place.publisher(log=faulty))
    wait_until(lambda: faulty.held > 0, "the claim is on its way")

    async def both() -> None:
        await faulty.release(1)
        (record,) = await read_all(place.memory_log(), Stream.PUBLICATIONS)
        event = read(record)
        assert isinstance(event, RunClaimed)
        other = replace(event, event_id=EventId("other"), writer=WriterId("other"), expected_head=event.event_id)
        await append(place.memory_log(), other, source="test")

    asyncio.run(both())
    with opening.result(PATIENCE) as first:
        faulty.plan(script())
        assert first.epoch == 1
        with pytest.raises(Fenced, match="other"):
            first.publish(weights(0))
        with pytest.raises(Fenced):
            first.publish(weights(0))
    assert place.policy().epoch == 2


@pytest.mark.parametrize("round_", range(15))
def test_racing_claims_leave_one_owner_and_fence_the_others(place: Place, round_: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        pubs = list(pool.map(lambda _: place.publisher(), range(3)))
        try:
            outcomes = list(pool.map(lambda pub: outcome(pub, round_), pubs))
            winners = [pub for pub, error in zip(pubs, outcomes, strict=True) if error is None]
            assert len(winners) == 1
            assert all(isinstance(error, Fenced) for error in outcomes if error is not None)
            owner = place.policy().owner
            assert owner is not None
            assert owner.writer == winners[0].writer
            assert winners[0].publish(weights(round_ + 1)).ref.number == 1, "the winner is never fenced"
        finally:
            for pub in pubs:
                pub.close()


@pytest.mark.parametrize("round_", range(15))
def test_racing_for_a_version_accepts_exactly_one(place: Place, round_: int) -> None:
    """An owner publishes while another opens and publishes the same number with other weights."""
    start = threading.Barrier(2)

    def second() -> Publication:
        start.wait(PATIENCE)
        with place.publisher() as pub:
            number = pub.next_number
            assert number in (0, 1)
            return pub.publish(weights(100 + round_), number)

    with place.publisher() as first:
        future = pub_in_thread(second)
        start.wait(PATIENCE)
        try:
            mine: Publication | None = first.publish(weights(200 + round_), 0)
        except Fenced:
            mine = None
        theirs = future.result(PATIENCE)
        with pytest.raises(Fenced):
            first.publish(weights(300), 9)
    keys = {ref.number: version.manifest.key for ref, version in place.policy().versions.items()}
    assert keys == {done.ref.number: done.manifest_key for done in (mine, theirs) if done is not None}
    assert theirs.ref.number == (0 if mine is None else 1)
    place.check_durable()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_log_does_each_publish_ends_as_the_lineage_says(place: Place, seed: int) -> None:
    """Two trainers take turns at random over logs that lose, delay, mute and double appends."""
    odds = {Fault.LOSE: 0.15, Fault.HOLD: 0.15, Fault.MUTE: 0.15, Fault.ECHO: 0.15, Fault.REFUSE: 0.1}
    chance = random.Random(seed)
    logs = [FaultyLog(place.memory_log(), seeded(10 * seed + i, odds)) for i in range(2)]
    pubs: list[Publisher | None] = [None, None]
    done: dict[int, Publication] = {}
    for step in range(16):
        who = chance.randrange(2)
        pub = pubs[who]
        if pub is None:
            pubs[who] = place.publisher(log=logs[who])
            continue
        asyncio.run(logs[chance.randrange(2)].release(chance.randrange(3)))
        try:
            publication = pub.publish(weights(step))
        except Fenced:
            owner = place.policy().owner
            assert owner is not None
            assert owner.writer != pub.writer
            pub.close()
            pubs[who] = None
        else:
            assert publication.ref.number not in done
            done[publication.ref.number] = publication
    for log in logs:
        asyncio.run(log.release())
    for pub in pubs:
        if pub is not None:
            pub.close()
    accepted = {ref.number: version.manifest.key for ref, version in place.policy().versions.items()}
    assert {number: publication.manifest_key for number, publication in done.items()} == accepted
    assert accepted, "something was published"
    place.check_durable()


# --- helpers -------------------------------------------------------------------------------------------------------------------


def pub_in_thread(act: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def outcome(pub: Publisher, seed: int) -> StitchError | None:
    """What a publish of number 0 ends with; None for accepted."""
    try:
        pub.publish(weights(seed))
    except StitchError as error:
        return error
    return None


def decisions(log: MemoryLog) -> list[RunClaimed]:
    async def look() -> list[RunClaimed]:
        return [read(record) for record in await read_all(log, Stream.PUBLICATIONS)]  # type: ignore[misc]

    return asyncio.run(look())
