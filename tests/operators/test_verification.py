"""`verify_versions` finds what is missing, of the wrong size, or wrong by a single bit, and says of which version and file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.core.errors import Unavailable
from stitch.core.events import RunVersion, VersionPublished
from stitch.core.ids import EventId, VersionNumber, WriterId
from stitch.core.manifest import Kind
from stitch.operators.verification import Checked, verify_versions
from stitch.operators.versions import unretired
from stitch.store.faulty import ALWAYS, Fault, FaultyStore
from stitch.store.faulty import Kind as Faulty
from stitch.store.memory import MemoryStore
from stitch.weights.staging import StagingCancelled
from tests.operators.published import POLICY, Published, line_of_four, model, stepped

pytestmark = pytest.mark.unit

MANY = 1 << 30


class Line:
    """Four versions of all forms, the third with an anchor besides."""

    def __init__(self) -> None:
        self.store = FaultyStore(MemoryStore())
        self.made, self.weights = line_of_four(self.store)
        self.made.anchor(2, self.weights[2])

    def verify(self, *numbers: int, deep: bool = True, chain: bool = True) -> tuple[Checked, ...]:
        asked = [self.made.version(number) for number in numbers] or unretired(self.made.policy)
        return verify_versions(self.store, self.made.policy, asked, deep=deep, chain=chain)

    def replace(self, key: str, data: bytes) -> None:
        self.store.delete(key)
        self.store.put(key, data)

    def flip(self, key: str, place: int) -> None:
        data = bytearray(self.store.get(key, limit=MANY))
        place %= 8 * len(data)
        data[place // 8] ^= 1 << place % 8
        self.replace(key, bytes(data))


def told(checked: Sequence[Checked]) -> dict[int, str]:
    """What is wrong, by number."""
    return {
        each.version.ref.number: "; ".join(f"{fault.file}: {fault.what}" if fault.file else fault.what for fault in each.faults)
        for each in checked
        if not each.ok
    }


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.mark.parametrize("deep", [False, True])
def test_what_is_sound_is_found_sound(line: Line, deep: bool) -> None:
    checked = line.verify(deep=deep)
    assert told(checked) == {}
    assert [each.version.ref.number for each in checked] == [0, 1, 2, 3]
    assert [each.tensors for each in checked] == ([6] * 4 if deep else [None] * 4)
    assert [each.objects for each in checked] == [2, 2, 3, 2], "the third has two forms, which share the carried file"


def test_a_deep_look_reads_every_object_from_the_store_and_a_shallow_one_none(line: Line) -> None:
    line.verify(deep=False)
    assert [key for call, key in line.store.calls if call == "download"] == []
    line.verify()
    read = {key for call, key in line.store.calls if call == "download"}
    assert read == {key for number in range(4) for key in line.made.keys(number) if not key.endswith(".json")}


def test_the_chain_ends_at_the_nearest_full_form(line: Line) -> None:
    checked = line.verify(3)
    assert [(each.version.ref.number, each.asked) for each in checked] == [(2, False), (3, True)]
    assert [(each.version.ref.number, each.asked) for each in line.verify(1)] == [(0, False), (1, True)]
    assert [each.version.ref.number for each in line.verify(1, chain=False)] == [1]


@cache
def places() -> list[tuple[int, str]]:
    line = Line()
    return [(number, key) for number in range(4) for key in line.made.keys(number)]


@settings(max_examples=40)
@given(st.data())
def test_any_flipped_bit_in_any_object_is_found(data: st.DataObject) -> None:
    number, key = data.draw(st.sampled_from(places()))
    line = Line()
    line.flip(key, data.draw(st.integers(0, 1 << 20)))
    faults = told(line.verify())
    assert number in faults
    assert "builds on" not in faults[number], faults
    assert min(faults) == number, "nothing older is blamed"
    if not key.endswith(".json"):
        assert key in faults[number]


def test_a_bit_flipped_in_the_chain_is_blamed_on_the_version_that_it_belongs_to(line: Line) -> None:
    key = line.made.manifest(0).weights[0].key
    line.flip(key, 12_345)
    faults = told(line.verify(1))
    assert faults[0].startswith("model.safetensors: object ")
    assert faults[1] == "builds on r1/weight_v000000, which is damaged"


def test_every_object_that_is_missing_is_told(line: Line) -> None:
    for file in (*line.made.manifest(1).weights, *line.made.manifest(1).files):
        line.store.delete(file.key)
    checked = line.verify(deep=False)
    assert [each.objects for each in checked] == [2, 2, 3, 2]
    faults = told(checked)
    assert "delta.safetensors: object " in faults[1]
    assert "config.json: object " in faults[1]
    assert faults[1].count("is missing") == 2
    assert faults.keys() == {1}, "the third has a full form of its own"


def test_what_is_left_of_a_damaged_version_is_read_all_the_same(line: Line) -> None:
    manifest = line.made.manifest(1)
    line.store.delete(manifest.files[0].key)
    line.flip(manifest.weights[0].key, 99)
    faults = told(line.verify(1))[1]
    assert "config.json: object " in faults
    assert "delta.safetensors: object " in faults


def test_a_wrong_size_is_found_without_reading(line: Line) -> None:
    file = line.made.manifest(3).weights[0]
    line.replace(file.key, b"short")
    assert told(line.verify(3, deep=False)) == {
        3: f"delta.safetensors: object {file.key} has 5 bytes, not {file.size}",
    }


def test_a_manifest_that_is_missing(line: Line) -> None:
    key = line.made.version(1).manifest.key
    line.store.delete(key)
    assert told(line.verify(1)) == {1: f"manifest {key} is missing"}


def test_a_version_with_a_full_form_needs_no_base(line: Line) -> None:
    keys = [key for number in (1, 0) for key in line.made.keys(number)]
    for number in (1, 0):
        line.made.retire(number)
    for key in keys:
        line.store.delete(key)
    assert told(line.verify(3)) == {}
    assert told(line.verify()) == {}


def test_an_anchor_is_looked_at_although_a_delta_would_do(line: Line) -> None:
    anchor = line.made.version(2).anchor
    assert anchor is not None
    line.store.delete(anchor.key)
    assert told(line.verify(2, deep=False)) == {2: f"manifest {anchor.key} is missing"}


def test_a_delta_that_is_intact_and_wrong_is_told_by_its_tensor() -> None:
    """The digest of the object is right; only the tensors tell."""
    store = MemoryStore()
    made = Published(store)
    old, other = model(), stepped(model(), seed=9)
    made.full(old)
    made.sparse(other, stepped(old, seed=1))
    (fault,) = told(verify_versions(store, made.policy, [made.version(1)], deep=True)).values()
    assert fault.startswith("cannot be brought: r1/weight_v000001: ")
    assert "tensor '" in fault


def test_a_log_that_names_another_versions_manifest(line: Line) -> None:
    policy = line.made.policy
    assert policy.head is not None
    assert policy.tip is not None
    other = line.made.version(0)
    line.made._decide(  # a bug of a writer
        VersionPublished(
            policy=POLICY,
            run=policy.tip.run,
            number=VersionNumber(4),
            event_id=EventId("wrong"),
            writer=WriterId("w"),
            epoch=policy.epoch,
            expected_head=policy.head,
            parent=policy.tip.number,
            kind=Kind.DELTA,
            base=policy.tip,
            manifest=other.manifest,
            size=1,
        )
    )
    (fault,) = told(line.verify(4, deep=False)).values()
    assert "describes r1/weight_v000000 of policy p, not r1/weight_v000004" in fault
    assert "is of kind full, the log says delta" in fault


def test_an_alias_is_its_source(line: Line) -> None:
    tip = RunVersion(run=line.made.version(3).ref.run, number=VersionNumber(3))
    line.made.claim("r2", alias=tip)
    checked = line.verify(0)
    assert told(checked) == {}
    assert [str(each.version.ref) for each in checked if each.asked] == ["r2/weight_v000000"]
    assert checked[-1].tensors == 6


def test_a_store_that_is_away_is_no_finding(line: Line) -> None:
    line.store.add(Fault(call="stat", kind=Faulty.FAIL_BEFORE, times=ALWAYS))
    with pytest.raises(Unavailable):
        line.verify(deep=False)


def test_it_ends_when_it_is_no_longer_wanted(line: Line, tmp_path: Path) -> None:
    told: list[str] = []
    asked = unretired(line.made.policy)
    with pytest.raises(StagingCancelled):
        verify_versions(
            line.store,
            line.made.policy,
            asked,
            deep=True,
            scratch=tmp_path / "s",
            tell=told.append,
            cancelled=lambda: any("r1/weight_v000001" in what for what in told),
        )
    assert list((tmp_path / "s").iterdir()) == [], "the scratch folder goes with it"
