"""The scripted faults do what they say, when they say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.core.errors import CorruptObject, Unavailable
from stitch.store.faulty import ALWAYS, Call, Fault, FaultyStore, Kind
from stitch.store.memory import MemoryStore

pytestmark = pytest.mark.unit


def test_the_nth_put_fails_before_it_takes_effect() -> None:
    store = FaultyStore(MemoryStore(), Fault(call="put", kind=Kind.FAIL_BEFORE, nth=2))
    store.put("a", b"1")
    with pytest.raises(Unavailable):
        store.put("b", b"2")
    assert store.stat("b") is None
    store.put("b", b"2")
    assert store.calls == (("put", "a"), ("put", "b"), ("stat", "b"), ("put", "b"))


def test_the_nth_put_fails_after_it_took_effect() -> None:
    store = FaultyStore(MemoryStore(), Fault(call="put", kind=Kind.FAIL_AFTER))
    with pytest.raises(Unavailable):
        store.put("a", b"1")
    assert store.get("a", limit=1) == b"1"
    store.put("a", b"1")


def test_only_calls_with_the_key_count() -> None:
    store = FaultyStore(MemoryStore(), Fault(call="put", kind=Kind.FAIL_BEFORE, nth=2, times=2, key=".json"))
    outcomes = []
    for key in ("1", "1.json", "2", "2.json", "3.json", "4.json"):
        try:
            store.put(key, b"")
            outcomes.append(key)
        except Unavailable:
            outcomes.append("-")
    assert outcomes == ["1", "1.json", "2", "-", "-", "4.json"]


def test_a_partition_lasts_until_it_is_cleared() -> None:
    calls: tuple[Call, ...] = ("put", "get", "stat", "entries", "delete")
    store = FaultyStore(MemoryStore(), *(Fault(call=call, kind=Kind.FAIL_BEFORE, times=ALWAYS) for call in calls))
    for _ in range(3):
        for act in (
            lambda: store.put("k", b""),
            lambda: store.get("k", limit=0),
            lambda: store.stat("k"),
            lambda: store.entries(""),
            lambda: store.delete("k"),
        ):
            with pytest.raises(Unavailable):
                act()
    store.clear()
    store.put("k", b"")
    assert [entry.key for entry in store.entries("")] == ["k"]


def test_slow_calls_are_right() -> None:
    slept: list[float] = []
    store = FaultyStore(MemoryStore(), sleep=slept.append)
    store.put("k", b"x")
    store.add(Fault(call="get", kind=Kind.SLOW, seconds=2.5))
    assert store.get("k", limit=1) == b"x"
    assert store.get("k", limit=1) == b"x"
    assert slept == [2.5]


@pytest.mark.parametrize("fault", [{"kind": Kind.TRUNCATE, "at": 3}, {"kind": Kind.FLIP, "at": 9}])
def test_spoilt_reads_are_noticed(fault: dict[str, object], tmp_path: Path) -> None:
    store = FaultyStore(MemoryStore())
    receipt = store.put("k", b"12345")
    store.add(Fault(call="get", **fault))  # type: ignore[arg-type]
    store.add(Fault(call="download", **fault))  # type: ignore[arg-type]
    with pytest.raises(CorruptObject):
        store.get("k", limit=5, expect=receipt.blake3)
    with pytest.raises(CorruptObject):
        store.download(receipt, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    store.download(receipt, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"12345"


def test_a_flipped_bit_without_a_digest_goes_unnoticed() -> None:
    store = FaultyStore(MemoryStore(), Fault(call="get", kind=Kind.FLIP, at=9))
    store.put("k", b"1234")
    assert store.get("k", limit=4) == b"1" + bytes([ord("2") ^ 0b10]) + b"34"
    assert store.get("k", limit=4) == b"1234"


def test_a_cut_download_leaves_its_part_and_is_continued(tmp_path: Path) -> None:
    store = FaultyStore(MemoryStore(), Fault(call="download", kind=Kind.CUT, at=3), Fault(call="get", kind=Kind.CUT))
    receipt = store.put("k", b"12345")
    with pytest.raises(Unavailable):
        store.get("k", limit=5)
    with pytest.raises(Unavailable):
        store.download(receipt, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"123"
    store.download(receipt, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"12345"


def test_faults_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="get and download"):
        Fault(call="put", kind=Kind.FLIP)
    with pytest.raises(ValueError, match="count from 1"):
        Fault(call="put", kind=Kind.SLOW, nth=0)
