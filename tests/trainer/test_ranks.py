"""Many ranks publish as one: four processes over gloo, all of which succeed or fail alike, and none of which ever hangs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stitch.core.manifest import Codec, Kind
from stitch.weights.safetensors import write_checkpoint
from tests.support.slime_writer import write_delta
from tests.trainer import rank_acts
from tests.trainer.places import Place, same
from tests.trainer.ranks import Ranks, Told, started

pytestmark = [pytest.mark.torch, pytest.mark.integration]

SIZE = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pytest.importorskip("torch", reason="the torch extra is not installed")
    with started(SIZE) as processes:
        yield processes


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.on_disk(tmp_path)


def alike(told: list[Told]) -> Any:
    """What every rank told, which must be the same."""
    assert [each.raised for each in told] == [None] * len(told), told
    assert all(each.value == told[0].value for each in told), told
    return told[0].value


def check(place: Place, number: int, step: int) -> None:
    assert same(place.read_back(number)[0], rank_acts.model(step))


@pytest.mark.parametrize("memory_budget", [None, 0], ids=["in memory", "in a file"])
def test_full_and_delta_versions_of_all_ranks_tensors(ranks: Ranks, place: Place, memory_budget: int | None) -> None:
    done = alike(ranks.run(rank_acts.three_versions, place, memory_budget))
    assert [publication.kind for publication in done] == [Kind.FULL, Kind.DELTA, Kind.DELTA]
    assert place.numbers() == [0, 1, 2]
    for number in range(3):
        check(place, number, number)
    assert [place.manifest(number).codec for number in range(3)] == [Codec.SAFETENSORS, Codec.SPARSE, Codec.SPARSE]
    assert [file.path for file in place.manifest(0).weights] == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    place.check_durable()
    place.check_pointers()


def test_publish_async_overlaps_at_all_ranks(ranks: Ranks, place: Place) -> None:
    done = alike(ranks.run(rank_acts.in_the_background, place))
    assert [publication.ref.number for publication in done] == [0, 1, 2, 3]
    for number in range(4):
        check(place, number, number)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("iterable", "StitchError", "rank 2: RuntimeError: the trainer's own fault"),
        ("no tensor", "InvalidRequest", "rank 1: weights: tensor 'layer.05' is a builtins.str"),
        ("given twice", "InvalidRequest", "tensor 'layer.00' is given by rank 0 and by rank 3"),
        ("missing", "InvalidRequest", "tensor 'layer.05' of the base is not given"),
        ("another number", "InvalidRequest", "number: 5 at rank 2, 6 at rank 0"),
        ("no number", "InvalidRequest", "rank 3: number"),
    ],
)
def test_what_one_rank_cannot_do_none_does(ranks: Ranks, place: Place, what: str, kind: str, words: str) -> None:
    error, done = alike(ranks.run(rank_acts.after_an_error, place, what))
    assert error[0] == kind
    assert words in error[1]
    assert (done.ref.number, done.kind) == (1, Kind.DELTA)
    assert place.manifest(1).codec is Codec.SPARSE, "after a failure the bytes at hand are still the tip's"
    check(place, 1, 1)


def test_a_store_that_one_rank_cannot_reach(ranks: Ranks, place: Place) -> None:
    (kind, words), done = alike(ranks.run(rank_acts.store_away_at_one_rank, place))
    assert kind == "Unavailable"
    assert words.startswith("rank 1: ")
    assert done.ref.number == 1
    assert place.numbers() == [0, 1]
    check(place, 1, 1)


def test_an_unknown_outcome_is_unknown_to_all_and_then_settled_for_all(ranks: Ranks, place: Place) -> None:
    (kind, _), done = alike(ranks.run(rank_acts.unknown_outcome, place))
    assert kind == "OutcomeUnknown"
    assert [publication.ref.number for publication in done] == [1, 2]
    assert [place.manifest(number).codec for number in (1, 2)] == [Codec.SPARSE] * 2
    for number in range(3):
        check(place, number, number)


def test_fenced_at_rank_0_is_fenced_at_all(ranks: Ranks, place: Place) -> None:
    kind, words = alike(ranks.run(rank_acts.fenced, place))
    assert kind == "Fenced"
    assert "lost its claim" in words


def test_all_open_or_none(ranks: Ranks, place: Place, tmp_path: Path) -> None:
    kind, words = alike(ranks.run(rank_acts.open_refused, place))
    assert kind == "InvalidRequest"
    assert words.startswith("rank 2: checkpoint: /nowhere")
    assert not (tmp_path / "log.db").exists(), "rank 0 never began"


def test_an_interrupt_stays_one_where_it_came(ranks: Ranks, place: Place) -> None:
    told = [each.value for each in ranks.run(rank_acts.interrupted, place)]
    assert told[1] == "KeyboardInterrupt: "
    assert {told[0], told[2], told[3]} == {"StitchError: rank 1: interrupted: KeyboardInterrupt()"}
    assert place.numbers() == []


def test_a_checkpoint_directory_is_shared_out(ranks: Ranks, place: Place, tmp_path: Path) -> None:
    folders = []
    for step in range(3):
        write_checkpoint(tmp_path / f"{step}", rank_acts.model(step), max_shard_bytes=9000)
        (tmp_path / f"{step}" / "config.json").write_text(f'{{"step": {step}}}')
        folders.append(tmp_path / f"{step}")
    done = alike(ranks.run(rank_acts.directories, place, folders))
    assert [publication.kind for publication in done] == [Kind.FULL, Kind.DELTA, Kind.DELTA]
    assert place.manifest(2).codec is Codec.SPARSE
    assert {file.path for file in place.manifest(0).weights} == {path.name for path in folders[0].glob("*.safetensors")}
    for number in range(3):
        check(place, number, number)
        assert place.read_back(number)[1]["config.json"].decode() == f'{{"step": {number}}}'


def test_a_directory_of_another_form_becomes_a_full_version(ranks: Ranks, place: Place, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", rank_acts.model(0), max_shard_bytes=9000)
    less = {name: tensor for name, tensor in rank_acts.model(1).items() if name != "layer.03"}
    write_checkpoint(tmp_path / "b", less, max_shard_bytes=9000)
    error, done = alike(ranks.run(rank_acts.directory_of_another_form, place, [tmp_path / "a", tmp_path / "b"]))
    assert error[0] == "InvalidRequest"
    assert "'layer.03' of the base is not given" in error[1]
    assert (done.ref.number, done.kind) == (1, Kind.FULL)
    assert same(place.read_back(1)[0], less)


def test_ranks_that_see_other_directories_are_refused(ranks: Ranks, place: Place, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, shard in zip(folders, (9000, 13000), strict=True):
        write_checkpoint(folder, rank_acts.model(0), max_shard_bytes=shard)
    kind, _ = alike(ranks.run(rank_acts.another_directory, place, folders))
    assert kind == "CorruptObject"
    assert place.numbers() == []


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_delta_directory_is_shared_out(ranks: Ranks, place: Place, tmp_path: Path, encoding: str) -> None:
    base = tmp_path / "base"
    write_checkpoint(base, rank_acts.model(0))
    folders = [write_delta(tmp_path, step, rank_acts.model(step - 1), rank_acts.model(step), encoding=encoding) for step in (1, 2)]
    with place.publisher(base=base):
        pass
    first = alike(ranks.run(rank_acts.directories, place, folders[:1]))
    again = alike(ranks.run(rank_acts.directories, place, folders))
    assert again[0] == first[0], "published before, and told so without a second version"
    assert [publication.ref.number for publication in again] == [1, 2]
    assert [publication.kind for publication in again] == [Kind.DELTA, Kind.DELTA]
    for number in range(3):
        check(place, number, number)


def test_a_rank_that_dies_ends_the_wait_of_the_others(place: Place) -> None:
    pytest.importorskip("torch", reason="the torch extra is not installed")
    with started(3) as ranks:
        pipes = ranks.run(rank_acts.dies, place, 1, dead=1)
    assert {each.value[0] for each in pipes} <= {"Unavailable", "OutcomeUnknown"}, pipes
    assert place.numbers() == [0]
