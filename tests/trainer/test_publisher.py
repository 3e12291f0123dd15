"""What a trainer may rely on when it publishes, with nothing going wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stitch.core.anchors import ANCHOR_EVERY
from stitch.core.errors import Fenced, InvalidRequest, VersionConflict
from stitch.core.manifest import Kind
from stitch.store.opening import open_store
from stitch.trainer.attempt import Progress, Step
from stitch.weights.safetensors import write_checkpoint
from tests.trainer.places import POLICY, Place, Weights, same, weights

pytestmark = pytest.mark.integration


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place.in_memory() if request.param == "memory" else Place.on_disk(tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    write_checkpoint(folder, weights(0))
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def noise(seed: int) -> Weights:
    """A model of the form of `weights` in which nothing is as it was, and nothing can be compressed."""
    rng = np.random.default_rng(seed)
    return {
        name: np.frombuffer(rng.bytes(tensor.nbytes), tensor.dtype).reshape(tensor.shape) for name, tensor in weights(0).items()
    }


def test_versions_are_durable_accepted_and_read_back_as_they_were(place: Place) -> None:
    with place.publisher() as pub:
        assert (pub.epoch, pub.next_number, pub.head) == (1, 0, None)
        for number in range(3):
            done = pub.publish(weights(number))
            assert done.ref.number == number == pub.next_number - 1
            assert done.ref == pub.head
            assert done.bytes_written > 0
    place.check_durable()
    place.check_pointers()
    for number in range(3):
        assert same(place.read_back(number)[0], weights(number))


def test_a_mapping_an_iterable_and_a_directory_are_the_same_weights(place: Place, checkpoint: Path) -> None:
    def pairs() -> Iterator[tuple[str, Any]]:
        yield from weights(0).items()

    with place.publisher() as pub:
        digests = {pub.publish(form).weights_digest for form in (weights(0), pairs(), checkpoint, str(checkpoint))}
    assert len(digests) == 1


def test_kinds_follow_what_is_cheapest(place: Place) -> None:
    with place.publisher() as pub:
        assert pub.publish(weights(0)).kind is Kind.FULL
        delta = pub.publish(weights(1))
        assert delta.kind is Kind.DELTA
        assert delta.bytes_written < 4096
        assert pub.publish(weights(2), kind="full").kind is Kind.FULL
        everything = noise(3)
        assert pub.publish(everything).kind is Kind.FULL, "a delta that is no smaller than a full version is one"
        everything = noise(4)
        assert pub.publish(everything, kind="delta").kind is Kind.DELTA
        other_form = {"body": np.zeros(3, np.float32)}
        assert pub.publish(other_form).kind is Kind.FULL
        with pytest.raises(InvalidRequest, match="full"):
            pub.publish(weights(1), kind="delta")
        assert pub.next_number == 6
    for number, expected in enumerate([weights(0), weights(1), weights(2), noise(3), everything, other_form]):
        assert same(place.read_back(number)[0], expected)


def test_a_first_version_cannot_be_a_delta(place: Place) -> None:
    with place.publisher() as pub, pytest.raises(InvalidRequest) as refused:
        pub.publish(weights(0), kind="delta")
    assert refused.value.field == "kind"


def test_a_chain_never_grows_past_its_bound() -> None:
    place = Place.in_memory()
    with place.publisher() as pub:
        kinds = [pub.publish(weights(n)).kind for n in range(ANCHOR_EVERY + 2)]
    assert [n for n, kind in enumerate(kinds) if kind is Kind.FULL] == [0, ANCHOR_EVERY]
    assert max(len(list(place.policy().chain(ref))) for ref in place.policy().versions) == ANCHOR_EVERY


def test_heavy_deltas_make_an_anchor_early() -> None:
    place = Place.in_memory()
    rng = np.random.default_rng(0)
    with place.publisher() as pub:
        models = [{"big": np.frombuffer(rng.bytes(8000), np.int64), "tiny": np.zeros(100, np.int64)} for _ in range(4)]
        kinds = [pub.publish(model).kind for model in models]
    assert kinds == [Kind.FULL, Kind.DELTA, Kind.DELTA, Kind.FULL]


def test_a_number_published_again_with_equal_weights_is_that_publication(place: Place) -> None:
    with place.publisher() as pub:
        first = pub.publish(weights(1), number=7)
        assert pub.publish(weights(1), number=7) == first
    with place.publisher() as pub:
        assert pub.publish(weights(1), number=7) == first
        assert pub.next_number == 8
    assert place.numbers() == [7]


def test_a_number_is_never_used_twice_and_only_grows(place: Place) -> None:
    with place.publisher() as pub:
        pub.publish(weights(1), number=7)
        with pytest.raises(VersionConflict, match="8"):
            pub.publish(weights(2), number=7)
        with pytest.raises(VersionConflict, match="8"):
            pub.publish(weights(2), number=5)
        assert pub.publish(weights(2), number=9).ref.number == 9
    assert place.numbers() == [7, 9]


def test_d19_after_a_rewind_numbers_go_on_above_all_that_was_accepted(place: Place) -> None:
    with place.publisher() as pub:
        for number in range(11):
            pub.publish(weights(number))
    with place.publisher(boot_version=3) as pub:
        assert pub.head is not None
        assert (pub.head.number, pub.next_number, pub.epoch) == (3, 11, 2)
        with pytest.raises(VersionConflict, match="11"):
            pub.publish(weights(44), number=4)
        with pytest.raises(VersionConflict, match="abandoned"):
            pub.publish(weights(9), number=9)
        done = pub.publish(weights(44))
        assert done.ref.number == 11
    policy = place.policy()
    assert [version.ref.number for version in policy.path(policy.tip)] == [11, 3, 2, 1, 0]
    assert same(place.read_back(11)[0], weights(44))
    place.check_pointers()


def test_a_boot_version_must_live(place: Place) -> None:
    with place.publisher() as pub:
        pub.publish(weights(0))
    with pytest.raises(VersionConflict, match="never accepted"):
        place.publisher(boot_version=5)
    with pytest.raises(VersionConflict, match="no version yet"):
        place.publisher("r2", boot_version=5, take_over=True)


def test_another_run_takes_over_only_when_told_to(place: Place) -> None:
    with place.publisher("r1") as old:
        old.publish(weights(0))
        with pytest.raises(Fenced, match=f"writer {old.writer} owns it with run r1 since"):
            place.publisher("r2")
        with place.publisher("r2", take_over=True, boot_version="r1/weight_v000000") as new:
            assert (new.epoch, new.next_number) == (2, 1)
            done = new.publish(weights(1))
            assert done.kind is Kind.DELTA
            with pytest.raises(Fenced, match="r2"):
                old.publish(weights(2))
    with pytest.raises(Fenced, match="superseded"):
        place.publisher("r1", take_over=True)
    assert same(place.read_back(0, "r2")[0], weights(0))
    assert same(place.read_back(1, "r2")[0], weights(1))
    place.check_pointers()


def test_the_same_run_is_taken_over_without_a_word(place: Place) -> None:
    with place.publisher() as old, place.publisher() as new:
        assert new.epoch == 2
        new.publish(weights(1))
        with pytest.raises(Fenced):
            old.publish(weights(2))
        new.publish(weights(3))
    assert place.numbers() == [0, 1]


def test_a_base_becomes_the_first_version_and_its_files_go_along(place: Place, checkpoint: Path) -> None:
    carried = {name: (checkpoint / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    with place.publisher(base=checkpoint) as pub:
        assert (pub.next_number, pub.head and pub.head.number) == (1, 0)
        assert pub.publish(weights(1)).kind is Kind.DELTA
    place.check_pointers()
    with place.publisher(base=checkpoint) as pub:
        pub.publish(weights(2), kind="full")
    for number in range(3):
        tensors, files = place.read_back(number)
        assert same(tensors, weights(number))
        assert files == carried
    prefix = f"{POLICY}/r1/1.e1/"
    assert all(file.key.startswith(prefix) for file in place.manifest(1).files), "nothing is shared sideways"
    assert f"{POLICY}/r1/0.base-{place.manifest(0).weights_digest[:16]}" in place.manifest(0).weights[0].key
    place.check_durable()


def test_a_base_takes_the_boot_number_and_must_be_the_one_that_is_there(place: Place, checkpoint: Path, tmp_path: Path) -> None:
    with place.publisher(base=checkpoint, boot_version=40) as pub:
        assert pub.next_number == 41
    write_checkpoint(tmp_path / "other", weights(5))
    with pytest.raises(VersionConflict, match="other weights"):
        place.publisher(base=tmp_path / "other", boot_version=40)
    with pytest.raises(InvalidRequest) as refused:
        place.publisher("r2", base=checkpoint, boot_version="r1/weight_v000040", take_over=True)
    assert refused.value.field == "base"


def test_a_directory_brings_its_own_files(place: Place, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "next"
    write_checkpoint(folder, weights(1))
    (folder / "config.json").write_text('{"model_type": "tiny", "changed": true}')
    with place.publisher(base=checkpoint) as pub:
        pub.publish(folder)
        pub.publish(weights(2))
    for number in (1, 2):
        files = place.read_back(number)[1]
        assert list(files) == ["config.json"]
        assert json.loads(files["config.json"])["changed"] is True


def test_metadata_and_probes_are_kept_and_checked_first(place: Place) -> None:
    with place.publisher() as pub:
        for bad in ({"step": object()}, {"loss": float("nan")}):
            with pytest.raises(InvalidRequest) as refused:
                pub.publish(weights(0), metadata=bad)
            assert refused.value.field == "metadata"
        pub.publish(weights(0), metadata={"step": 7}, probes=[{"input_ids": [1, 2]}])
    manifest = place.manifest(0)
    assert (manifest.metadata, list(manifest.probes)) == ({"step": 7}, [{"input_ids": [1, 2]}])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"policy": "UPPER"}, "policy"),
        ({"run": "../x"}, "run"),
        ({"boot_version": -1}, "boot_version"),
        ({"boot_version": "r1/7"}, "version"),
        ({"log": "nowhere"}, "log"),
        ({"store": "nowhere"}, "store"),
    ],
)
def test_malformed_arguments_are_named_and_leave_nothing_behind(arguments: dict[str, Any], field: str) -> None:
    from stitch.trainer.publisher import Publisher

    before = threading.active_count()
    with pytest.raises(InvalidRequest) as refused:
        Publisher.open(**{"policy": "p", "run": "r", "log": "memory://", "store": "memory://", **arguments})
    assert refused.value.field == field
    assert threading.active_count() == before


@pytest.mark.parametrize("number", [-1, 2**53, True])
def test_malformed_numbers_are_refused(number: int) -> None:
    with Place.in_memory().publisher() as pub, pytest.raises(InvalidRequest) as refused:
        pub.publish(weights(0), number=number)
    assert refused.value.field == "number"


def test_publish_async_takes_the_weights_as_they_are_now(place: Place) -> None:
    live = weights(0)
    with place.publisher() as pub:
        futures = []
        for step in range(4):
            live["frozen"] += 1
            futures.append(pub.publish_async(live))
            assert sum(not future.done() for future in futures) <= 1, "one in flight; the next call waits"
            if step == 3:
                live["frozen"] += 100
        assert [future.result(60).ref.number for future in futures] == [0, 1, 2, 3]
    for number in range(4):
        assert np.array_equal(place.read_back(number)[0]["frozen"], weights(0)["frozen"] + number + 1)


def test_close_waits_for_what_is_under_way(place: Place) -> None:
    with place.publisher() as pub:
        future = pub.publish_async(weights(0))
    assert future.result(0).ref.number == 0
    assert place.numbers() == [0]
    with pytest.raises(InvalidRequest, match="closed"):
        pub.publish(weights(1))
    pub.close()


def test_no_thread_and_no_file_is_left(place: Place, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    scratch = tmp_path / "scratch"
    with place.publisher(scratch=scratch) as pub:
        pub.publish(weights(0))
        pub.publish_async(weights(1))
        assert any(scratch.iterdir())
    assert set(threading.enumerate()) <= before
    assert list(scratch.iterdir()) == []


async def test_it_works_inside_a_running_loop() -> None:
    place = Place.in_memory()
    with place.publisher() as pub:
        assert pub.publish(weights(0)).ref.number == 0


def test_a_log_and_store_of_the_caller_stay_open() -> None:
    place = Place.in_memory()
    log = place.memory_log()
    with open_store(place.store_url) as store:
        for number in range(2):
            with place.publisher(log=log, store=store) as pub:
                assert pub.publish(weights(number)).ref.number == number


def test_progress_is_told_step_by_step() -> None:
    told: list[Progress] = []
    with Place.in_memory().publisher(progress=told.append) as pub:
        assert [p.step for p in told] == [Step.APPENDED, Step.ACCEPTED, Step.DONE]
        told.clear()
        done = pub.publish(weights(0))
    assert [p.step for p in told] == [
        *[Step.ENCODING] * 3,
        Step.ENCODED,
        Step.UPLOADING,
        Step.UPLOADED,
        Step.DESCRIBED,
        Step.APPENDED,
        Step.ACCEPTED,
        Step.DONE,
    ]
    assert [(p.tensors_done, p.tensors_total) for p in told[:3]] == [(1, 3), (2, 3), (3, 3)]
    assert told[2].bytes_done == sum(tensor.nbytes for tensor in weights(0).values())
    assert told[4].bytes_done == told[4].bytes_total == done.bytes_written


def test_progress_counts_tensors_and_bytes_of_every_form(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", weights(0))
    size = sum(tensor.nbytes for tensor in weights(0).values())
    told: list[Progress] = []
    with Place.in_memory().publisher(progress=told.append) as pub:
        for given, of in ((tmp_path / "c", (3, size)), (weights(1), (3, size)), (iter(weights(2).items()), (3, size))):
            told.clear()
            pub.publish(given)
            encoding = [p for p in told if p.step is Step.ENCODING]
            assert [p.tensors_done for p in encoding] == [1, 2, 3]
            assert encoding[-1].bytes_done == size
            assert {(p.tensors_total, p.bytes_total) for p in encoding} == {of}


def test_weights_that_fail_midway_leave_the_publisher_usable(place: Place) -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        yield "body", weights(0)["body"]
        raise RuntimeError("the trainer's own fault")

    with place.publisher() as pub:
        with pytest.raises(RuntimeError, match="own fault"):
            pub.publish(broken())
        with pytest.raises(InvalidRequest, match="numpy array"):
            pub.publish({"a": "text"})
        assert pub.publish(weights(0)).ref.number == 0
    assert place.numbers() == [0]


@pytest.mark.torch
def test_torch_tensors_are_taken_bit_for_bit() -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed")
    place = Place.in_memory()
    state = {"a": torch.randn(5, 3, dtype=torch.bfloat16), "b": torch.arange(6).reshape(2, 3).T, "c": torch.tensor(1.5)}
    with place.publisher() as pub:
        pub.publish(state)
        state["c"] = torch.nn.Parameter(torch.tensor(2.5))
        assert pub.publish(state).kind is Kind.DELTA
    tensors, _ = place.read_back(1)
    assert tensors["a"].tobytes() == state["a"].view(torch.uint8).numpy().tobytes()
    assert np.array_equal(tensors["b"], state["b"].numpy())
    assert tensors["c"] == np.float32(2.5)
