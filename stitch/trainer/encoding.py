"""Whether a version becomes a delta or a full checkpoint, and its files on the local disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.core.events import RunVersion
from stitch.core.lineage import PolicyLineage
from stitch.core.manifest import Kind, Manifest
from stitch.weights.encode import Encoded, encode_delta, encode_full
from stitch.weights.tensors import Weights

ANCHOR_EVERY: Final = 16
"""Versions in a chain, its full one included: a joiner never applies more than fifteen deltas."""
CHAIN_BYTES_RATIO: Final = 1.0
"""Deltas of a chain that together weigh more than this part of its full form cost a joiner more than a new one does."""


def wants_full(policy: PolicyLineage, tip: RunVersion) -> bool:
    """Whether the version after `tip` should be an anchor."""
    *deltas, anchor = policy.chain(tip)
    deltas = [version for version in deltas if version.kind is Kind.DELTA and version.alias_of is None]
    full_size = anchor.anchor_size if anchor.anchor is not None else anchor.size
    too_heavy = full_size > 0 and sum(version.size for version in deltas) > CHAIN_BYTES_RATIO * full_size
    return len(deltas) + 1 >= ANCHOR_EVERY or too_heavy


def encode(weights: Weights, base: Manifest | None, scratch: Path, *, strict: bool) -> Encoded:
    """The files of a version, in the empty folder `scratch` (a directory's own full ones stay where they are).

    Against `base` they are a delta; one that holds every tensor is given as the full checkpoint that it is. Where the form
    of the weights is not the base's they become a full checkpoint, unless `strict` forbids or they can be read only once.
    """
    if base is None:
        return encode_full(weights, scratch)
    try:
        encoded = encode_delta(weights, base.tensors, scratch / "delta")
    except InvalidRequest:
        if strict or not isinstance(weights, Mapping | Path):
            raise
        return encode_full(weights, scratch / "full")
    return encoded.as_full() if encoded.complete and not strict else encoded
