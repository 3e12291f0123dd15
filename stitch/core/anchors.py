"""Where a chain of deltas should have a full form: for a trainer that publishes the next version, and for a compactor that adds
anchors to old ones. One rule for both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from stitch.core.events import RunVersion
from stitch.core.lineage import PolicyLineage, Version
from stitch.core.manifest import Kind

ANCHOR_EVERY: Final = 16
"""Versions in a chain, its full one included: a joiner never applies more than fifteen deltas."""
CHAIN_BYTES_RATIO: Final = 1.0
"""Deltas of a chain that together weigh more than this part of its full form cost a joiner more than a new one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorRule:
    """`every`: versions in a chain, its full one included. `ratio`: what its deltas may weigh, in parts of the full form."""

    every: int = ANCHOR_EVERY
    ratio: float = CHAIN_BYTES_RATIO

    def wants_after(self, policy: PolicyLineage, tip: RunVersion) -> bool:
        """Whether the version that is built on `tip` should be full."""
        *deltas, anchor = policy.chain(tip)
        return self._wants(deltas, _full_size(anchor))

    def overdue(self, policy: PolicyLineage) -> tuple[RunVersion, ...]:
        """The versions that should have been full, oldest first: of those that are living or named by a channel.

        Those that come first count as full for those that follow, so nothing is anchored twice. An alias is served by an
        anchor of the version whose bytes it is.
        """
        planned: set[RunVersion] = set()
        for ref in _looked_at(policy):
            version = source_of(policy, policy.versions[ref])
            if version.kind is Kind.FULL or version.anchor is not None or version.ref in planned:
                continue
            assert version.base is not None
            *below, bottom = policy.chain(version.base)
            deltas = takewhile(lambda link: link.ref not in planned, below)
            if self._wants(deltas, _full_size(bottom)):
                planned.add(version.ref)
        return tuple(sorted(planned, key=lambda ref: policy.versions[ref].position.offset))

    def _wants(self, chain: Iterable[Version], full_size: int) -> bool:
        """`full_size` is 0 where it is not known."""
        deltas = [version for version in chain if version.kind is Kind.DELTA and version.alias_of is None]
        too_heavy = full_size > 0 and sum(version.size for version in deltas) > self.ratio * full_size
        return len(deltas) + 1 >= self.every or too_heavy


def _full_size(version: Version) -> int:
    return version.anchor_size if version.anchor is not None else version.size


def _looked_at(policy: PolicyLineage) -> list[RunVersion]:
    """Oldest first, so that each chain is judged by the anchors planned below it."""
    living = {version.ref for version in policy.path(policy.tip) if policy.living(version.ref)}
    named = {channel.target for channel in policy.channels.values() if channel.target is not None}
    return sorted(living | named, key=lambda ref: (policy.versions[ref].position.offset, ref.run, ref.number))


def source_of(policy: PolicyLineage, version: Version) -> Version:
    """The version whose bytes an alias is; itself where it is none, or has a full form of its own."""
    while version.alias_of is not None and version.anchor is None:
        version = policy.versions[version.alias_of]
    return version
