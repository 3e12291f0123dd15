"""Channels are moved by whoever looked at where they stand; a quarantine takes a version out of service and says what moved."""

from __future__ import annotations

import pytest

from stitch.core.errors import InvalidRequest, OutcomeUnknown, VersionConflict, VersionGone
from stitch.core.ids import ChannelName, WriterId
from stitch.core.lineage import Verdict
from stitch.log.faulty import Fault, FaultyLog, script
from stitch.operators import ledger as ledgers
from stitch.operators import steering
from stitch.operators.ledger import Ledger
from stitch.operators.steering import Move, Quarantine
from tests.operators.world import World, before_first_decision, publications, ref

pytestmark = pytest.mark.unit
STABLE = ChannelName("stable")


async def move(ledger: Ledger, channel: str, version: str) -> Move:
    return await steering.move_channel(ledger, channel, version, writer=WriterId("op"), reason="why not")


async def quarantine(ledger: Ledger, version: str) -> Quarantine:
    return await steering.quarantine(ledger, version, writer=WriterId("op"))


async def test_a_channel_goes_forth_and_back_a_step_of_its_sequence_each() -> None:
    world = World()
    await world.publish("FFF")
    async with world.ledger() as ledger:
        steps = [await move(ledger, "stable", version) for version in ("1", "latest", "r1/weight_v000000")]
    assert [(each.before, each.after, each.sequence) for each in steps] == [
        (None, ref(1), 1),
        (ref(1), ref(2), 2),
        (ref(2), ref(0), 3),
    ]
    pointer = await world.latest_pointer()
    assert pointer is not None
    channels = (await world.policy()).channels
    assert channels[STABLE].target == ref(0)
    assert channels[ChannelName("latest")].target == ref(2)
    assert (await publications(world))[-1].reason == "why not"


async def test_where_it_stands_already_nothing_is_appended() -> None:
    world = World()
    await world.publish("FF")
    async with world.ledger() as ledger:
        first = await move(ledger, "stable", "1")
        written = len(await publications(world))
        again = await move(ledger, "stable", "1")
    assert (again.before, again.after, again.sequence) == (ref(1), ref(1), first.sequence)
    assert len(await publications(world)) == written


async def test_of_two_who_looked_the_second_is_told() -> None:
    world = World()
    await world.publish("FFF")

    async def somebody_else() -> None:
        async with world.ledger() as other:
            await move(other, "stable", "2")

    async with world.ledger() as ledger:
        before_first_decision(somebody_else)(ledger)
        with pytest.raises(VersionConflict, match="moved by somebody else meanwhile, and names r1/weight_v000002"):
            await move(ledger, "stable", "1")
    assert (await world.policy()).channels[STABLE].target == ref(2)


async def test_a_target_that_is_quarantined_meanwhile_is_refused() -> None:
    world = World()
    await world.publish("FFF")

    async def somebody_else() -> None:
        async with world.ledger() as other:
            await quarantine(other, "1")

    async with world.ledger() as ledger:
        before_first_decision(somebody_else)(ledger)
        with pytest.raises(VersionGone, match="meanwhile; the channel was not moved"):
            await move(ledger, "stable", "1")
    assert STABLE not in (await world.policy()).channels


@pytest.mark.parametrize(
    ("channel", "version", "error", "says"),
    [
        ("latest", "0", InvalidRequest, "channel: latest follows the tip by itself"),
        ("41", "0", InvalidRequest, "channel: '41' is all digits"),
        ("Stable!", "0", InvalidRequest, "channel: "),
        ("stable", "9", InvalidRequest, "version: there is no r1/weight_v000009"),
        ("stable", "nope", InvalidRequest, "version: 'nope' means none"),
        ("stable", "1", VersionGone, "version: r1/weight_v000001 was quarantined"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_appended(
    channel: str, version: str, error: type[Exception], says: str
) -> None:
    world = World()
    await world.publish("FFF")
    async with world.ledger() as ledger:
        await quarantine(ledger, "1")
        written = len(await publications(world))
        with pytest.raises(error, match=says):
            await move(ledger, channel, version)
    assert len(await publications(world)) == written


async def test_a_quarantine_tells_which_channels_went_where() -> None:
    world = World()
    await world.publish("FFF")
    async with world.ledger() as ledger:
        await move(ledger, "stable", "1")
        await move(ledger, "stable", "2")
        await move(ledger, "other", "2")
        await move(ledger, "aside", "0")
        done = await quarantine(ledger, "latest")
        assert (done.version, done.versions, done.is_tip) == (ref(2), (ref(2),), True)
        assert {each.channel: (each.before, each.after) for each in done.moves} == {
            "latest": (ref(2), ref(1)),
            "stable": (ref(2), ref(1)),
            "other": (ref(2), None),
        }
        again = await quarantine(ledger, "2")
    assert (again.versions, again.moves, again.is_tip) == ((), (), True)
    assert [type(event).__name__ for event in await publications(world)].count("VersionQuarantined") == 1


async def test_nothing_is_said_of_a_policy_that_nobody_published() -> None:
    async with World().ledger() as ledger:
        with pytest.raises(InvalidRequest, match="nothing was published under 'p'"):
            await move(ledger, "stable", "0")
        with pytest.raises(InvalidRequest, match="nothing was published under 'p'"):
            await quarantine(ledger, "0")
        with pytest.raises(InvalidRequest, match="reason: 1001 characters"):
            await steering.quarantine(ledger, "0", writer=WriterId("op"), reason="x" * 1001)


@pytest.mark.parametrize("fault", list(Fault))
async def test_whatever_the_log_does_once_the_move_counts_once(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.operators.ledger.AGAIN_SECONDS", (0.01, 0.1))
    world = World()
    await world.publish("FF")
    log = FaultyLog(world.log, script(fault), slow=0.01)
    async with world.ledger(log) as ledger:
        done = await move(ledger, "stable", "1")
        await log.release()
        assert done.sequence == 1
        channel = (await ledger.read_on()).channels[STABLE]
    assert (channel.target, channel.sequence) == (ref(1), 1)


async def test_an_outcome_that_is_not_known_is_said_and_may_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.publish("FF")
    held = FaultyLog(world.log, script(Fault.HOLD))
    async with world.ledger(held) as ledger:
        settle = ledger.settle

        async def briefly(decision: ledgers.Decision, timeout: float = 0.2) -> Verdict:
            return await settle(decision, timeout)

        monkeypatch.setattr(ledger, "settle", briefly)
        monkeypatch.setattr("stitch.operators.ledger.AGAIN_SECONDS", (5.0, 5.0))
        with pytest.raises(OutcomeUnknown, match="may still count"):
            await move(ledger, "stable", "1")
        await held.release()
    async with world.ledger() as ledger:
        assert (await move(ledger, "stable", "1")).sequence == 1
