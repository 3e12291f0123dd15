"""`stitch diff` as an operator and a script meet it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.operators.published import Place, model

pytestmark = pytest.mark.integration


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.on_disk(tmp_path)


def test_a_delta_for_programs(place: Place) -> None:
    told = place.command("diff", "0", "1", "--json")
    assert told.code == 0
    report = told.json
    assert (report["way"], report["changed_tensors"], report["unchanged_tensors"]) == ("delta", 2, 4)
    old, new = (weights["embed.weight"].view(np.uint16) for weights in place.weights[:2])
    row = next(row for row in report["tensors"] if row["name"] == "embed.weight")
    assert row["changed"] == row["by_one_step"] == np.count_nonzero(old != new)
    assert row["shape"] == [48, 16]
    assert row["largest"] is None


def test_values_for_programs(place: Place) -> None:
    row = place.command("diff", "0", "1", "--values", "--sort", "name", "--top", "1", "--json").json["tensors"]
    assert [tensor["name"] for tensor in row] == ["embed.weight"]
    old, new = (weights["embed.weight"].astype(np.float64) for weights in place.weights[:2])
    assert row[0]["largest"] == np.abs(new - old).max()
    assert row[0]["relative"] == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))


def test_a_table_for_people(place: Place) -> None:
    told = place.command("diff", "0", "latest", "--top", "2", "--sort", "magnitude")
    assert told.code == 0
    lines = told.out.splitlines()
    assert next(line.split()[0] for line in lines if "×" in line) == "layers.1.weight", "the furthest first"
    assert sum("×" in line for line in lines) == 2
    assert "and 1 more; --top 0 shows all" in told.out
    assert lines[-1].startswith("r1/weight_v000000 → r1/weight_v000003: ")
    assert "in 3 of 6 tensors" in lines[-1]


def test_what_was_added_removed_and_reshaped_is_named(tmp_path: Path) -> None:
    place = Place.on_disk(tmp_path)
    other = model()
    other["new.weight"] = other.pop("layers.0.weight")
    other["scale"] = other["scale"].astype(np.float64)
    place.made.claim("r2")
    place.made.full(other)
    place.rewrite_log(f"sqlite://{tmp_path / 'log2.db'}")
    told = place.command("diff", "r1/weight_v000000", "r2/weight_v000000")
    assert told.code == 0, told.err
    assert "1 added: new.weight" in told.out
    assert "1 removed: layers.0.weight" in told.out
    assert "1 reshaped: scale" in told.out
    assert "F32 → F64" in told.out


def test_no_difference(place: Place) -> None:
    told = place.command("diff", "3", "latest")
    assert told.out == "r1/weight_v000003 → r1/weight_v000003: the same weights, bit for bit\n"


def test_numbers_that_are_no_longer_finite_are_told(tmp_path: Path) -> None:
    place = Place.on_disk(tmp_path)
    broken = dict(place.weights[3])
    broken["layers.1.weight"] = broken["layers.1.weight"].copy()
    broken["layers.1.weight"][1, 2] = np.nan
    place.made.sparse(place.weights[3], broken)
    place.rewrite_log(f"sqlite://{tmp_path / 'log2.db'}")
    told = place.command("diff", "3", "4", "--values")
    assert "infinite or not a number now: 1 of the changed values, in layers.1.weight" in told.out


def test_errors_are_one_line(place: Place) -> None:
    told = place.command("diff", "0", "9")
    assert (told.code, told.err.count("\n")) == (1, 1)
    assert place.command("diff", "0").code == 2
    place.spoil(place.made.manifest(1).weights[0].key)
    told = place.command("diff", "0", "1")
    assert (told.code, told.err.count("\n")) == (1, 1)
    assert "r1/weight_v000001: delta.safetensors: " in told.err
