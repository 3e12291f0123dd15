"""Building a version in a buffer: what it starts from brought there, deltas applied, and all of it held against the manifest."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.core.catchup import Plan
from stitch.core.errors import CorruptObject
from stitch.core.ids import Digest, VersionRef
from stitch.core.manifest import Manifest
from stitch.weights.apply import Chain, Delta
from stitch.weights.buffers import Buffer, header_digest
from stitch.weights.fetch import Fetcher
from stitch.weights.files import copy_file
from stitch.weights.origins import LocalBase, merge
from stitch.weights.parallel import Check, default_threads
from stitch.weights.shelf import Shelf
from stitch.weights.verify import Verify, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Weights at hand: in a buffer, or in the local base directory (None)."""

    buffer: Buffer | None
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A plan, the buffer that it is carried out in, and where its local start lies (None: it starts from an anchor)."""

    plan: Plan
    buffer: Buffer
    origin: Origin | None

    @property
    def in_place(self) -> bool:
        return self.origin is not None and self.origin.buffer is self.buffer

    @property
    def versions(self) -> tuple[Manifest, ...]:
        """Those whose weight files are read."""
        return (self.plan.anchor, *self.plan.deltas) if self.plan.anchor is not None else self.plan.deltas


class LocalDamage(CorruptObject):
    """What lies here is not what it was taken for; it is out of the way now, and a version can be had from elsewhere."""


class Builder:
    """Builds in one of the shelf's buffers at a time. `memory_budget`: see Staging."""

    def __init__(
        self, shelf: Shelf, fetcher: Fetcher, base: LocalBase | None, *, verify: Verify, memory_budget: int | None
    ) -> None:
        self.threads = default_threads()
        self._shelf, self._fetcher, self._base = shelf, fetcher, base
        self._verify, self._memory_budget = verify, memory_budget

    def extra_bytes(self, work: Work) -> int:
        """What the disk must hold for a while beside downloads and the buffers as they are."""
        if work.plan.anchor is not None:
            # A single file becomes the buffer itself; of several, one at a time is there twice.
            sizes = [file.size for file in work.plan.anchor.weights]
            return max(sizes) if len(sizes) > 1 else 0
        if work.in_place or work.origin is None:
            return 0
        if work.origin.buffer is not None:
            return work.origin.buffer.size
        return 0 if self._base is None else self._base.size

    def build(self, target: VersionRef, manifest: Manifest, work: Work, check: Check) -> None:
        buffer = work.buffer
        trusted = work.in_place and buffer.trusted
        whole = self._verify is Verify.FULL or not trusted
        check()
        deltas = [Delta(manifest=m, files=[self._fetcher.cached(file) for file in m.weights]) for m in work.plan.deltas]
        with Chain(work.plan.at.tensors, deltas, source=str(target)) as chain:
            header = self._begin(target, work, chain, check)
            try:
                chain.apply(buffer.weights, check, threads=self._decoders(chain), unread=whole)
                if whole:
                    verify(buffer.weights, manifest.tensors, str(target), check, threads=self.threads)
            except CorruptObject as error:
                self._blame(work, trusted, error, check)
                raise
        check()
        buffer.mark_clean(str(target), manifest.weights_digest, manifest.tensors, header)
        if self._shelf.single:
            self._fetcher.evict_weights(())  # no second buffer has use for them

    def _decoders(self, chain: Chain) -> int:
        if self._memory_budget is None or not chain.thread_bytes:
            return self.threads
        return max(1, min(self.threads, self._memory_budget // chain.thread_bytes))

    def _begin(self, target: VersionRef, work: Work, chain: Chain, check: Check) -> Digest:
        """Brings into the buffer what the deltas are applied to, and marks it dirty. Returns the digest of the file's header."""
        buffer, origin = work.buffer, work.origin
        if origin is not None and origin.buffer is not None:
            try:
                header = origin.buffer.check_header()
                chain.check(origin.buffer.weights)
            except CorruptObject as error:
                self._shelf.give_up(origin.buffer, error)
                raise LocalDamage(str(error)) from error
            if work.in_place:
                self._shelf.change(buffer)
                return header
        self._shelf.discard(buffer)
        if work.plan.anchor is not None:
            self._load_anchor(work.plan.anchor, buffer, check)
        elif origin is not None and origin.buffer is not None:
            copy_file(origin.buffer.weights, buffer.weights, check)
            return header
        elif self._base is not None:
            self._base.copy_to(buffer.weights, check)
        return header_digest(buffer.weights)

    def _load_anchor(self, anchor: Manifest, buffer: Buffer, check: Check) -> None:
        paths = [self._fetcher.cached(file) for file in anchor.weights]
        if len(paths) == 1:
            paths[0].replace(buffer.weights)
        else:
            merge(paths, buffer.weights, check, consume=True)

    def confirm(self, target: VersionRef, manifest: Manifest, buffer: Buffer, check: Check) -> None:
        """A buffer may have been clean for long, or written by an earlier process: its bytes are read again."""
        try:
            buffer.check_header()
            if self._verify is Verify.FULL or not buffer.trusted:
                verify(buffer.weights, manifest.tensors, str(target), check, threads=self.threads)
                buffer.trust(manifest.tensors)
        except CorruptObject as error:
            self._shelf.give_up(buffer, error)
            raise LocalDamage(str(error)) from error

    def _blame(self, work: Work, trusted: bool, error: CorruptObject, check: Check) -> None:
        """A wrong result may be due to what it was built from. Raises LocalDamage where that is so: then there is another way.

        Of a trusted buffer that was changed in place nobody can tell any more: the caller is told, and asks again.
        """
        origin = work.origin
        if origin is None or (work.in_place and trusted):
            return
        if origin.buffer is None:
            assert self._base is not None
            self._base.forget()
        elif not work.in_place:
            try:
                verify(origin.buffer.weights, work.plan.at.tensors, str(work.plan.at.ref), check, threads=self.threads)
            except CorruptObject as wrong:
                self._shelf.give_up(origin.buffer, wrong)
                raise LocalDamage(str(wrong)) from wrong
            return
        else:
            self._shelf.give_up(origin.buffer, error)
        raise LocalDamage(str(error)) from error
