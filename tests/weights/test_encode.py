"""What a publisher is given to upload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.manifest import Codec, Kind
from stitch.weights import encode as encode_module
from stitch.weights.digest import specs, weights_digest
from stitch.weights.encode import DELTA_FILE, Encoded, Hooks, Old, encode_delta, encode_full, encode_sparse
from stitch.weights.safetensors import WEIGHTS_FILE, TensorFile, write_checkpoint
from stitch.weights.sparse import apply
from stitch.weights.tensors import host_tensor, iterate
from tests.weights.versions import Weights, assert_same, changed, model

pytestmark = pytest.mark.unit


def held(path: Path) -> Weights:
    with TensorFile(path) as file:
        return {name: file.array(name).copy() for name in file.names}


def test_full_from_a_mapping_and_an_iterable(tmp_path: Path) -> None:
    one = encode_full(model(), tmp_path / "1")
    two = encode_full(iter(model().items()), tmp_path / "2", max_shard_bytes=3000)
    assert (one.kind, one.codec, one.complete) == (Kind.FULL, Codec.SAFETENSORS, True)
    assert one.tensors == two.tensors == specs(iterate(model()))
    assert one.weights_digest == two.weights_digest == weights_digest(one.tensors)
    assert [file.path for file in one.weights] == [WEIGHTS_FILE]
    count = len(two.weights)
    assert count > 1
    assert [file.path for file in two.weights] == [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for encoded in (one, two):
        assert_same({name: array for file in encoded.weights for name, array in held(file.source).items()}, model())


def test_directory_is_published_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    names = write_checkpoint(folder, model(), max_shard_bytes=3000)
    (folder / "config.json").write_text("{}")
    encoded = encode_full(folder, tmp_path / "scratch")
    assert [(file.path, file.source) for file in encoded.weights] == [(name, folder / name) for name in names]
    assert [(file.path, file.source) for file in encoded.files] == [("config.json", folder / "config.json")]
    assert not (tmp_path / "scratch").exists()
    assert encoded.weights_digest == encode_full(model(), tmp_path / "other").weights_digest


def test_damaged_directory_is_not_published(tmp_path: Path) -> None:
    names = write_checkpoint(tmp_path, model(), max_shard_bytes=3000)
    (tmp_path / names[-1]).write_bytes((tmp_path / names[-1]).read_bytes()[:-1])
    with pytest.raises(CorruptObject, match=names[-1]):
        encode_full(tmp_path, tmp_path / "scratch")


def test_delta_holds_what_changed(tmp_path: Path) -> None:
    base = specs(iterate(model()))
    after = changed(model(), "layer.0", "scale")
    encoded = encode_delta(after, base, tmp_path)
    assert (encoded.kind, encoded.codec, encoded.complete) == (Kind.DELTA, Codec.CHANGED_TENSORS, False)
    assert [file.path for file in encoded.weights] == [DELTA_FILE]
    assert_same(held(encoded.weights[0].source), {name: after[name] for name in ("layer.0", "scale")})
    assert encoded.weights_digest == weights_digest(specs(iterate(after)))


def test_unchanged_weights_make_an_empty_delta(tmp_path: Path) -> None:
    encoded = encode_delta(model(), specs(iterate(model())), tmp_path)
    assert held(encoded.weights[0].source) == {}
    assert encoded.weights_digest == weights_digest(specs(iterate(model())))
    assert not encoded.complete


def test_delta_of_everything_is_a_full_checkpoint(tmp_path: Path) -> None:
    before = {"a": np.zeros(3, np.float32), "b": np.zeros(4, np.int8)}
    after = {"b": np.ones(4, np.int8), "a": np.ones(3, np.float32)}
    encoded = encode_delta(after.items(), specs(iterate(before)), tmp_path)
    assert encoded.complete
    assert_same(held(encoded.weights[0].source), after)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"new": np.zeros(1)}, "'new' is not in the base"),
        (lambda w: {n: t for n, t in w.items() if n != "mask"}, "'mask' of the base is not given"),
        (lambda w: w | {"mask": w["mask"].astype(np.int8)}, r"'mask' is I8 \[13\], in the base BOOL \[13\]"),
        (lambda w: w | {"embed": w["embed"].reshape(16, 64)}, r"'embed' is BF16 \[16, 64\]"),
        (lambda w: {("renamed" if n == "embed" else n): t for n, t in w.items()}, "'renamed' is not in the base"),
    ],
)
def test_delta_against_another_form_is_refused_by_name(change, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A renamed tensor is never skipped in silence."""
    with pytest.raises(InvalidRequest, match=message):
        encode_delta(change(model()), specs(iterate(model())), tmp_path)


def test_tensors_are_taken_one_at_a_time(tmp_path: Path) -> None:
    scratch = np.zeros(50, np.float32)
    before = specs(iterate({f"l{i}": np.full(50, i, np.float32) for i in range(4)}))

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for index in range(4):
            scratch[:] = index + (index == 2)
            yield f"l{index}", scratch

    encoded = encode_delta(tensors(), before, tmp_path)
    assert_same(held(encoded.weights[0].source), {"l2": np.full(50, 3, np.float32)})


def host(weights: Weights) -> Old:
    """All of a model's bytes, as a publisher has them at hand."""
    return lambda spec: host_tensor(spec.name, weights[spec.name])


def sparse(after: Any, before: Weights, scratch: Path, **form: Any) -> Encoded:
    return encode_sparse(after, specs(iterate(before)), host(before), scratch, **form)


def applied(encoded: Encoded, before: Weights) -> Weights:
    """What the blobs make of the old bytes."""
    old = {spec.name: spec.state for spec in specs(iterate(before))}
    new = {spec.name: spec.state for spec in encoded.tensors}
    out = {name: array.copy() for name, array in before.items()}
    for file in encoded.weights:
        for name, blob in held(file.source).items():
            array = out[name]
            target = memoryview(array.reshape(-1).view(np.uint8))
            assert apply([memoryview(blob)], target, width=array.dtype.itemsize, state=old[name]) == new[name]
    return out


def test_sparse_delta_holds_what_changed_in_each_tensor(tmp_path: Path) -> None:
    after = changed(model(), "layer.0", "scale")
    encoded = sparse(after, model(), tmp_path)
    assert (encoded.kind, encoded.codec, encoded.complete) == (Kind.DELTA, Codec.SPARSE, False)
    assert [file.path for file in encoded.weights] == [DELTA_FILE]
    blobs = held(encoded.weights[0].source)
    assert set(blobs) == {"layer.0", "scale"}
    assert all(blob.dtype == np.uint8 and blob.ndim == 1 for blob in blobs.values())
    assert encoded.tensors == specs(iterate(after)), "the digests that follow from the change are those of a full pass"
    assert_same(applied(encoded, model()), after)


def test_sparse_delta_of_nothing_has_no_file(tmp_path: Path) -> None:
    encoded = sparse(model(), model(), tmp_path)
    assert encoded.weights == ()
    assert encoded.weights_digest == weights_digest(specs(iterate(model())))


def test_sparse_delta_without_old_bytes_holds_tensors_whole(tmp_path: Path) -> None:
    after = changed(model(), "layer.0")
    encoded = encode_sparse(after, specs(iterate(model())), lambda spec: None, tmp_path)
    assert encoded.tensors == specs(iterate(after))
    assert_same(applied(encoded, model()), after)


def test_packs_are_bounded_and_told_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "PACK_BYTES", 500)
    before = {f"{index}": np.zeros(300, np.float32) for index in range(20)}
    after = {name: np.random.default_rng(int(name)).standard_normal(300).astype(np.float32) for name in before}
    emitted: list[Path] = []
    given: list[int] = []

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in after.items():
            given.append(len(emitted))
            yield name, array

    encoded = sparse(tensors(), before, tmp_path, hooks=Hooks(emit=emitted.append))
    assert given[-1] > 5, "most files were complete before the last tensor was taken"
    assert [file.source for file in encoded.weights] == emitted
    assert [name for path in emitted for name in held(path)] == list(after), "in the order given"
    assert_same(applied(encoded, before), after)


@pytest.mark.parametrize("encode", [encode_delta, lambda w, b, s: encode_sparse(w, b, lambda spec: None, s)])
def test_another_form_is_refused_by_every_delta(encode: Any, tmp_path: Path) -> None:
    base = specs(iterate(model()))
    with pytest.raises(InvalidRequest, match="'mask' of the base is not given"):
        encode({name: tensor for name, tensor in model().items() if name != "mask"}, base, tmp_path / "a")
    with pytest.raises(InvalidRequest, match="'new' is not in the base"):
        encode(model() | {"new": np.zeros(1)}, base, tmp_path / "b")


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_old_bytes_and_sparse_delta_give_the_new_weights(data: st.DataObject, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    before = {"a": np.zeros(37, np.uint8), "b": np.arange(64, dtype=np.int64), "c": np.zeros(33, np.float16), "d": np.zeros(0)}
    after = {}
    for name, array in before.items():
        raw = bytearray(array.tobytes())
        for at, value in data.draw(st.dictionaries(st.integers(0, max(0, len(raw) - 1)), st.integers(0, 255), max_size=9)).items():
            if raw:
                raw[at] = value
        after[name] = np.frombuffer(bytes(raw), array.dtype)
    form = data.draw(st.sampled_from([after, list(after.items())]))
    encoded = sparse(form, before, tmp_path_factory.mktemp("d"))
    assert encoded.tensors == specs(iterate(after))
    assert_same(applied(encoded, before), after)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_base_and_delta_give_the_new_weights(data: st.DataObject, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    names = st.sets(st.sampled_from(sorted(model())))
    after = changed(model(), *sorted(data.draw(names)), seed=data.draw(st.integers(0, 9)))
    encoded = encode_delta(after, specs(iterate(model())), tmp_path_factory.mktemp("d"))
    assert_same(model() | held(encoded.weights[0].source), after)
