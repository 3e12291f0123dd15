"""What a trainer calls `open` and `publish` with, checked before any work is done."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rfc8785

from stitch.core.errors import InvalidRequest
from stitch.core.events import RunVersion
from stitch.core.ids import PolicyId, RunId, VersionNumber, WriterId, parse_version, policy_id, run_id
from stitch.core.ids import version_number as checked_number
from stitch.core.manifest import Kind
from stitch.core.writer import Opening
from stitch.trainer.author import Notes
from stitch.trainer.encoding import Source, source_of
from stitch.weights.tensors import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Of `publish`. `kind` is None for auto; a delta directory's own number counts where none is given."""

    source: Source
    number: VersionNumber | None
    kind: Kind | None
    notes: Notes

    @property
    def directory(self) -> Path | None:
        """The checkpoint directory that was given."""
        weights = self.source.weights
        return weights if isinstance(weights, Path) and self.source.delta is None else None


def call_of(
    weights: Weights | str,
    number: int | None,
    kind: str,
    metadata: Mapping[str, Any] | None,
    probes: Sequence[Mapping[str, Any]],
) -> Call:
    """Raises InvalidRequest naming the argument, CorruptObject for a delta directory that is damaged."""
    wanted = None if number is None else checked_number(number, "number")
    form = _kind(kind)
    notes = _notes(metadata, probes)
    source = source_of(weights)
    if wanted is None and source.delta is not None:
        wanted = checked_number(source.delta.version, "number")
    return Call(source=source, number=wanted, kind=form, notes=notes)


def opening_of(policy: str, run: str, boot: int | str | None, base: str | os.PathLike[str] | None, *, take_over: bool) -> Opening:
    """What `open` is to claim, a base left out. Raises InvalidRequest naming the argument."""
    policy_name, run_name = policy_id(policy), run_id(run)
    number, alias = _boot(boot, policy_name, run_name)
    if alias is not None and base is not None:
        raise InvalidRequest(f"base: the run begins with {alias}; leave base or boot_version out", field="base")
    return Opening(policy=policy_name, run=run_name, writer=_new_writer(), boot=number, alias=alias, take_over=take_over)


def _boot(boot: int | str | None, policy: PolicyId, run: RunId) -> tuple[VersionNumber | None, RunVersion | None]:
    """A number of the run itself, or a version of another."""
    if not isinstance(boot, str):
        return None if boot is None else checked_number(boot, "boot_version"), None
    ref = parse_version(boot, policy)
    if ref.run == run:
        return ref.number, None
    return None, RunVersion(run=ref.run, number=ref.number)


def _new_writer() -> WriterId:
    """Unique to this life: a writer never mistakes what an earlier life of it sent for its own."""
    return WriterId(f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}")


def _kind(kind: str) -> Kind | None:
    """None for auto."""
    if kind not in ("auto", "full", "delta"):
        raise InvalidRequest(f"kind: {kind!r} is none of auto, full, delta", field="kind")
    return None if kind == "auto" else Kind(kind)


def _notes(metadata: Mapping[str, Any] | None, probes: Sequence[Mapping[str, Any]]) -> Notes:
    """Refused here rather than after the upload."""
    notes = Notes(metadata=dict(metadata or {}), probes=tuple(dict(probe) for probe in probes))
    for field, value in (("metadata", notes.metadata), ("probes", list(notes.probes))):
        try:
            rfc8785.dumps(value)
        except (rfc8785.CanonicalizationError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"{field}: not representable as JSON: {error}", field=field) from error
    return notes
