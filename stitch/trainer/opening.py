"""What a publisher is made of, and rank 0's claim."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from stitch.core.ids import Digest, VersionNumber
from stitch.core.manifest import ManifestRef, weights_digest
from stitch.core.writer import BaseOffer, Opening
from stitch.log.opening import open_log
from stitch.log.port import EventLog
from stitch.store.opening import open_store
from stitch.store.port import BlobStore
from stitch.store.scratch import scratch_folder
from stitch.trainer.attempt import Attempt
from stitch.trainer.author import Author
from stitch.trainer.blobs import Blobs
from stitch.trainer.decisions import Decisions
from stitch.trainer.portal import LoopThread
from stitch.weights.encode import Encoded, digest_all, encode_full, weight_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """One rank, before anything was claimed. `base` is encoded at rank 0 alone; `previous`: the weights digest of a directory."""

    opening: Opening
    folder: Path
    blobs: Blobs
    base: Encoded | None
    previous: Digest | None


def begin(
    opening: Opening,
    store: str | BlobStore,
    base: str | os.PathLike[str] | None,
    previous: str | os.PathLike[str] | None,
    scratch: str | os.PathLike[str] | None,
    undo: ExitStack,
    *,
    leads: bool,
) -> Begun:
    """Opens the store and makes the scratch folder, and leaves it to `undo` to end them. Raises what a directory is refused for."""
    folder = undo.enter_context(scratch_folder("publish", scratch))
    blobs_store = open_store(store) if isinstance(store, str) else store
    if isinstance(store, str):
        undo.callback(blobs_store.close)
    blobs = Blobs(blobs_store, folder / "carried")
    undo.callback(blobs.close)
    encoded = None
    if base is not None and leads:
        encoded = encode_full(Path(base), folder / "base")
        opening = _with_base(opening, encoded)
    elif base is not None:
        weight_files(Path(base))
    held = None if previous is None else weights_digest(digest_all(Path(previous)))
    return Begun(opening=opening, folder=folder, blobs=blobs, base=encoded, previous=held)


async def claim(begun: Begun, log: str | EventLog, undo: ExitStack, loop: LoopThread, attempt: Attempt) -> Author:
    """Everything that belongs to the loop. What is to be closed in it is left to `undo`, which runs outside."""
    opening = begun.opening
    event_log = open_log(log) if isinstance(log, str) else log
    if isinstance(log, str):
        undo.callback(loop.call, event_log.aclose)
    decisions = Decisions(event_log, opening.policy, source=f"/stitch/trainer/{opening.writer}")
    undo.callback(loop.call, decisions.aclose)
    await attempt.until_available(lambda: event_log.setup(create=event_log.embedded))
    decisions.start()
    author = Author(decisions, begun.blobs, opening.policy, opening.run, opening.writer)
    await author.open(opening, begun.base, attempt)
    return author


def _with_base(opening: Opening, encoded: Encoded) -> Opening:
    """The base by its weights alone, which is all that a run with versions looks at; for a new run it is uploaded first."""
    number = VersionNumber(0) if opening.boot is None else opening.boot
    manifest = ManifestRef(key="", digest=Digest(""), weights_digest=encoded.weights_digest)
    return replace(opening, base=BaseOffer(number=number, manifest=manifest))
