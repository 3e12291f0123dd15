"""Rank 0's side of one publish: what the ranks bring, made into a task, a verdict, and in the end a publication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stitch.core.ids import Digest
from stitch.core.manifest import Kind, TensorSpec
from stitch.trainer.attempt import Attempt
from stitch.trainer.author import Author, Notes, Plan, Publication
from stitch.trainer.parts import Content, Form, Part, Ready, Receipts, Standing, Task, agreed, files_of, merged
from stitch.weights.encode import LocalFile, weight_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What all ranks' tensors are together. `full`: a full version would be no larger, so make that of them."""

    weights_digest: Digest
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An accepted version, and where the publisher stands since."""

    publication: Publication
    standing: Standing


class Lead:
    """Of one publish. The methods are called in their order, `judge` again where its verdict was to make a full version; at other
    ranks, which have no author, they never are."""

    def __init__(self, author: Author | None, ranks: int, notes: Notes, attempt: Attempt) -> None:
        self._author, self._ranks, self._notes, self._attempt = author, ranks, notes, attempt
        self._ready: Ready | None = None
        self._plan: Plan | None = None
        self._content: Content | None = None

    @property
    def author(self) -> Author:
        assert self._author is not None
        return self._author

    @property
    def plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    async def prepare(self, readies: Sequence[Ready]) -> Task:
        """Raises Fenced, VersionConflict and InvalidRequest before any rank begins."""
        ready = self._ready = replace(agreed(readies), doubted=any(other.doubted for other in readies))
        plan = self._plan = await self.author.prepare(ready, self._attempt)
        manifest = plan.base_manifest
        return Task(
            prefix=self.author.prefix(plan),
            form=self._form(plan, readies),
            base=() if manifest is None else manifest.tensors,
            base_ref=None if plan.base is None else plan.base.ref.of(self.author.policy),
            base_manifest=None if plan.base is None else plan.base.manifest,
            anchors=self.author.anchors(plan),
            tip=self.author.tip_weights,
            strict=ready.kind is Kind.DELTA,
            ahead=plan.retried is None and not plan.settled,
            keep=ready.kind is not Kind.FULL or any(other.held for other in readies),
        )

    async def judge(self, parts: Sequence[Part]) -> Verdict | Done:
        """What all parts together are. Raises InvalidRequest where they do not fit together, Fenced, VersionConflict."""
        assert self._ready is not None
        content = self._content = merged(parts, wanted=self._wanted(), strict=self._ready.kind is Kind.DELTA)
        present = self.author.present(self.plan, content.weights_digest)
        if present is not None:
            return Done(publication=present, standing=self.author.standing())
        return Verdict(weights_digest=content.weights_digest, full=content.worth_full)

    async def carried(self, given: tuple[LocalFile, ...]) -> tuple[LocalFile, ...]:
        """What is uploaded beside the weights."""
        return await self.author.carried(self.plan, given, self._attempt)

    async def commit(self, directory: Path | None, receipts: Sequence[Receipts]) -> Done:
        """All is uploaded: describes and decides. `directory`: the checkpoint directory that was given."""
        assert self._content is not None
        shared = directory if self._ranks > 1 else None
        stored = files_of(self._content, receipts, None if shared is None else weight_files(shared))
        publication = await self.author.commit(self.plan, self._content, stored, self._notes, self._attempt)
        return Done(publication=publication, standing=self.author.standing())

    def _form(self, plan: Plan, readies: Sequence[Ready]) -> Form:
        if plan.settled:
            return Form.DIGEST
        if plan.full:
            return Form.FULL
        assert plan.base is not None
        digest = plan.base.manifest.weights_digest
        at_hand = all(digest in ready.held or ready.against is not None for ready in readies)
        return Form.SPARSE if at_hand else Form.CHANGED

    def _wanted(self) -> Sequence[TensorSpec]:
        """Tensors that must be among those given. One process may change a model's form as it likes, and so may a directory, which
        is the same at all ranks; where ranks together give less than before, one of them more likely forgot some."""
        assert self._ready is not None
        manifest = self.plan.tip_manifest
        if manifest is None or self._ranks == 1 or self._ready.directory or self._ready.kind is Kind.FULL:
            return ()
        return manifest.tensors
