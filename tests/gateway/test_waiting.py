"""The waiting room: in order, bounded, no place lost."""

from __future__ import annotations

import asyncio

import pytest

from stitch.gateway.waiting import Lack, RoomClosed, RoomFull, WaitingRoom

pytestmark = pytest.mark.unit

LONG = 20.0


class Places:
    """So many free places."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.undone = 0

    def attempt(self) -> int | Lack:
        if not self.free:
            return Lack.ROOM
        self.free -= 1
        return self.free

    def undo(self, taken: int) -> None:
        self.free += 1
        self.undone += 1


def enter(room: WaitingRoom[int], places: Places, order: list[str], name: str, timeout: float = LONG) -> asyncio.Task[int | None]:
    async def wait() -> int | None:
        taken = await room.wait(places.attempt, Lack.ROOM, timeout, undo=places.undo)
        order.append(name)
        return taken

    return asyncio.create_task(wait())


async def test_first_come_first_served() -> None:
    room, places, order = WaitingRoom[int](10), Places(), list[str]()
    tasks = [enter(room, places, order, name) for name in "abc"]
    await asyncio.sleep(0)
    assert len(room) == 3
    for _ in tasks:
        places.free += 1
        room.freed()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert len(room) == 0
    assert places.free == 0


async def test_one_free_place_wakes_one() -> None:
    room, places, order = WaitingRoom[int](10), Places(), list[str]()
    tasks = [enter(room, places, order, name) for name in "ab"]
    await asyncio.sleep(0)
    places.free = 1
    room.freed()
    room.freed()
    room.changed()
    await tasks[0]
    assert order == ["a"]
    assert len(room) == 1
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_freed_place_skips_who_has_left() -> None:
    room, places, order = WaitingRoom[int](10), Places(), list[str]()
    tasks = [enter(room, places, order, name) for name in "ab"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    places.free = 1
    room.freed()
    assert await tasks[1] == 0
    assert order == ["b"]
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_place_taken_for_one_who_leaves_is_given_back() -> None:
    room, places, order = WaitingRoom[int](10), Places(), list[str]()
    task = enter(room, places, order, "a")
    await asyncio.sleep(0)
    places.free = 1
    room.freed()
    task.cancel()  # before it could run
    await asyncio.gather(task, return_exceptions=True)
    assert (places.free, places.undone, order) == (1, 1, [])


async def test_who_lacks_a_version_is_not_woken_by_a_place() -> None:
    room = WaitingRoom[int](10)
    tried = 0
    version_is_here = False

    def attempt() -> int | Lack:
        nonlocal tried
        tried += 1
        return 7 if version_is_here else Lack.VERSION

    task = asyncio.create_task(room.wait(attempt, Lack.VERSION, LONG, undo=lambda _: None))
    await asyncio.sleep(0)
    room.freed()
    assert tried == 0
    room.changed()
    assert tried == 1
    version_is_here = True
    room.changed()
    assert await task == 7


async def test_time_is_bounded() -> None:
    room, places = WaitingRoom[int](10), Places()
    assert await room.wait(places.attempt, Lack.ROOM, 0.01, undo=places.undo) is None
    assert len(room) == 0


async def test_number_is_bounded() -> None:
    room, places, order = WaitingRoom[int](1), Places(), list[str]()
    task = enter(room, places, order, "a")
    await asyncio.sleep(0)
    with pytest.raises(RoomFull):
        await room.wait(places.attempt, Lack.ROOM, LONG, undo=places.undo)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_closing_sends_all_away() -> None:
    room, places, order = WaitingRoom[int](10), Places(), list[str]()
    task = enter(room, places, order, "a")
    await asyncio.sleep(0)
    room.close()
    with pytest.raises(RoomClosed):
        await task
    with pytest.raises(RoomClosed):
        await room.wait(places.attempt, Lack.ROOM, LONG, undo=places.undo)
