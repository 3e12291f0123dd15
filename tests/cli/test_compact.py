"""`stitch compact` as a person and as a program see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operators.world import Shop
from tests.support.commands import Said, command

pytestmark = pytest.mark.unit


def compact(shop: Shop, *arguments: object) -> Said:
    return command("compact", *arguments, "--log", shop.log, "--store", shop.store, "--policy", "p")


def test_a_program_reads_which_versions_were_anchored(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "Fdddd")
    told = compact(shop, "--every", "3", "--dry-run", "--json").json
    assert [(row["version"], row["chain_deltas"]) for row in told["planned"]] == [("r1/weight_v000003", 3)]
    assert told["anchored"] == []
    scratch = tmp_path / "scratch"
    done = compact(shop, "--every", "3", "--scratch", scratch, "--json").json
    (row,) = done["anchored"]
    assert row["version"] == "r1/weight_v000003"
    assert row["manifest_key"].startswith("p/r1/3.e1.")
    assert list(scratch.iterdir()) == []
    assert shop.gc("--retain", "2", "--grace", "0", "--json").json["deleted_bytes"] > 0
    assert shop.numbers() == {3, 4}


def test_a_person_names_a_version(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "Fdd")
    assert "r1/weight_v000002: would be anchored; its chain: 2 deltas" in compact(shop, "latest", "--dry-run").out
    assert "r1/weight_v000001: anchored with" in compact(shop, "1").out
    assert "skipped: anchored already" in compact(shop, "r1/weight_v000001").out
    assert "no chain of policy p is too long" in compact(shop).out
    assert "there is no r1/weight_v000009" in compact(shop, "9").err
    assert "nothing was published under 'q'" in command("compact", "--log", shop.log, "--store", shop.store, "--policy", "q").err
