"""Operators' decisions of every kind are settled the same way: the first copy that is read back decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stitch.core.errors import InvalidRequest, OutcomeUnknown, UnreadableEvent
from stitch.core.events import ChannelMoved, FormatRaised, VersionQuarantined
from stitch.core.ids import ChannelName, EventId, Sequence, WriterId
from stitch.core.lineage import Verdict
from stitch.log.events import draft
from stitch.log.faulty import Fault, FaultyLog, script
from stitch.log.opening import open_log
from stitch.log.port import Draft, Stream
from stitch.log.views import new_event_id
from stitch.operators.ledger import Decision, open_ledger
from tests.operators.published import POLICY
from tests.operators.world import World, ref, retirement
from tests.support.closing_log import ClosingLog

pytestmark = pytest.mark.unit


def move(number: int, expected: int = 0) -> ChannelMoved:
    return ChannelMoved(
        policy=POLICY,
        channel=ChannelName("stable"),
        target=ref(number),
        event_id=new_event_id(),
        writer=WriterId("op"),
        expected_sequence=Sequence(expected),
    )


def quarantine(number: int) -> VersionQuarantined:
    return VersionQuarantined(policy=POLICY, version=ref(number), event_id=new_event_id(), writer=WriterId("op"), reason="bad")


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("make", [lambda: move(1), lambda: quarantine(1), lambda: retirement(0)])
async def test_each_is_accepted_whatever_the_log_does_once(
    make: Callable[[], Decision], fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stitch.operators.ledger.AGAIN_SECONDS", (0.01, 0.1))
    world = World()
    await world.publish("FFFF")
    log = FaultyLog(world.log, script(fault), slow=0.01)
    async with world.ledger(log) as ledger:
        decision = make()
        assert await ledger.settle(decision) is Verdict.ACCEPTED
        await log.release()
        assert (await ledger.read_on()).verdicts[decision.event_id] is Verdict.ACCEPTED
        await ledger.write_pointers()
    assert (await world.latest_pointer()) is not None


async def test_a_copy_that_is_refused_says_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may land whatever the log says of this one; where none was sent, a refusal is one."""
    monkeypatch.setattr("stitch.operators.ledger.AGAIN_SECONDS", (0.01, 0.1))
    world = World()
    await world.publish("FF")
    log = ClosingLog(world.log, script(Fault.HOLD))
    async with world.ledger(log) as ledger:
        with pytest.raises(OutcomeUnknown):
            await ledger.settle(move(1), 2.0)
        with pytest.raises(InvalidRequest):
            await ledger.settle(move(0), 30.0)
        await log.release()
        policy = await ledger.read_on()
    assert policy.channels[ChannelName("stable")].target == ref(1)


async def test_of_two_operators_the_second_learns_that_it_was_late() -> None:
    """D8: the first one's move is held up, the second one's lands; the late copy undoes nothing."""
    world = World()
    await world.publish("FFF")
    held = FaultyLog(world.log, script(Fault.HOLD))
    first, second = move(0), move(1)
    async with world.ledger(held) as one, world.ledger() as two:
        await one.read_on()
        assert await two.settle(second) is Verdict.ACCEPTED
        assert await one.settle(first) is Verdict.STALE_SEQUENCE
        await held.release()
        policy = await one.read_on()
    assert policy.channels[ChannelName("stable")].target == ref(1)


async def test_what_is_refused_says_why() -> None:
    world = World()
    await world.publish("FFF")
    async with world.ledger() as ledger:
        assert await ledger.settle(retirement(2)) is Verdict.VERSION_NEEDED
        assert await ledger.settle(retirement(9)) is Verdict.VERSION_UNKNOWN
        assert await ledger.settle(quarantine(2)) is Verdict.ACCEPTED
        assert await ledger.settle(move(2)) is Verdict.VERSION_UNUSABLE


async def test_nothing_is_decided_on_a_log_that_cannot_be_read() -> None:
    world = World()
    await world.publish("FF")
    raised = draft(FormatRaised(level=1, event_id=EventId("x"), writer=WriterId("w")), source="test")
    await world.log.append(Stream.PUBLICATIONS, Draft(key=raised.key, value=b"\\xc3\\x01" + b"0" * 20, headers=raised.headers))
    end = (await world.log.bounds(Stream.PUBLICATIONS)).end
    async with world.ledger() as ledger:
        with pytest.raises(UnreadableEvent):
            await ledger.read_on()
        with pytest.raises(UnreadableEvent):
            await ledger.settle(retirement(0), 2.0)
    assert (await world.log.bounds(Stream.PUBLICATIONS)).end == end


async def test_a_log_that_was_not_set_up_is_refused(tmp_path: object) -> None:
    async with open_log(f"sqlite://{tmp_path}/none.db") as log:
        with pytest.raises(InvalidRequest):
            async with open_ledger(log, POLICY, source="/test"):
                pass
