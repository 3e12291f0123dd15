"""`stitch verify` as an operator and a script meet it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stitch.cli import verify as command_of_verify
from tests.operators.published import Place
from tests.support.commands import command

pytestmark = pytest.mark.integration


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.on_disk(tmp_path)


@pytest.mark.parametrize("version", ["3", "latest", "r1/weight_v000003"])
def test_a_version_and_what_it_is_built_from(place: Place, version: str) -> None:
    told = place.command("verify", version, "--json")
    assert told.code == 0
    assert told.err == ""
    assert told.json["ok"] is True
    rows = told.json["versions"]
    assert [row["version"] for row in rows] == [f"r1/weight_v00000{number}" for number in range(4)]
    assert [row["asked"] for row in rows] == [False, False, False, True]
    assert rows[1] == {
        "version": "r1/weight_v000001",
        "ok": True,
        "asked": False,
        "kind": "delta",
        "base": "r1/weight_v000000",
        "alias_of": None,
        "anchored": False,
        "objects": 2,
        "bytes": rows[1]["bytes"],
        "tensors": None,
        "faults": [],
    }


def test_deep_of_all(place: Place) -> None:
    told = place.command("verify", "--all", "--deep", "--json")
    assert told.code == 0
    assert [row["tensors"] for row in told.json["versions"]] == [6, 6, 6, 6]


def test_a_person_reads_a_table_and_a_verdict(place: Place) -> None:
    told = place.command("verify", "latest", "--deep")
    assert told.code == 0
    assert "delta on 2" in told.out
    assert "every byte was read and is right, and every tensor of r1/weight_v000003" in told.out


def test_what_is_wrong_is_told_by_version_and_file(place: Place) -> None:
    file = place.made.manifest(1).weights[0]
    place.spoil(file.key)
    assert place.command("verify", "1").code == 0, "sizes are right: only reading tells"
    told = place.command("verify", "latest", "--deep")
    assert told.code == 1
    assert f"r1/weight_v000001: delta.safetensors: object '{file.key}' has blake3 " in told.out
    assert "r1/weight_v000003: builds on r1/weight_v000001, which is damaged" in told.out
    assert "3 of 4 versions damaged" in told.out
    row = place.command("verify", "1", "--deep", "--json").json["versions"][1]
    assert row["faults"][0]["file"] == "delta.safetensors"


def test_the_chain_may_be_left_out(place: Place) -> None:
    place.store.delete(place.made.version(0).manifest.key)
    assert place.command("verify", "3").code == 1
    assert place.command("verify", "3", "--no-chain").code == 0


@pytest.mark.parametrize(
    ("version", "said"),
    [("9", "the run's greatest number is 3"), ("r2/weight_v000001", "no such run"), ("stable", "has the channels latest")],
)
def test_a_version_that_does_not_exist_is_one_line(place: Place, version: str, said: str) -> None:
    told = place.command("verify", version)
    assert told.code == 1
    assert said in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_usage(place: Place) -> None:
    assert place.command("verify").code == 2
    assert place.command("verify", "1", "--all").code == 2
    told = command("verify", "1", *place.options[:4], "--policy", "other")
    assert told.code == 1
    assert "nothing was published under 'other'; the log has p" in told.err


def test_a_long_table_shows_what_is_damaged(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_of_verify, "ROWS", 3)
    sound = place.command("verify", "--all")
    assert "delta on" not in sound.out
    assert "4 versions" in sound.out
    place.store.delete(place.made.manifest(3).files[0].key)
    damaged = place.command("verify", "--all")
    assert "delta on 2" in damaged.out
    assert "delta on 1" not in damaged.out
