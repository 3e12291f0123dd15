"""`Publisher`: a trainer's way to publish versions, blocking, with every outcome known."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from stitch.core.errors import InvalidRequest, OutcomeUnknown, Unavailable
from stitch.core.ids import Digest, VersionRef
from stitch.log.port import EventLog
from stitch.store.port import BlobStore
from stitch.trainer.attempt import Attempt, Listener, Step, silent
from stitch.trainer.author import Author, Notes, Publication
from stitch.trainer.blobs import Blobs
from stitch.trainer.calls import Call, call_of, opening_of
from stitch.trainer.comms import SingleProcess, TrainerComms
from stitch.trainer.encoding import Encoder, Work
from stitch.trainer.lead import Done, Lead, Verdict
from stitch.trainer.opening import Begun, begin, claim
from stitch.trainer.parts import Part, Ready, Receipts, Share, Standing, Task
from stitch.trainer.portal import LoopThread, finish
from stitch.trainer.team import Outcome, Team, decided, outcome_of
from stitch.weights.previous import Previous, default_budget
from stitch.weights.tensors import Weights

PUBLISH_SECONDS: Final = 1800.0
"""Longer than the outages that people mend within a shift, shorter than a job's own patience."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """What rank 0 tells the others once its claim was accepted. `base`: the weights digest of the base checkpoint."""

    standing: Standing
    base: Digest | None


class Publisher:
    """Owns a policy until another publisher claims it. One call at a time; calls of other threads wait.

    Works inside a running event loop too, which it blocks while it waits. Close it, or use it as a context manager.

    With `comms` many ranks publish together: all of them open, publish and close at the same points, each with tensors of its own
    (or the same directory), and all return or raise the same. Only rank 0 speaks to the log.
    """

    def __init__(
        self,
        *,
        policy: str,
        run: str,
        team: Team,
        author: Author | None,
        standing: Standing,
        blobs: Blobs,
        encoder: Encoder,
        loop: LoopThread,
        resources: ExitStack,
        scratch: Path,
        progress: Listener,
    ) -> None:
        """Use `open`. `resources` are closed by `close`, the loop among them."""
        self.policy: Final = policy
        self.run: Final = run
        self._team, self._author, self._standing = team, author, standing
        self._blobs, self._encoder, self._loop, self._resources = blobs, encoder, loop, resources
        self._scratch, self._progress = scratch, progress
        self._turn = threading.Lock()
        self._in_flight: Future[Publication] | None = None
        self._follower = ThreadPoolExecutor(1, thread_name_prefix="stitch-follow")
        self._following: Future[None] | None = None
        self._undecided: _Undecided | None = None
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
        comms: TrainerComms | None = None,
        memory_budget: int | None = None,
        previous: str | os.PathLike[str] | None = None,
        keep_previous: bool = True,
    ) -> Self:
        """Claims the policy for the run, within `timeout` seconds. Opening takes over from whoever had the same run open.

        `boot_version` says which version to go on from: None for the run's tip, a number of the run (versions beyond it are
        abandoned), or the text `run/weight_v000007` of another run, which a new run takes as its own version 0. `base` is a
        checkpoint directory that a new run begins with, as version `boot_version` or 0. A log or store that is given as an
        object stays open; a log must not be in use by another event loop, unless it is a memory log.

        `scratch` is where versions are written before they are uploaded (default: the system's folder for such); a full
        version needs its own size there, and so do the bytes of the version before where memory does not take them. `progress`
        is told each step. `comms` joins the ranks of a trainer.

        The bytes of the version before are kept, so that the next one costs what changed: up to `memory_budget` bytes of them
        (default: a quarter of the machine's memory, divided by the ranks) in memory, more in a file in `scratch`; 0: always
        there. While the tip is `base`, that directory itself serves; so does `previous`, a checkpoint directory with the weights
        of the tip as it is at opening. Without room they are not kept, which a warning tells; `keep_previous=False` spares the work
        where only one version is published.

        Raises Fenced where another run owns the policy and `take_over` is not given, or the run was superseded;
        VersionConflict where boot version or base do not fit what was accepted; Unavailable or OutcomeUnknown at the
        deadline.
        """
        team = Team(SingleProcess() if comms is None else comms)
        attempt = Attempt(timeout, progress)

        def begun() -> Begun:
            opening = opening_of(policy, run, boot_version, base, take_over=take_over)
            return begin(opening, store, base, previous, scratch, undo, leads=team.leads)

        with ExitStack() as undo:
            loop = LoopThread()
            undo.callback(loop.close)
            mine = outcome_of(begun)
            author: Author | None = None

            async def lead(_: Sequence[bool]) -> _Opened:
                nonlocal author
                assert mine.value is not None
                author = await claim(mine.value, log, undo, loop, attempt)
                encoded = mine.value.base
                return _Opened(standing=author.standing(), base=None if encoded is None else encoded.weights_digest)

            opened = decided(loop, team, Outcome(value=mine.error is None, error=mine.error), lead)
            assert mine.value is not None
            folder = mine.value.folder
            held = Previous(folder / "previous", default_budget(team.size) if memory_budget is None else memory_budget)
            undo.callback(held.close)
            if previous is not None and mine.value.previous is not None:
                held.map_directory(Path(previous), mine.value.previous)
                if author is not None and author.tip_weights != held.digest:
                    _logger.warning(
                        "previous: %s does not hold the weights of %s, so it is of no use", previous, author.standing().head
                    )
            elif base is not None and opened.base is not None:
                held.map_directory(Path(base), opened.base)
            return cls(
                policy=mine.value.opening.policy,
                run=mine.value.opening.run,
                team=team,
                author=author,
                standing=opened.standing,
                blobs=mine.value.blobs,
                encoder=Encoder(
                    held,
                    Share(rank=team.rank, size=team.size),
                    mine.value.blobs.store,
                    folder,
                    None if base is None else Path(base),
                    keep=keep_previous,
                ),
                loop=loop,
                resources=undo.pop_all(),
                scratch=folder,
                progress=progress,
            )

    @property
    def writer(self) -> str:
        """What this publisher calls itself in the log."""
        return self._now().writer

    @property
    def epoch(self) -> int:
        """The count of accepted claims, with this publisher's own."""
        return self._now().epoch

    @property
    def head(self) -> VersionRef | None:
        """The policy's tip, as far as the log was read: at other ranks than 0, by the last publish."""
        return self._now().head

    @property
    def next_number(self) -> int:
        """One above the greatest number that was ever accepted in the run; 0 where none was."""
        return self._now().next_number

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
        held as a whole, or a checkpoint directory, also one of Slime or Miles that holds a delta. All tensors are given, changed
        or not; many ranks give each a part of them, and all the same directory, number and kind. `number` defaults to
        `next_number`, or to that of a delta directory; a number that was published with the same weights gives that publication.
        A directory's other files (configuration, tokenizer) go along; where there are none, those of the version before do.

        `kind`: "auto" makes a delta where a delta is smaller than a full version, save at every sixteenth version of a chain.

        Waits out a log or store that is away for up to `timeout` seconds. Raises Fenced where another writer claimed the
        policy, VersionConflict, Unavailable where nothing was appended in time, OutcomeUnknown where the version may still
        be accepted: then the next publish settles that first, and returns that very version if it was, provided that it is
        given the same weights and no other number.
        """
        future = self._begin(weights, number, kind, metadata, probes, timeout)
        # Other ranks wait for this one's part in it, whatever interrupts it.
        return finish(future) if self._team.size == 1 else future.result()

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

        Once this returns, tensors may be changed: what is published lies in the scratch folder. The files of a directory must
        stay.
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

    def _now(self) -> Standing:
        return self._standing if self._author is None else self._author.standing()

    def _close(self, *, abandon: bool) -> None:
        with self._turn:
            if self._closed:
                return
            if self._in_flight is not None:
                if abandon and self._team.size == 1:  # other ranks wait for this one's part in it
                    self._in_flight.cancel()
                concurrent.futures.wait([self._in_flight])
            self._closed = True
            self._follower.shutdown()
            self._resources.close()

    # --- one publish: what the caller waits for ---

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
        attempt = Attempt(timeout, self._progress)
        called = outcome_of(lambda: call_of(weights, number, kind, metadata, probes))
        with self._turn:
            if self._closed:
                raise InvalidRequest("publish: this publisher was closed")
            ready = outcome_of(lambda: self._ready(called, attempt))
            notes = Notes(metadata={}, probes=()) if called.value is None else called.value.notes
            lead = Lead(self._author, self._team.size, notes, attempt)
            task = decided(self._loop, self._team, ready, lead.prepare)
            assert called.value is not None
            self._settle_undecided(task)
            return self._make(called.value, task, lead, attempt)

    def _ready(self, called: Outcome[Call], attempt: Attempt) -> Ready:
        """Waits until this rank is free, and tells what it was called with."""
        self._wait_for_turn(attempt)
        call = called.get()
        previous, undecided = self._encoder.previous, self._undecided
        at_hand = (previous.digest, None if undecided is None else undecided.digest)
        return Ready(
            number=call.number,
            kind=call.kind,
            directory=isinstance(call.source.weights, Path),
            against=None if call.source.delta is None else call.source.delta.base_version,
            held=tuple(digest for digest in at_hand if digest is not None),
            doubted=previous.doubted,
        )

    def _wait_for_turn(self, attempt: Attempt) -> None:
        if self._in_flight is not None:
            # Ranks wait for each other's turn: its own deadline ends each of them.
            done, _ = concurrent.futures.wait([self._in_flight], attempt.remaining if self._team.size == 1 else None)
            if not done:
                raise Unavailable(
                    f"publish: the version before was still under way after {attempt.timeout:g} s; nothing was appended"
                )
        if self._following is not None:
            concurrent.futures.wait([self._following])

    def _make(self, call: Call, task: Task, lead: Lead, attempt: Attempt) -> Future[Publication]:
        folder = self._scratch / f"version-{uuid.uuid4().hex}"  # made where something is written to it
        try:
            work, verdict = self._encode(call, task, lead, attempt, folder)
            if isinstance(verdict, Done):
                work.drop()
                self._end(folder)
                return _done(verdict.publication)
            self._in_flight = self._loop.start(partial(self._finish, call, work, verdict.weights_digest, lead, attempt, folder))
        except BaseException:
            self._end(folder)
            raise
        return self._in_flight

    def _encode(self, call: Call, task: Task, lead: Lead, attempt: Attempt, folder: Path) -> tuple[Work, Verdict | Done]:
        full = False
        while True:
            made = outcome_of(partial(self._encode_once, call, task, attempt, folder, full=full))
            part: Outcome[Part] = Outcome(value=None if made.value is None else made.value[1], error=made.error)
            try:
                verdict = decided(self._loop, self._team, part, lead.judge)
            except BaseException:
                if made.value is not None:
                    made.value[0].drop()
                raise
            work, _ = made.get()
            if isinstance(verdict, Done) or not verdict.full:
                return work, verdict
            work.drop()
            self._blobs.drop()
            full = True

    def _encode_once(self, call: Call, task: Task, attempt: Attempt, folder: Path, *, full: bool) -> tuple[Work, Part]:
        def emit(path: Path) -> None:
            if task.ahead:
                self._blobs.begin(task.prefix, path)

        work = self._encoder.encode(call.source, task, folder, emit, attempt, full=full)
        attempt.report(Step.ENCODED)
        return work, work.part

    # --- the rest, in the loop ---

    async def _finish(self, call: Call, work: Work, digest: Digest, lead: Lead, attempt: Attempt, folder: Path) -> Publication:
        over = True
        try:
            uploaded = await self._upload(work, lead, attempt)
            done = await self._team.decide(uploaded, partial(lead.commit, call.directory), lost=OutcomeUnknown)
            self._standing = done.standing
            if not self._team.leads:
                attempt.report(Step.DONE)
            self._blobs.drop()  # no file is read any more
            over = False
            self._following = self._follower.submit(self._follow, _Undecided(work=work, digest=digest, folder=folder))
        except OutcomeUnknown:
            over = False
            self._undecided = _Undecided(work=work, digest=digest, folder=folder)
            raise
        else:
            return done.publication
        finally:
            # Not awaited: a cancelled task would be interrupted here.
            self._blobs.drop()
            if over:
                work.drop()
                shutil.rmtree(folder, ignore_errors=True)

    async def _upload(self, work: Work, lead: Lead, attempt: Attempt) -> Outcome[Receipts]:
        weights = work.encoded.weights
        try:
            files = await lead.carried(work.encoded.files) if self._team.leads else ()
            stored = await self._blobs.upload(work.task.prefix, (*weights, *files), attempt)
        except Exception as error:  # noqa: BLE001 # told to the other ranks, and raised by all
            return Outcome(error=error)
        return Outcome(value=Receipts(weights=stored[: len(weights)], files=stored[len(weights) :]))

    def _end(self, folder: Path) -> None:
        """No file is read any more. Blocks while a transfer ends."""
        self._blobs.drop()
        shutil.rmtree(folder, ignore_errors=True)

    # --- the bytes for the next version ---

    def _settle_undecided(self, task: Task) -> None:
        """What an earlier call left open is decided by now: its bytes are those of the tip, or of nothing."""
        undecided, self._undecided = self._undecided, None
        if undecided is None:
            return
        if undecided.digest == task.tip:
            self._follow(undecided)
        else:
            undecided.work.drop()
            shutil.rmtree(undecided.folder, ignore_errors=True)

    def _follow(self, accepted: _Undecided) -> None:
        """A version that cannot be followed costs a larger one next, and fails nobody."""
        try:
            self._encoder.follow(accepted.work, accepted.digest)
        except Exception as error:  # noqa: BLE001 # whatever it is, the version is published
            _logger.warning("the bytes of the version before are not at hand any more: %r", error)
            self._encoder.previous.forget()
        finally:
            shutil.rmtree(accepted.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Undecided:
    """A version's files, and the weights digest of all ranks' parts of it."""

    work: Work
    digest: Digest
    folder: Path


def _done(publication: Publication) -> Future[Publication]:
    future: Future[Publication] = Future()
    future.set_result(publication)
    return future


def _log_failure(future: Future[Publication]) -> None:
    """A trainer may never look at the future."""
    if not future.cancelled() and (error := future.exception()) is not None:
        _logger.error("publish_async: %s", error)
