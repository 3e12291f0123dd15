"""The cheapest way to a version, against a search of all ways; broken chains are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.core.catchup import MAX_CHAIN, Plan, plan, stored_bytes
from stitch.core.errors import CorruptObject
from stitch.core.ids import Digest, Epoch, PolicyId, RunId, StateDigest, VersionNumber
from stitch.core.manifest import (
    BaseRef,
    Codec,
    Kind,
    Manifest,
    ManifestRef,
    StoredFile,
    TensorSpec,
    weights_digest,
)

pytestmark = pytest.mark.unit

POLICY, RUN = PolicyId("p"), RunId("r")


def version(number: int, size: int, base: Manifest | None, *, like: Manifest | None = None) -> Manifest:
    tensors = (TensorSpec(name="w", dtype="U8", shape=(1,), state=StateDigest(f"{number:016x}")),)
    if like is not None:
        tensors = like.tensors
    return Manifest(
        policy=POLICY,
        run=RUN,
        number=VersionNumber(number),
        epoch=Epoch(1),
        kind=Kind.FULL if base is None else Kind.DELTA,
        codec=Codec.SAFETENSORS if base is None else Codec.CHANGED_TENSORS,
        parent=None,
        base=None if base is None else BaseRef(run=RUN, number=base.number, manifest=ref_of(base)),
        tensors=tensors,
        weights_digest=weights_digest(tensors),
        weights=(StoredFile(path="f", key=f"k{number}", size=size, blake3=Digest("0" * 64)),),
    )


def ref_of(manifest: Manifest) -> ManifestRef:
    return ManifestRef(key=f"m{manifest.number}", digest=Digest("0" * 64), weights_digest=manifest.weights_digest)


def chain(*sizes: int) -> list[Manifest]:
    """An anchor (version 0) and deltas upon it."""
    versions: list[Manifest] = []
    for number, size in enumerate(sizes):
        versions.append(version(number, size, versions[-1] if versions else None))
    return versions


def resolver(versions: list[Manifest], seen: list[int] | None = None) -> Callable[[BaseRef], Manifest]:
    table = {manifest.number: manifest for manifest in versions}

    def resolve(base: BaseRef) -> Manifest:
        if seen is not None:
            seen.append(base.number)
        return table[base.number]

    return resolve


def numbers(found: Plan) -> tuple[int | None, list[int]]:
    return None if found.anchor is None else found.anchor.number, [delta.number for delta in found.deltas]


def test_from_the_anchor_where_nothing_is_at_hand() -> None:
    versions = chain(100, 3, 4)
    found = plan(versions[2], resolver(versions), local={})
    assert numbers(found) == (0, [1, 2])
    assert (found.cost, found.local, found.start) == (107, None, versions[0].weights_digest)


def test_from_a_buffer() -> None:
    versions = chain(100, 3, 4)
    found = plan(versions[2], resolver(versions), local={versions[1].weights_digest: 0})
    assert numbers(found) == (None, [2])
    assert (found.cost, found.local) == (4, versions[1].weights_digest)


def test_nothing_to_do() -> None:
    versions = chain(100, 3)
    seen: list[int] = []
    found = plan(versions[1], resolver(versions, seen), local={versions[1].weights_digest: 0})
    assert (numbers(found), found.cost, seen) == ((None, []), 0, [])


def test_looks_no_further_than_pays() -> None:
    versions = chain(100, 3, 3, 3, 3)
    seen: list[int] = []
    plan(versions[4], resolver(versions, seen), local={versions[3].weights_digest: 2})
    assert seen == [3]


def test_full_form_that_a_compactor_added() -> None:
    versions = chain(100, 30, 30, 30, 30)
    added = version(3, 90, None, like=versions[3])
    found = plan(versions[4], resolver(versions), local={}, anchors={added.weights_digest: added})
    assert numbers(found) == (3, [4])
    assert found.anchor is added
    dear = version(3, 900, None, like=versions[3])
    assert numbers(plan(versions[4], resolver(versions), local={}, anchors={dear.weights_digest: dear})) == (0, [1, 2, 3, 4])


def test_anchor_that_is_none_is_refused() -> None:
    versions = chain(100, 30)
    with pytest.raises(CorruptObject, match="not a full form"):
        plan(versions[1], resolver(versions), local={}, anchors={versions[1].weights_digest: versions[1]})
    with pytest.raises(CorruptObject, match="not a full form"):
        plan(versions[1], resolver(versions), local={}, anchors={versions[1].weights_digest: versions[0]})


def test_own_costs() -> None:
    """Deltas that are in a cache already make the longer way the cheaper one."""
    versions = chain(100, 30, 30)
    local = {versions[1].weights_digest: 12, versions[0].weights_digest: 0}
    assert numbers(plan(versions[2], resolver(versions), local=local)) == (None, [2])
    found = plan(versions[2], resolver(versions), local=local, cost=lambda m: 0 if m.number == 1 else stored_bytes(m))
    assert numbers(found) == (None, [1, 2])


def test_missing_link_is_named() -> None:
    versions = chain(100, 3, 4, 5)
    del versions[1]
    with pytest.raises(CorruptObject, match=r"r/weight_v000002: the manifest of its base r/weight_v000001 is missing"):
        plan(versions[-1], resolver(versions), local={})
    assert plan(versions[-1], resolver(versions), local={versions[1].weights_digest: 0}).cost == 5


def test_cycle_is_named() -> None:
    one, two, three = chain(100, 3, 4)
    one = replace(
        one,
        kind=Kind.DELTA,
        codec=Codec.CHANGED_TENSORS,
        base=BaseRef(run=RUN, number=VersionNumber(2), manifest=ref_of(three)),
    )
    with pytest.raises(CorruptObject, match="comes back to r/weight_v000002: a cycle"):
        plan(three, resolver([one, two, three]), local={})
    itself = replace(two, base=BaseRef(run=RUN, number=two.number, manifest=ref_of(two)))
    with pytest.raises(CorruptObject, match="comes back to r/weight_v000001: a cycle"):
        plan(itself, resolver([itself]), local={})


def test_length_is_bounded() -> None:
    versions = chain(1000, *[1] * (MAX_CHAIN + 1))
    assert len(plan(versions[MAX_CHAIN], resolver(versions), local={}).deltas) == MAX_CHAIN
    with pytest.raises(CorruptObject, match=rf"r/weight_v0+{MAX_CHAIN + 1}: .* more than {MAX_CHAIN} deltas"):
        plan(versions[MAX_CHAIN + 1], resolver(versions), local={})


def test_base_that_is_another() -> None:
    versions = chain(100, 3)
    with pytest.raises(CorruptObject, match=r"r/weight_v000001: its base .* other weights"):
        plan(versions[1], lambda base: version(0, 100, None, like=versions[1]), local={})


@given(data=st.data())
def test_no_way_is_cheaper(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    versions: list[Manifest] = []
    for number, size in enumerate(sizes):
        anchored = number == 0 or data.draw(st.integers(0, 3)) == 0
        versions.append(version(number, size, None if anchored else versions[-1]))
    which = st.sets(st.sampled_from(versions).map(lambda m: m.number))
    local = {versions[n].weights_digest: data.draw(st.integers(0, 20)) for n in sorted(data.draw(which))}
    added = {
        versions[n].weights_digest: version(100 + n, data.draw(st.integers(0, 40)), None, like=versions[n])
        for n in sorted(data.draw(which))
    }
    target = versions[-1]
    found = plan(target, resolver(versions), local=local, anchors=added)

    ways: list[tuple[int, int]] = []
    spent, steps = 0, 0
    for current in reversed(versions):
        digest = current.weights_digest
        starts = [local[digest]] if digest in local else []
        starts += [stored_bytes(added[digest])] if digest in added else []
        starts += [stored_bytes(current)] if current.base is None else []
        ways += [(spent + start, steps) for start in starts]
        if current.base is None:
            break
        spent, steps = spent + stored_bytes(current), steps + 1
    assert (found.cost, len(found.deltas)) == min(ways)

    # The plan says what it costs, begins at something offered, and each delta is upon what was there before.
    assert (found.local is None) != (found.anchor is None)
    start = local[found.local] if found.local is not None else stored_bytes(found.anchor) if found.anchor else 0
    assert found.cost == start + sum(map(stored_bytes, found.deltas))
    at = found.start
    for delta in found.deltas:
        assert delta.base is not None
        assert delta.base.manifest.weights_digest == at
        at = delta.weights_digest
    assert at == target.weights_digest


def test_a_chain_that_ends_behind_an_anchor_is_no_harm() -> None:
    """What an anchor made needless is retired and deleted: its manifest is missing, or the chain is longer than it may be."""
    versions = chain(100, 3, 4, 5)
    added = {versions[2].weights_digest: version(102, 90, None, like=versions[2])}
    for known in (versions[2:], versions[1:]):
        assert numbers(plan(versions[3], resolver(known), local={}, anchors=added)) == (102, [3])
    with pytest.raises(CorruptObject, match="r/weight_v000002: the manifest of its base r/weight_v000001 is missing"):
        plan(versions[3], resolver(versions[2:]), local={})
    long = chain(100, *[1] * (MAX_CHAIN + 10))
    local = {long[-2].weights_digest: 1_000}
    assert numbers(plan(long[-1], resolver(long), local=local)) == (None, [MAX_CHAIN + 10])
