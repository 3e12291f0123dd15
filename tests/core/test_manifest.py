"""Manifests: canonical bytes, round trips, and nothing but CorruptObject for what is malformed."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.core.ids import Digest, Epoch, PolicyId, RunId, StateDigest, VersionNumber
from stitch.core.manifest import (
    BaseRef,
    Codec,
    Kind,
    Manifest,
    ManifestRef,
    StoredFile,
    TensorSpec,
    check_relative,
    decode_manifest,
    encode_manifest,
    manifest_digest,
    weights_digest,
)
from tests.core.builders import hexdigest

pytestmark = pytest.mark.unit
EXAMPLES = settings(max_examples=100, deadline=None)


def made(**fields: Any) -> Manifest:
    tensors = fields.pop("tensors", (TensorSpec(name="w", dtype="BF16", shape=(2, 3), state=StateDigest("0" * 15 + "7")),))
    whole: dict[str, Any] = {
        "policy": PolicyId("p"),
        "run": RunId("a"),
        "number": VersionNumber(2),
        "epoch": Epoch(1),
        "kind": Kind.DELTA,
        "codec": Codec.CHANGED_TENSORS,
        "parent": VersionNumber(1),
        "base": BaseRef(
            run=RunId("a"),
            number=VersionNumber(1),
            manifest=ManifestRef(key="p/a/1.json", digest=hexdigest("m"), weights_digest=hexdigest("w")),
        ),
        "tensors": tensors,
        "weights_digest": weights_digest(tensors),
        "weights": (StoredFile(path="model.safetensors", key="p/a/2.e1/x", size=12, blake3=hexdigest("x")),),
        "files": (StoredFile(path="sub/config.json", key="p/a/2.e1/y", size=3, blake3=hexdigest("y")),),
        "probes": ({"prompt": [1, 2], "logprobs": [-0.5]},),
        "metadata": {"step": 7, "note": "ü"},
    }
    return Manifest(**{**whole, **fields})


def plain(manifest: Manifest | None = None) -> Any:
    return json.loads(encode_manifest(manifest or made()))


def broken(change: Any) -> bytes:
    """The example's JSON after `change` was done to it."""
    raw = copy.deepcopy(plain())
    change(raw)
    return json.dumps(raw).encode()


# --- bytes -------------------------------------------------------------------------------------------------------------------


def test_bytes_are_canonical() -> None:
    data = encode_manifest(made())
    assert data == rfc8785.dumps(json.loads(data))
    assert data.startswith(b'{"base":{"manifest":{"digest":')
    assert b"\n" not in data


def test_same_content_same_bytes_whatever_the_order_of_keys() -> None:
    assert encode_manifest(made(metadata={"a": 1, "b": 2})) == encode_manifest(made(metadata={"b": 2, "a": 1}))


def test_digest_is_that_of_the_bytes() -> None:
    data = encode_manifest(made())
    assert decode_manifest(data, manifest_digest(data)) == made()
    with pytest.raises(CorruptObject, match="do not match digest"):
        decode_manifest(data, hexdigest("other"))
    with pytest.raises(CorruptObject, match="do not match digest"):
        decode_manifest(data[:-1] + b" ", manifest_digest(data))


names = st.text(min_size=1, max_size=12)
counts = st.integers(0, 2**53 - 1)
states = st.text("0123456789abcdef", min_size=16, max_size=16).map(StateDigest)
digests = st.text("0123456789abcdef", min_size=64, max_size=64).map(Digest)
tensor_lists = st.lists(
    st.builds(
        TensorSpec,
        name=names,
        dtype=st.sampled_from(["BF16", "F32", "F8_E4M3"]),
        shape=st.lists(counts, max_size=3).map(tuple),
        state=states,
    ),
    max_size=4,
    unique_by=lambda t: t.name,
).map(tuple)
segments = st.text("abcXYZ012._-", min_size=1, max_size=6).filter(lambda s: s.strip(".") != "")
paths = st.lists(segments, min_size=1, max_size=3).map("/".join)
files = st.lists(
    st.builds(StoredFile, path=paths, key=names, size=counts, blake3=digests), max_size=3, unique_by=lambda f: f.path
).map(tuple)
references = st.builds(ManifestRef, key=names, digest=digests, weights_digest=digests)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53) + 1, 2**53 - 1), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def manifests(draw: Any) -> Manifest:
    base = draw(st.one_of(st.none(), st.builds(BaseRef, run=names, number=counts, manifest=references)))
    weights = draw(files)
    return made(
        number=draw(counts),
        epoch=draw(st.one_of(st.none(), counts)),
        kind=Kind.FULL if base is None else Kind.DELTA,
        codec=draw(st.sampled_from(Codec)),
        parent=draw(st.one_of(st.none(), counts)),
        base=base,
        tensors=draw(tensor_lists),
        weights=weights,
        files=tuple(file for file in draw(files) if file.path not in {weight.path for weight in weights}),
        metadata=draw(st.dictionaries(st.text(max_size=4), values, max_size=3)),
    )


@EXAMPLES
@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    assert decode_manifest(data, manifest_digest(data)) == manifest
    assert encode_manifest(decode_manifest(data)) == data


@EXAMPLES
@given(tensor_lists, st.randoms(use_true_random=False))
def test_weights_digest_does_not_depend_on_the_order_of_tensors(tensors: tuple[TensorSpec, ...], chance: Any) -> None:
    shuffled = list(tensors)
    chance.shuffle(shuffled)
    assert weights_digest(shuffled) == weights_digest(tensors)


@pytest.mark.parametrize("change", [{"name": "v"}, {"dtype": "F32"}, {"shape": (3, 2)}, {"state": "f" * 16}])
def test_weights_digest_depends_on_every_field(change: dict[str, Any]) -> None:
    tensor = {"name": "w", "dtype": "BF16", "shape": (2, 3), "state": StateDigest("0" * 16)}
    assert weights_digest([TensorSpec(**tensor)]) != weights_digest([TensorSpec(**{**tensor, **change})])


def test_manifest_whose_digest_does_not_follow_from_its_tensors_cannot_be_made() -> None:
    with pytest.raises(CorruptObject, match="weights_digest"):
        made(weights_digest=hexdigest("others"))


@pytest.mark.parametrize("fields", [{"base": None}, {"kind": Kind.FULL}])
def test_a_delta_has_a_base_and_a_full_version_none(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(**fields)
    assert refused.value.field == "base"


def test_ref_names_the_version() -> None:
    assert str(made().ref) == "a/weight_v000002"
    assert made().ref.policy == "p"


# --- malformed ---------------------------------------------------------------------------------------------------------------

NOT_TEXT = (None, 7, True, [], {})
NOT_COUNT = (None, -1, 1.5, "1", True, [])
NOT_HEX = (None, 7, "", "0" * 63, "G" * 64, "A" * 64, "0" * 64 + "\n")

AT = {
    "policy": NOT_TEXT,
    "run": NOT_TEXT,
    "number": NOT_COUNT,
    "epoch": NOT_COUNT[1:],
    "kind": (None, "partial", 1),
    "codec": (None, "zip", "changed-tensors/2"),
    "parent": NOT_COUNT[1:],
    "base": (3, "a/1", [], {}),
    "base.run": NOT_TEXT,
    "base.number": NOT_COUNT,
    "base.manifest": (None, "key", {}, []),
    "base.manifest.key": NOT_TEXT,
    "base.manifest.digest": NOT_HEX,
    "base.manifest.weights_digest": NOT_HEX,
    "tensors": (None, 3, "x", [3], [None], [[]], [{}]),
    "tensors.0.name": NOT_TEXT,
    "tensors.0.dtype": NOT_TEXT,
    "tensors.0.shape": (None, 3, "23", [-1], [1.0], [True], ["2"], [None]),
    "tensors.0.state": (None, 7, "", "0" * 17, "X" * 16, "0" * 64),
    "weights_digest": NOT_HEX,
    "weights": (None, 3, "x", [3], [{}]),
    "weights.0.path": (*NOT_TEXT, "", ".", "..", "../x", "a/../x", "/etc/x", "a//b", "a/", "./a", "a\\b", "a\0b"),
    "weights.0.key": NOT_TEXT,
    "weights.0.size": NOT_COUNT,
    "weights.0.blake3": NOT_HEX,
    "files": (None, 3, [None]),
    "files.0.path": ("../config.json", "/config.json"),
    "probes": (None, 3, [3], ["x"]),
    "metadata": (None, 3, "x", [1]),
    "format": (None, 0, 2, "1", []),
}


def put(raw: Any, place: str, value: object) -> None:
    *folders, last = place.split(".")
    for folder in folders:
        raw = raw[int(folder) if folder.isdigit() else folder]
    raw[last] = value


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in AT.items() for value in values])
def test_every_malformed_field_is_a_corrupt_object(place: str, value: object) -> None:
    with pytest.raises(CorruptObject):
        decode_manifest(broken(lambda raw: put(raw, place, value)))


@pytest.mark.parametrize("place", [place for place in AT if not place.endswith(".0")])
def test_every_missing_field_is_a_corrupt_object(place: str) -> None:
    def without(raw: Any) -> None:
        *folders, last = place.split(".")
        for folder in folders:
            raw = raw[int(folder) if folder.isdigit() else folder]
        del raw[last]

    with pytest.raises(CorruptObject):
        decode_manifest(broken(without))


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"3", b'"x"', b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format":1}', b"NaN"],
)
def test_what_is_no_manifest_at_all_is_a_corrupt_object(data: bytes) -> None:
    with pytest.raises(CorruptObject):
        decode_manifest(data)


@pytest.mark.parametrize("change", ["tensors", "weights", "files"])
def test_a_name_or_path_that_stands_twice_is_a_corrupt_object(change: str) -> None:
    with pytest.raises(CorruptObject, match="twice"):
        decode_manifest(broken(lambda raw: raw[change].append(raw[change][0])))


@pytest.mark.parametrize("change", [{"kind": "full"}, {"base": None}])
def test_kind_and_base_that_contradict_each_other_are_a_corrupt_object(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptObject):
        decode_manifest(broken(lambda raw: raw.update(change)))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("metadata", []),
        ("metadata", ""),
        ("metadata", [["step", 1]]),
        ("probes", {}),
        ("probes", ""),
        ("probes", [[["prompt", 1]]]),
        ("weights", {}),
        ("files", ""),
    ],
)
def test_a_container_of_another_kind_is_a_corrupt_object(place: str, value: object) -> None:
    with pytest.raises(CorruptObject):
        decode_manifest(broken(lambda raw: put(raw, place, value)))


def test_a_path_that_stands_in_weights_and_in_files_is_a_corrupt_object() -> None:
    with pytest.raises(CorruptObject):
        decode_manifest(broken(lambda raw: raw["files"].append(raw["weights"][0])))


def test_a_number_that_json_has_not_is_a_corrupt_object() -> None:
    with pytest.raises(CorruptObject):
        decode_manifest(json.dumps({**plain(), "metadata": {"loss": float("nan")}}).encode())


def test_a_newer_format_says_what_to_do() -> None:
    with pytest.raises(CorruptObject, match="upgrade"):
        decode_manifest(broken(lambda raw: raw.update(format=2)))


def test_lone_surrogates_and_numbers_beyond_json_are_corrupt() -> None:
    for place, value in (("tensors.0.name", "\ud800"), ("tensors.0.shape", [2**60])):
        with pytest.raises(CorruptObject):
            decode_manifest(broken(lambda raw, place=place, value=value: put(raw, place, value)))


@EXAMPLES
@given(st.data())
def test_any_value_in_any_place_is_a_manifest_or_a_corrupt_object(data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(sorted(set(AT))))
    value = data.draw(st.one_of(values, st.text(max_size=70)))
    try:
        decode_manifest(broken(lambda raw: put(raw, place, value)))
    except CorruptObject:
        return


# --- paths -------------------------------------------------------------------------------------------------------------------


@given(paths)
def test_relative_paths_pass(path: str) -> None:
    assert check_relative(path) == path


@pytest.mark.parametrize(
    "path", ["", ".", "..", "/", "/a", "a/..", "../a", "a/../b", "a/./b", "./a", "a//b", "a/", "\\a", "a\\..\\b", "a\0", "//a"]
)
def test_paths_that_leave_their_directory_or_have_another_form_are_refused(path: str) -> None:
    with pytest.raises(CorruptObject, match="leaves its directory"):
        check_relative(path)
