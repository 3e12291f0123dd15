"""`stitch channel move` and `stitch quarantine` as a person and as a program see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.operators.world import Shop
from tests.support.commands import Said, command

pytestmark = pytest.mark.unit


def steer(shop: Shop, *arguments: object) -> Said:
    return command(*arguments, "--log", shop.log, "--policy", "p")


def test_a_person_promotes_rolls_back_and_takes_out_of_service(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "Fddd")
    assert steer(shop, "channel", "move", "stable", "1").out == "stable: new -> r1/weight_v000001\n"
    assert steer(shop, "channel", "move", "stable", "latest").out == "stable: r1/weight_v000001 -> r1/weight_v000003\n"
    assert steer(shop, "channel", "move", "stable", "3").out == "stable names r1/weight_v000003 already\n"
    said = steer(shop, "quarantine", "3", "--reason", "it repeats itself")
    assert said.out.splitlines() == [
        "r1/weight_v000003: quarantined",
        "latest: r1/weight_v000003 -> r1/weight_v000002",
        "stable: r1/weight_v000003 -> r1/weight_v000001",
        "It is the tip: the trainer's next version builds on it. To go on without it, open the run with an older boot version.",
    ]
    assert "was quarantined before" in steer(shop, "quarantine", "3").out
    refused = steer(shop, "channel", "move", "stable", "3")
    assert (refused.code, refused.out) == (1, "")
    assert "r1/weight_v000003 was quarantined; no channel may name it" in refused.err
    assert "latest follows the tip by itself" in steer(shop, "channel", "move", "latest", "1").err
    tail = command("log", "tail", "--log", shop.log).out
    assert "it repeats itself" in tail


def test_a_channel_without_an_earlier_target_is_said_to_name_none(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "F")
    steer(shop, "channel", "move", "canary", "0")
    said = steer(shop, "quarantine", "0").out
    assert "canary: r1/weight_v000000 -> no version; it named no other before. Move it to one that may be taken\n" in said
    assert "latest: r1/weight_v000000 -> no version; no older one may be taken\n" in said
    assert "canary -> no version, latest -> no version" in command("status", "--log", shop.log).out


def test_a_program_reads_what_moved(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "Fdd")
    assert steer(shop, "channel", "move", "stable", "1", "--json").json == {
        "policy": "p",
        "channel": "stable",
        "before": None,
        "after": "r1/weight_v000001",
        "sequence": 1,
    }
    told = steer(shop, "quarantine", "2", "--json").json
    assert told["quarantined"] == ["r1/weight_v000002"]
    assert told["is_tip"] is True
    (move,) = told["moves"]
    assert (move["channel"], move["before"], move["after"]) == ("latest", "r1/weight_v000002", "r1/weight_v000001")
    status = command("status", "--log", shop.log, "--json").json
    assert status["policies"][0]["channels"] == {"latest": "r1/weight_v000001", "stable": "r1/weight_v000001"}
