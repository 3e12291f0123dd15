"""`Publisher`: a trainer's way to publish versions, blocking, with every outcome known."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import shutil
import socket
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import rfc8785

from stitch.core.errors import InvalidRequest, Unavailable
from stitch.core.events import RunVersion
from stitch.core.ids import Digest, PolicyId, RunId, VersionNumber, VersionRef, WriterId, parse_version, policy_id, run_id
from stitch.core.ids import version_number as checked_number
from stitch.core.manifest import Kind, ManifestRef
from stitch.core.writer import BaseOffer, Opening
from stitch.log.opening import open_log
from stitch.log.port import EventLog
from stitch.store.opening import open_store
from stitch.store.port import BlobStore
from stitch.trainer.attempt import Attempt, Listener, silent
from stitch.trainer.author import Author, Notes, Plan, Publication, next_number
from stitch.trainer.blobs import Blobs
from stitch.trainer.decisions import Decisions
from stitch.trainer.encoding import encode
from stitch.trainer.portal import LoopThread, finish
from stitch.weights.encode import Encoded, directory_files, encode_full
from stitch.weights.tensors import Weights

PUBLISH_SECONDS: Final = 1800.0
"""Longer than the outages that people mend within a shift, shorter than a job's own patience."""
_logger = logging.getLogger(__name__)


class Publisher:
    """Owns a policy until another publisher claims it. One call at a time; calls of other threads wait.

    Works inside a running event loop too, which it blocks while it waits. Close it, or use it as a context manager.
    """

    def __init__(self, author: Author, loop: LoopThread, resources: ExitStack, scratch: Path, progress: Listener) -> None:
        """Use `open`. `resources` are closed by `close`, the loop among them."""
        self._author, self._loop, self._resources = author, loop, resources
        self._scratch, self._progress = scratch, progress
        self._turn = threading.Lock()
        self._in_flight: Future[Publication] | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        *,
        policy: str,
        run: str,
        log: str | EventLog,
        store: str | BlobStore,
        boot_version: int | str | None = None,
        base: str | os.PathLike[str] | None = None,
        take_over: bool = False,
        timeout: float = PUBLISH_SECONDS,
        progress: Listener = silent,
        scratch: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Claims the policy for the run, within `timeout` seconds. Opening takes over from whoever had the same run open.

        `boot_version` says which version to go on from: None for the run's tip, a number of the run (versions beyond it are
        abandoned), or the text `run/weight_v000007` of another run, which a new run takes as its own version 0. `base` is a
        checkpoint directory that a new run begins with, as version `boot_version` or 0. A log or store that is given as an
        object stays open; a log must not be in use by another event loop, unless it is a memory log.

        `scratch` is where versions are written before they are uploaded (default: the system's folder for such); a full
        version needs its own size there. `progress` is told each step.

        Raises Fenced where another run owns the policy and `take_over` is not given, or the run was superseded;
        VersionConflict where boot version or base do not fit what was accepted; Unavailable or OutcomeUnknown at the
        deadline.
        """
        opening = _opening(policy, run, boot_version, base, take_over=take_over)
        attempt = Attempt(timeout, progress)
        with ExitStack() as undo:
            folder = Path(undo.enter_context(_scratch(scratch)))
            blobs_store = open_store(store) if isinstance(store, str) else store
            if isinstance(store, str):
                undo.callback(blobs_store.close)
            loop = LoopThread()
            undo.callback(loop.close)
            blobs = Blobs(blobs_store, folder / "carried")
            undo.callback(blobs.close)
            encoded = None
            if base is not None:
                encoded = encode_full(Path(base), folder / "base")
                opening = _with_base(opening, encoded)
            author = loop.call(partial(_opened, opening, encoded, log, blobs, undo, loop, attempt))
            return cls(author, loop, undo.pop_all(), folder, progress)

    @property
    def policy(self) -> str:
        return self._author.policy

    @property
    def run(self) -> str:
        return self._author.run

    @property
    def writer(self) -> str:
        """What this publisher calls itself in the log."""
        return self._author.writer

    @property
    def epoch(self) -> int:
        """The count of accepted claims, with this publisher's own."""
        return self._author.session.epoch

    @property
    def head(self) -> VersionRef | None:
        """The policy's tip, as far as the log was read."""
        tip = self._author.lineage.tip
        return None if tip is None else tip.of(self._author.policy)

    @property
    def next_number(self) -> int:
        """One above the greatest number that was ever accepted in the run; 0 where none was."""
        return next_number(self._author.lineage, self._author.run)

    def publish(
        self,
        weights: Weights | str,
        number: int | None = None,
        kind: Literal["auto", "full", "delta"] = "auto",
        metadata: Mapping[str, Any] | None = None,
        probes: Sequence[Mapping[str, Any]] = (),
        timeout: float = PUBLISH_SECONDS,
    ) -> Publication:
        """Makes a version of the weights. On return it is durable and accepted.

        `weights`: a mapping of names to numpy arrays or torch tensors, an iterable of such pairs, which is read once and never
        held as a whole, or a checkpoint directory. All tensors are given, changed or not. `number` defaults to `next_number`;
        a number that was published with the same weights gives that publication. A directory's other files (configuration,
        tokenizer) go along; where there are none, those of the version before do.

        Waits out a log or store that is away for up to `timeout` seconds. Raises Fenced where another writer claimed the
        policy, VersionConflict, Unavailable where nothing was appended in time, OutcomeUnknown where the version may still
        be accepted: then the next publish settles that first, and returns that very version if it was, provided that it is
        given the same weights and no other number.
        """
        return finish(self._begin(weights, number, kind, metadata, probes, timeout))

    def publish_async(
        self,
        weights: Weights | str,
        number: int | None = None,
        kind: Literal["auto", "full", "delta"] = "auto",
        metadata: Mapping[str, Any] | None = None,
        probes: Sequence[Mapping[str, Any]] = (),
        timeout: float = PUBLISH_SECONDS,
    ) -> Future[Publication]:
        """As `publish`, but uploads and decides in the background. At most one is under way; the next call waits for it.

        Once this returns, tensors may be changed: they were copied to the scratch folder. The files of a directory must stay.
        """
        future = self._begin(weights, number, kind, metadata, probes, timeout)
        future.add_done_callback(_log_failure)
        return future

    def close(self) -> None:
        """Waits for what is under way, and ends every thread. May be called twice."""
        self._close(abandon=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(abandon=error is not None)

    def _close(self, *, abandon: bool) -> None:
        with self._turn:
            if self._closed:
                return
            if self._in_flight is not None:
                if abandon:
                    self._in_flight.cancel()
                concurrent.futures.wait([self._in_flight])
            self._closed = True
            self._resources.close()

    def _begin(
        self,
        weights: Weights | str,
        number: int | None,
        kind: str,
        metadata: Mapping[str, Any] | None,
        probes: Sequence[Mapping[str, Any]],
        timeout: float,
    ) -> Future[Publication]:
        """Plans, encodes in the caller's own thread (where its tensors live), and starts the rest."""
        wanted = None if number is None else checked_number(number, "number")
        form = _kind(kind)
        notes = _notes(metadata, probes)
        given = Path(weights) if isinstance(weights, str | os.PathLike) else weights
        attempt = Attempt(timeout, self._progress)
        with self._turn:
            self._wait_for_turn(attempt)
            plan = self._loop.call(partial(self._author.prepare, wanted, form, attempt))
            folder = Path(tempfile.mkdtemp(prefix="version-", dir=self._scratch))
            try:
                base = None if plan.full else plan.tip_manifest
                if isinstance(given, Path):
                    self._author.begin_upload(plan, directory_files(given))
                encoded = encode(given, base, folder, strict=form is Kind.DELTA)
                self._in_flight = self._loop.start(partial(self._commit, plan, encoded, notes, attempt, folder))
            except BaseException:
                self._author.end_upload()
                shutil.rmtree(folder)
                raise
            return self._in_flight

    def _wait_for_turn(self, attempt: Attempt) -> None:
        if self._closed:
            raise InvalidRequest("publish: this publisher was closed")
        if self._in_flight is None:
            return
        done, _ = concurrent.futures.wait([self._in_flight], attempt.remaining)
        if not done:
            raise Unavailable(f"publish: the version before was still under way after {attempt.timeout:g} s; nothing was appended")

    async def _commit(self, plan: Plan, encoded: Encoded, notes: Notes, attempt: Attempt, folder: Path) -> Publication:
        try:
            return await self._author.commit(plan, encoded, notes, attempt)
        finally:
            # Not awaited: a cancelled task would be interrupted here.
            self._author.end_upload()
            shutil.rmtree(folder)


async def _opened(
    opening: Opening, base: Encoded | None, log: str | EventLog, blobs: Blobs, undo: ExitStack, loop: LoopThread, attempt: Attempt
) -> Author:
    """Everything that belongs to the loop. What is to be closed in it is left to `undo`, which runs outside."""
    event_log = open_log(log) if isinstance(log, str) else log
    if isinstance(log, str):
        undo.callback(loop.call, event_log.aclose)
    decisions = Decisions(event_log, opening.policy, source=f"/stitch/trainer/{opening.writer}")
    undo.callback(loop.call, decisions.aclose)
    await attempt.until_available(lambda: event_log.setup(create=event_log.embedded))
    decisions.start()
    author = Author(decisions, blobs, opening.policy, opening.run, opening.writer)
    await author.open(opening, base, attempt)
    return author


def _opening(policy: str, run: str, boot: int | str | None, base: str | os.PathLike[str] | None, *, take_over: bool) -> Opening:
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


def _with_base(opening: Opening, encoded: Encoded) -> Opening:
    """The base by its weights alone, which is all that a run with versions looks at; for a new run it is uploaded first."""
    number = VersionNumber(0) if opening.boot is None else opening.boot
    manifest = ManifestRef(key="", digest=Digest(""), weights_digest=encoded.weights_digest)
    return Opening(
        policy=opening.policy,
        run=opening.run,
        writer=opening.writer,
        boot=opening.boot,
        base=BaseOffer(number=number, manifest=manifest),
        take_over=opening.take_over,
    )


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


def _scratch(parent: str | os.PathLike[str] | None) -> tempfile.TemporaryDirectory[str]:
    if parent is not None:
        Path(parent).mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="stitch-publish-", dir=parent)


def _log_failure(future: Future[Publication]) -> None:
    """A trainer may never look at the future."""
    if not future.cancelled() and (error := future.exception()) is not None:
        _logger.error("publish_async: %s", error)
