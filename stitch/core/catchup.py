"""The cheapest way to a version's weights: from what is on the spot, or from an anchor, by deltas.

Pure: manifests come from a function that the caller gives, sizes from another. A walk goes from the target back through its
bases and stops as soon as nothing further back can be cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from stitch.core.errors import CorruptObject
from stitch.core.ids import Digest
from stitch.core.manifest import BaseRef, Kind, Manifest

MAX_CHAIN: Final = 128
"""Deltas from an anchor to a version that depends on it. Writers anchor far earlier; a longer chain is a mistake."""

_Visit = tuple[str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Start from `local` weights (told by their digest) or load `anchor`; then apply `deltas`, oldest first.

    Exactly one of the two starts is set. `at` is a version with the weights that the deltas begin at, whichever start that is.
    `cost` is in the caller's units.
    """

    local: Digest | None
    anchor: Manifest | None
    at: Manifest
    deltas: tuple[Manifest, ...]
    cost: int

    @property
    def start(self) -> Digest:
        """The weights digest that the deltas begin at."""
        return self.at.weights_digest


class _DeadEnd(CorruptObject):
    """The chain cannot be followed further, which is no harm where a start was found before."""


def stored_bytes(manifest: Manifest) -> int:
    """Bytes of the version's weight files in the store."""
    return sum(file.size for file in manifest.weights)


def plan(
    target: Manifest,
    resolve: Callable[[BaseRef], Manifest],
    *,
    local: Mapping[Digest, int],
    anchors: Mapping[Digest, Manifest] | None = None,
    cost: Callable[[Manifest], int] = stored_bytes,
) -> Plan:
    """The plan of least cost, of several the one with the fewest deltas.

    `resolve` reads a base's manifest (KeyError: it is missing). `local` holds weights digests that are at hand and what
    starting from each costs. `anchors` are further full forms of versions, by weights digest. `cost` is what fetching a
    version's own weight files costs, never negative. Where the chain cannot be followed further (a manifest is missing, or it is
    longer than MAX_CHAIN) the best of what was found counts. Raises CorruptObject naming the version where nothing was found by
    then, and where a link is not what its reference says or the chain is a cycle.
    """
    anchors = anchors or {}
    best: Plan | None = None
    deltas: tuple[Manifest, ...] = ()
    spent = 0
    current = target
    visited: set[_Visit] = set()
    while True:
        visited.add(_visit(current))
        found = _start_at(current, local, anchors, cost)
        if found is not None and (best is None or found.cost + spent < best.cost):
            best = replace(found, deltas=deltas, cost=found.cost + spent)
        if current.base is None:
            break
        spent += cost(current)
        if best is not None and spent >= best.cost:
            break
        deltas = (current, *deltas)
        try:
            _check_length(target, deltas)
            current = _follow(current, current.base, resolve)
        except _DeadEnd:
            if best is None:
                raise
            break  # behind an anchor older versions are retired, and their manifests go
        if _visit(current) in visited:
            raise CorruptObject(f"{target.ref}: its chain comes back to {current.ref}: a cycle")
    assert best is not None  # a chain ends at a full version only, and that is a start
    return best


def _start_at(
    version: Manifest, local: Mapping[Digest, int], anchors: Mapping[Digest, Manifest], cost: Callable[[Manifest], int]
) -> Plan | None:
    """The cheapest start at exactly this version."""
    starts: list[Plan] = []
    digest = version.weights_digest
    if digest in local:
        starts.append(Plan(local=digest, anchor=None, at=version, deltas=(), cost=local[digest]))
    if version.kind is Kind.FULL:
        starts.append(Plan(local=None, anchor=version, at=version, deltas=(), cost=cost(version)))
    anchor = anchors.get(digest)
    if anchor is not None:
        if anchor.kind is not Kind.FULL or anchor.weights_digest != digest:
            raise CorruptObject(f"{version.ref}: the anchor {anchor.ref} given for it is not a full form of it")
        starts.append(Plan(local=None, anchor=anchor, at=anchor, deltas=(), cost=cost(anchor)))
    return min(starts, key=lambda start: start.cost, default=None)


def _check_length(target: Manifest, deltas: tuple[Manifest, ...]) -> None:
    if len(deltas) > MAX_CHAIN:
        raise _DeadEnd(f"{target.ref}: its chain has more than {MAX_CHAIN} deltas; {deltas[0].ref} is not the last")


def _follow(version: Manifest, base: BaseRef, resolve: Callable[[BaseRef], Manifest]) -> Manifest:
    try:
        manifest = resolve(base)
    except KeyError:
        raise _DeadEnd(
            f"{version.ref}: the manifest of its base {base.run}/weight_v{base.number:06d} is missing ({base.manifest.key})"
        ) from None
    if manifest.weights_digest != base.manifest.weights_digest:
        raise CorruptObject(f"{version.ref}: its base {manifest.ref} holds other weights than it was made against")
    return manifest


def _visit(manifest: Manifest) -> _Visit:
    return (manifest.policy, manifest.run, manifest.number)
