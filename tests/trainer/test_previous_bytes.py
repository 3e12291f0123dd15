"""What a publisher keeps of the version before: the next one costs what changed, whatever failed in between."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.anchors import ANCHOR_EVERY
from stitch.core.errors import OutcomeUnknown, Unavailable
from stitch.core.ids import StateDigest
from stitch.core.manifest import Codec, Kind
from stitch.log.faulty import Fault as LogFault
from stitch.log.faulty import FaultyLog, script
from stitch.log.port import Stream
from stitch.store.faulty import ALWAYS, Fault, FaultyStore
from stitch.store.faulty import Kind as FaultKind
from stitch.store.memory import MemoryStore
from stitch.store.opening import open_store
from stitch.store.port import Receipt
from stitch.weights import encode as encode_module
from stitch.weights import previous as previous_module
from stitch.weights.previous import Previous
from stitch.weights.safetensors import write_checkpoint
from tests.trainer.places import PATIENCE, Place, Weights, same

pytestmark = pytest.mark.integration

SHORT = 0.5
"""A deadline that is meant to pass."""
Form = Callable[[Weights, Path], Any]


def model(step: int) -> Weights:
    """Of some kilobytes, of which each step changes a part by little."""
    out: Weights = {}
    for index in range(6):
        data = np.random.default_rng(index).standard_normal(1000 + index).astype(np.float32)
        data[step % 7 :: 50] += np.float32(step * (index % 3))
        out[f"layer.{index}"] = data
    return out | {"empty": np.zeros((0, 3), np.float16), "scalar": np.array(step, np.int8)}


@pytest.fixture
def place() -> Place:
    return Place.in_memory()


def codecs(place: Place) -> list[Codec]:
    return [place.manifest(number).codec for number in place.numbers()]


def check(place: Place, number: int, step: int) -> None:
    assert same(place.read_back(number)[0], model(step))


def as_mapping(weights: Weights, folder: Path) -> Any:
    return weights


def as_iterable(weights: Weights, folder: Path) -> Any:
    """Through one buffer that is used again and again, as a trainer that gathers a tensor at a time does."""
    buffer = np.zeros(1 << 16, np.uint8)

    def pairs() -> Iterator[tuple[str, Any]]:
        for name, tensor in weights.items():
            view = buffer[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
            view[...] = tensor
            yield name, view

    return pairs()


def as_directory(weights: Weights, folder: Path) -> Any:
    """Written in the same place each time."""
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(folder, weights, max_shard_bytes=9000)
    return folder


@pytest.mark.parametrize("memory_budget", [None, 0], ids=["in memory", "in a file"])
@pytest.mark.parametrize("form", [as_mapping, as_iterable, as_directory])
def test_versions_cost_what_changed(place: Place, tmp_path: Path, form: Form, memory_budget: int | None) -> None:
    with place.publisher(memory_budget=memory_budget, scratch=tmp_path / "scratch") as pub:
        done = [pub.publish(form(model(step), tmp_path / "c")) for step in range(4)]
        done.append(pub.publish(form(model(4), tmp_path / "c"), kind="full"))
        done.append(pub.publish(form(model(5), tmp_path / "c")))
    assert codecs(place) == [Codec.SAFETENSORS, *[Codec.SPARSE] * 3, Codec.SAFETENSORS, Codec.SPARSE]
    for number, publication in enumerate(done):
        check(place, number, number)
        if publication.kind is Kind.DELTA:
            assert publication.bytes_written < done[0].bytes_written / 3
    place.check_durable()


def test_directories_that_are_asked_for_in_full_are_not_copied(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that wants no delta need not pay for one; the first delta brings the copy."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("copied")

    with place.publisher() as pub:
        with monkeypatch.context() as watched:
            watched.setattr(Previous, "fill", refuse)
            for step in (0, 1):
                pub.publish(as_directory(model(step), tmp_path / "c"), kind="full")
        for step in (2, 3, 4):
            pub.publish(as_directory(model(step), tmp_path / "c"), kind="full" if step == 3 else "auto")
        pub.publish(as_directory(model(5), tmp_path / "c"))
    assert codecs(place)[2:] == [Codec.CHANGED_TENSORS, Codec.SAFETENSORS, Codec.SPARSE, Codec.SPARSE]
    check(place, 5, 5)


def test_one_version_keeps_nothing_for_another(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "base", model(0))

    def refuse(*_: Any) -> Any:
        raise AssertionError("kept")

    monkeypatch.setattr(Previous, "_allocate", refuse)
    with place.publisher(base=tmp_path / "base", keep_previous=False) as pub:
        pub.publish(model(1))
    with place.publisher(keep_previous=False) as pub:
        pub.publish(as_directory(model(2), tmp_path / "c"))
    assert codecs(place) == [Codec.SAFETENSORS, Codec.SPARSE, Codec.CHANGED_TENSORS]
    for number in range(3):
        check(place, number, number)


def test_nothing_changed_is_nothing_uploaded(place: Place) -> None:
    with place.publisher() as pub:
        pub.publish(model(0))
        assert pub.publish(model(0)).bytes_written == 0
        assert pub.publish(model(1)).kind is Kind.DELTA
    assert place.manifest(1).weights == ()
    check(place, 1, 0)
    check(place, 2, 1)


def test_an_anchor_in_between_changes_nothing(place: Place) -> None:
    with place.publisher() as pub:
        for step in range(ANCHOR_EVERY + 2):
            pub.publish(model(step))
    sparse = [Codec.SPARSE] * (ANCHOR_EVERY - 1)
    assert codecs(place) == [Codec.SAFETENSORS, *sparse, Codec.SAFETENSORS, Codec.SPARSE]
    check(place, ANCHOR_EVERY + 1, ANCHOR_EVERY + 1)


@pytest.mark.parametrize("form", [as_mapping, as_iterable, as_directory])
def test_another_life_begins_with_whole_tensors(place: Place, tmp_path: Path, form: Form) -> None:
    """The bytes of the tip are not at hand, so what is published first fills them in passing."""
    with place.publisher() as pub:
        pub.publish(model(0))
    with place.publisher() as pub:
        for step in (1, 2):
            assert pub.publish(form(model(step), tmp_path / "c")).kind is Kind.DELTA
    assert codecs(place) == [Codec.SAFETENSORS, Codec.CHANGED_TENSORS, Codec.SPARSE]
    for number in range(3):
        check(place, number, number)


def test_whole_tensors_of_all_names_are_a_full_version(place: Place) -> None:
    after = {name: tensor + tensor.dtype.type(1) for name, tensor in model(0).items() if tensor.size}
    before = {name: tensor for name, tensor in model(0).items() if tensor.size}
    for weights, kind in ((before, Kind.FULL), (after, Kind.FULL), (before, Kind.FULL)):
        with place.publisher() as pub:
            assert pub.publish(weights).kind is kind
    with place.publisher() as pub:
        assert pub.publish(after, kind="delta").kind is Kind.DELTA
    assert codecs(place)[-1] is Codec.CHANGED_TENSORS
    for number, weights in enumerate((before, after, before, after)):
        assert same(place.read_back(number)[0], weights)


def test_a_base_directory_is_the_version_before(place: Place, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", model(0), max_shard_bytes=9000)
    with place.publisher(base=tmp_path / "base") as pub:
        pub.publish(model(1))
        shutil.rmtree(tmp_path / "base")
        pub.publish(model(2))
    assert codecs(place) == [Codec.SAFETENSORS, Codec.SPARSE, Codec.SPARSE]
    for number in range(3):
        check(place, number, number)


def test_a_base_directory_that_changes_is_not_believed(place: Place, tmp_path: Path) -> None:
    (names,) = write_checkpoint(tmp_path / "base", model(0))
    path = tmp_path / "base" / names
    with place.publisher(base=tmp_path / "base") as pub:
        with path.open("r+b") as file:
            file.seek(-2000, 2)
            file.write(b"\x55" * 8)
        pub.publish(model(1))
        pub.publish(model(2))
    for number in range(3):
        check(place, number, number)
    place.check_durable()


def test_a_failed_version_leaves_them_at_the_tip(place: Place) -> None:
    store = FaultyStore(open_store(place.store_url))
    with place.publisher(store=store) as pub:
        pub.publish(model(0))
        store.add(Fault(call="put", kind=FaultKind.FAIL_BEFORE, times=ALWAYS))
        with pytest.raises(Unavailable):
            pub.publish(model(1), timeout=SHORT)
        store.clear()
        with pytest.raises(RuntimeError, match="own fault"):
            pub.publish(_breaking())
        pub.publish(model(2))
        pub.publish(model(3))
    assert codecs(place) == [Codec.SAFETENSORS, Codec.SPARSE, Codec.SPARSE]
    check(place, 1, 2)
    check(place, 2, 3)


def _breaking() -> Iterator[tuple[str, Any]]:
    yield from list(model(1).items())[:2]
    raise RuntimeError("the trainer's own fault")


@pytest.mark.parametrize("memory_budget", [None, 0], ids=["in memory", "in a file"])
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("kind", ["auto", "full"])
def test_an_unknown_outcome_is_followed_once_it_is_known(place: Place, again: bool, kind: Any, memory_budget: int | None) -> None:
    """What was sent is sent again by the next publish, and counts, whether it is asked for again or not."""
    log = FaultyLog(place.memory_log())
    with place.publisher(log=log, memory_budget=memory_budget) as pub:
        pub.publish(model(0))
        log.plan(lambda stream, draft: LogFault.LOSE if stream is Stream.PUBLICATIONS else LogFault.NONE)
        with pytest.raises(OutcomeUnknown):
            pub.publish(model(1), kind=kind, timeout=SHORT)
        log.plan(script())
        assert pub.publish(model(1) if again else model(2)).ref.number == (1 if again else 2)
        pub.publish(model(3))
    assert codecs(place)[2:] == [Codec.SPARSE] * (1 if again else 2)
    check(place, 1, 1)
    check(place, place.numbers()[-1], 3)


def test_without_room_they_are_not_kept(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full_disk(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(previous_module, "_map_new", full_disk)
    with place.publisher(memory_budget=0) as pub:
        for step in range(3):
            pub.publish(as_directory(model(step), tmp_path / "c"))
    assert codecs(place) == [Codec.SAFETENSORS, Codec.CHANGED_TENSORS, Codec.CHANGED_TENSORS]
    assert "there is no room for the bytes of the one before" in caplog.text
    for number in range(3):
        check(place, number, number)


def test_a_version_that_does_not_rebuild_is_followed_by_a_full_one(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What is kept moves on by the very files that were published: where that gives other weights, no version may build on it."""
    with place.publisher() as pub:
        pub.publish(model(0))
        with monkeypatch.context() as broken:
            broken.setattr(previous_module, "apply", lambda *_, **__: StateDigest("0" * 16))
            pub.publish(model(1))
            pub._follower.submit(lambda: None).result(PATIENCE)
        assert "does not rebuild from its own files" in caplog.text
        assert pub.publish(model(2)).kind is Kind.FULL
        assert pub.publish(model(3)).kind is Kind.DELTA
    assert codecs(place) == [Codec.SAFETENSORS, Codec.SPARSE, Codec.SAFETENSORS, Codec.SPARSE]
    check(place, 3, 3)


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_uploads_begin_while_tensors_are_still_encoded(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tensor is only given once the first file is durable."""
    monkeypatch.setattr(encode_module, "PACK_BYTES", 100)
    monkeypatch.setattr(encode_module, "SHARD_BYTES", 5000)
    uploaded = threading.Event()

    class Watched(MemoryStore):
        def put_named(self, key_of: Any, body: Any, **options: Any) -> Receipt:
            receipt = super().put_named(key_of, body, **options)
            uploaded.set()
            return receipt

    def patient() -> Iterator[tuple[str, Any]]:
        for index in range(64):
            if index == 63:
                assert uploaded.wait(PATIENCE), "nothing was uploaded before the last tensor was asked for"
            yield f"{index}", np.full(1000, changed[0], np.int32)

    changed = [0]
    with Place.in_memory().publisher(store=Watched()) as pub:
        pub.publish(patient())
        uploaded.clear()
        changed[0] = 1
        assert pub.publish(patient(), kind=kind).kind == kind


@settings(max_examples=20)
@given(data=st.data())
def test_whatever_comes_after_whatever_every_version_is_what_was_given(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Forms, kinds, budgets, stores that fail and trainers that start again, in any order."""
    place, folder = Place.in_memory(), tmp_path_factory.mktemp("c")
    store = FaultyStore(open_store(place.store_url))
    published: list[Weights] = []
    current = model(0)
    pub = place.publisher(store=store)
    try:
        for act in data.draw(st.lists(st.sampled_from(["publish", "publish", "publish", "fail", "again"]), max_size=8)):
            if act == "again":
                pub.close()
                pub = place.publisher(store=store, memory_budget=data.draw(st.sampled_from([None, 0, 9000])))
                continue
            current = _next(data, current)
            weights = data.draw(st.sampled_from([as_mapping, as_iterable, as_directory]))(current, folder / "c")
            kind = data.draw(st.sampled_from(["auto", "auto", "full", "delta"] if published else ["auto"]))
            if act == "fail":
                store.add(Fault(call="put", kind=FaultKind.FAIL_AFTER, times=ALWAYS, key=data.draw(st.sampled_from(["", ".json"]))))
                with pytest.raises(Unavailable):
                    pub.publish(weights, kind=kind, timeout=0.1)
                store.clear()
            else:
                pub.publish(weights, kind=kind)
                published.append(current)
    finally:
        pub.close()
    for number, expected in enumerate(published):
        assert same(place.read_back(number)[0], expected)


def _next(data: st.DataObject, weights: Weights) -> Weights:
    """Some tensors changed in some places."""
    out = {}
    for name, tensor in weights.items():
        changed = bytearray(tensor.tobytes())
        if changed and data.draw(st.booleans()):
            for at in data.draw(st.lists(st.integers(0, len(changed) - 1), max_size=20)):
                changed[at] ^= 1 << at % 8
        out[name] = np.frombuffer(bytes(changed), tensor.dtype).reshape(tensor.shape)
    return out


def test_publish_async_may_change_tensors_at_once(place: Place) -> None:
    live = model(0)
    with place.publisher() as pub:
        futures = []
        for step in range(1, 5):
            for name, tensor in model(step).items():
                live[name][...] = tensor
            futures.append(pub.publish_async(live))
            for tensor in live.values():
                tensor[...] = 0
        assert [future.result(PATIENCE).ref.number for future in futures] == [0, 1, 2, 3]
    for number in range(4):
        check(place, number, number + 1)
