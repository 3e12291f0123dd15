"""`stitch gc` as a person and as a program see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.store.opening import open_store
from tests.operators.world import Shop
from tests.support.commands import command

pytestmark = pytest.mark.unit


def test_a_program_reads_what_is_kept_retired_and_deleted(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "FddFdd")
    told = shop.gc("--dry-run", "--retain", "1", "--grace", "0", "--json").json
    assert told["dry_run"] is True
    assert shop.numbers() == set(range(6))
    done = shop.gc("--retain", "1", "--grace", "0", "--json").json
    assert {**done, "dry_run": True} == told
    assert [row["version"] for row in done["retired"]] == [f"r1/weight_v00000{n}" for n in (2, 1, 0)]
    assert done["kept"][0] == {
        "version": "r1/weight_v000005",
        "bytes": done["kept"][0]["bytes"],
        "why": ["the tip", "channel latest names it", "among the 1 newest"],
    }
    assert [row["prefix"] for row in done["deleted"]] == ["p/r1/2.e1", "p/r1/1.e1", "p/r1/0.e1"]
    assert done["deleted_bytes"] == sum(row["bytes"] for row in done["retired"])
    assert shop.numbers() == {3, 4, 5}
    again = shop.gc("--retain", "1", "--json").json
    assert (again["retired"], again["deleted"], again["waiting"]) == ([], [], {"objects": 0, "bytes": 0})


def test_a_person_reads_it_too(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "FFFF")
    told = shop.gc("--dry-run", "--retain", "2")
    assert told.code == 0
    assert "would be retired: 2 versions" in told.out
    assert "channel latest names it" in " ".join(told.out.split())
    done = shop.gc("--retain", "2")
    assert "\nretired: 2 versions; deleted: 0 objects, 0 bytes" in done.out
    assert "left for a later run" in done.out
    with open_store(shop.store) as store:
        store.put("p/notes.txt", b"mine")
    assert "  p/notes.txt" in shop.gc().out


def test_by_default_sixteen_are_kept_and_an_hour_is_waited(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "F" * 18)
    done = shop.gc("--json").json
    assert [row["version"] for row in done["retired"]] == ["r1/weight_v000001", "r1/weight_v000000"]
    assert done["deleted"] == []
    assert done["waiting"]["objects"] > 0
    assert shop.numbers() == set(range(18))


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "FFF")
    other = command("gc", "--log", shop.log, "--store", f"file://{tmp_path / 'empty'}", "--policy", "p", "--retain", "1")
    assert other.code == 1
    assert "is this the store that the trainer writes to?" in other.err
    unknown = command("gc", "--log", shop.log, "--store", shop.store, "--policy", "nobody")
    assert unknown.code == 1
    assert "nothing was decided of 'nobody'" in unknown.err
    assert shop.gc("--retain", "0").code == 2
    assert shop.gc("--grace", "-1").code == 2
