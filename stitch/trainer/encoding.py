"""One rank's tensors turned into files, in the form that is asked for, and what of them is kept for the next version."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stitch.core.errors import InvalidRequest
from stitch.core.ids import Digest, StateDigest
from stitch.core.manifest import Codec, Kind, TensorSpec
from stitch.store.port import BlobStore
from stitch.trainer.attempt import Attempt, Step
from stitch.trainer.parts import Form, Part, Share, Task
from stitch.weights.encode import (
    Encoded,
    Hooks,
    LocalFile,
    Old,
    carried,
    check_form,
    digest_all,
    encode_changes,
    encode_delta,
    encode_full,
    encode_sparse,
    tensor_sizes,
    weight_files,
)
from stitch.weights.previous import Filling, Previous
from stitch.weights.safetensors import WEIGHTS_FILE, open_checkpoint
from stitch.weights.slime import SlimeDelta, detect
from stitch.weights.sparse import SparseTensor
from stitch.weights.staging import Staging
from stitch.weights.tensors import HostTensor, Weights

DELTAS: Final = frozenset({Form.CHANGED, Form.SPARSE})
BROUGHT: Final = "brought"
"""Where the bytes of a version are put together that are not at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a rank was given. `delta`: the change that a directory of Slime or Miles holds."""

    weights: Weights
    delta: SlimeDelta | None = None

    @property
    def again(self) -> bool:
        """Whether it can be read more than once."""
        return isinstance(self.weights, Mapping | Path)


def source_of(weights: Any) -> Source:
    """Raises InvalidRequest or CorruptObject for a directory that is half-written."""
    given: Weights = Path(weights) if isinstance(weights, str) else weights
    return Source(weights=given, delta=detect(given) if isinstance(given, Path) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A rank's files, to upload, and what `Encoder.follow` needs once the version was accepted.

    `again`: whether the same could be made into a full version. `ours`: the files hold all tensors, and nobody else needs them.
    """

    task: Task
    encoded: Encoded
    again: bool
    ours: bool = False
    filling: Filling | None = None

    @property
    def part(self) -> Part:
        """What the other ranks are told of it."""
        encoded = self.encoded
        return Part(
            tensors=encoded.tensors,
            kind=encoded.kind,
            codec=encoded.codec,
            complete=encoded.complete,
            size=encoded.size,
            again=self.again,
        )

    def drop(self) -> None:
        """It was not accepted."""
        if self.filling is not None:
            self.filling.drop()


class Encoder:
    """Of one rank, with the bytes of the version before; `keep` says whether those of the next one are kept for another.

    `local_base`: a checkpoint directory that may spare a download.
    """

    def __init__(
        self, previous: Previous, share: Share, store: BlobStore, scratch: Path, local_base: Path | None, *, keep: bool
    ) -> None:
        self.previous: Final = previous
        self._share, self._store, self._scratch, self._local_base, self._keep = share, store, scratch, local_base, keep

    def encode(
        self, source: Source, task: Task, folder: Path, emit: Callable[[Path], None], attempt: Attempt, *, full: bool = False
    ) -> Work:
        """This rank's part, in the folder. `full`: a full version instead, which the source can still be made into.

        Each complete file is told to `emit`, and may be uploaded from then on. Where the form of the weights is not the base's,
        they become a full version, unless the task is strict, they can be read only once, or are those of one rank of many.
        """
        form = Form.FULL if full else self._form(source, task)
        told = _Told(attempt, self._expected(source, task))
        hooks = Hooks(emit=emit, told=told, share=not self._share.whole)
        if source.delta is not None:
            return self._of_delta(source, source.delta, task, form, folder / form, hooks)
        try:
            return self._of_tensors(source, task, form, folder / form, hooks)
        except InvalidRequest:
            if form not in DELTAS or task.strict or not source.again or not self._share.whole:
                raise
        return self.encode(source, task, folder, emit, attempt, full=True)

    def follow(self, work: Work, digest: Digest) -> None:
        """Moves the bytes at hand on to the version that was accepted with these files, which are then ours or no longer needed."""
        encoded, previous = work.encoded, self.previous
        paths = [file.source for file in encoded.weights]
        base = work.task.base_manifest
        if not self._keep:
            previous.forget()
        elif work.filling is not None:
            previous.adopt(work.filling, digest)
        elif work.ours:
            previous.follow_full(paths, encoded.tensors, digest)
        elif encoded.kind is Kind.DELTA and base is not None and previous.digest == base.weights_digest:
            before = {spec.name: spec for spec in work.task.base}
            previous.follow_delta(encoded.codec, paths, before, encoded.tensors, digest)
        else:
            previous.forget()

    # --- tensors, or a checkpoint directory ---

    @staticmethod
    def _form(source: Source, task: Task) -> Form:
        """What is asked for, but a full version of a directory of another form: every rank sees the same."""
        if task.form in DELTAS and source.delta is None and isinstance(source.weights, Path):
            try:
                check_form(source.weights, task.base)
            except InvalidRequest:
                if task.strict:
                    raise
                return Form.FULL
        return task.form

    def _of_tensors(self, source: Source, task: Task, form: Form, folder: Path, hooks: Hooks) -> Work:
        weights = source.weights
        if isinstance(weights, Path) and not self._share.whole:
            hooks = replace(hooks, only=self._share.names(_directory_sizes(weights)))
        if form is Form.DIGEST:
            return Work(task=task, encoded=_digests(digest_all(weights, hooks=hooks)), again=source.again)
        filling = None if form is Form.SPARSE else self._filling(weights, task, form, hooks)
        if filling is not None:
            hooks = replace(hooks, keep=filling.put)
        try:
            if form is Form.SPARSE:
                encoded = encode_sparse(weights, task.base, self._old(task), folder, hooks=hooks)
            elif form is Form.CHANGED:
                encoded = encode_delta(weights, task.base, folder, hooks=hooks)
            else:
                encoded = self._full(weights, folder, hooks)
        except BaseException:
            if filling is not None:
                filling.drop()
            raise
        return Work(
            task=task,
            encoded=replace(encoded, files=self._files(encoded.files)),
            again=source.again,
            ours=form is Form.FULL and not isinstance(weights, Path),
            filling=filling,
        )

    def _old(self, task: Task) -> Old:
        """The bytes at hand, if they are those of the base."""
        if task.base_manifest is not None and self.previous.digest == task.base_manifest.weights_digest:
            return self.previous.tensor
        return lambda _: None

    def _full(self, weights: Weights, folder: Path, hooks: Hooks) -> Encoded:
        if not isinstance(weights, Path):
            return encode_full(weights, folder, hooks=hooks)
        mine = self._share.names((file.path, file.source.stat().st_size) for file in weight_files(weights))
        for name in sorted(mine):
            hooks.emit(weights / name)
        encoded = encode_full(weights, folder, hooks=hooks)
        return replace(encoded, weights=tuple(file for file in encoded.weights if file.path in mine))

    def _filling(self, weights: Weights, task: Task, form: Form, hooks: Hooks) -> Filling | None:
        """Room for a copy of the tensors that pass by, where nothing else would hold them all once the version is accepted."""
        if not self._keep:
            return None
        if form is Form.FULL:
            if not isinstance(weights, Path) or not task.keep:
                return None
            with open_checkpoint(weights) as checkpoint:
                return self.previous.fill(
                    [(t.name, t.dtype, t.shape) for t in checkpoint.tensors() if hooks.only is None or t.name in hooks.only]
                )
        assert task.base_manifest is not None
        if self.previous.digest == task.base_manifest.weights_digest:
            return None
        if not self._share.whole and not isinstance(weights, Mapping | Path):
            return None  # which tensors this rank holds is only known at the end
        names = weights if isinstance(weights, Mapping) else hooks.only
        return self.previous.fill([(s.name, s.dtype, s.shape) for s in task.base if names is None or s.name in names])

    # --- a directory of Slime or Miles that holds what changed ---

    def _of_delta(self, source: Source, delta: SlimeDelta, task: Task, form: Form, folder: Path, hooks: Hooks) -> Work:
        mine = self._share.names(_sizes(task.base))
        base = {spec.name: spec for spec in task.base if spec.name in mine}
        strays = delta.names - {spec.name for spec in task.base}
        if strays:
            raise InvalidRequest(
                f"{delta.directory}: tensor {min(strays)!r} is not in version {delta.base_version}, which the delta is against",
                field="weights",
            )
        self._bring(task, base.values())

        def old(name: str) -> tuple[HostTensor, StateDigest]:
            found = self.previous.tensor(base[name])
            if found is None:
                raise KeyError(name)
            return found, base[name].state

        if form is Form.DIGEST:
            same = delta.matches(old, names=mine)
            return Work(task=task, encoded=_digests(base.values() if same else ()), again=True)
        changes = _telling(delta.changed(old, names=mine), hooks)
        files = self._files(carried(source.weights))
        if form is Form.FULL:
            whole = ((tensor.name, tensor) for tensor in _whole(changes, base, old))
            encoded = replace(encode_full(whole, folder, hooks=replace(hooks, told=_silent)), files=files)
            return Work(task=task, encoded=encoded, again=True, ours=True)
        encoded = encode_changes(changes, base.values(), folder, files=files, rest_unchanged=True, hooks=hooks)
        return Work(task=task, encoded=encoded, again=True)

    def _bring(self, task: Task, mine: Iterable[TensorSpec]) -> None:
        """Puts the bytes of the base together from the store, where they are not at hand. Raises NotEnoughSpace."""
        ref, manifest = task.base_ref, task.base_manifest
        assert ref is not None
        assert manifest is not None
        if self.previous.digest == manifest.weights_digest and all(self.previous.tensor(spec) is not None for spec in mine):
            return
        self.previous.forget()
        workdir = self._scratch / BROUGHT
        try:
            with Staging(workdir, self._store, base=self._local_base) as staging:
                staged = staging.stage(ref, manifest, anchors=task.anchors)
                self.previous.take_file((staged.path / WEIGHTS_FILE).resolve(), manifest.weights_digest, task.base)
        finally:
            shutil.rmtree(workdir, ignore_errors=True)

    def _expected(self, source: Source, task: Task) -> list[int]:
        """Bytes of each tensor that is to be encoded here; none where that is not known before."""
        sizes = dict(_sizes(task.base))
        weights = source.weights
        if source.delta is not None:
            mine = self._share.names(sizes.items())
            return [sizes[name] for name in source.delta.names if name in mine and name in sizes]
        if isinstance(weights, Path):
            sizes = dict(_directory_sizes(weights))
            return [sizes[name] for name in self._share.names(sizes.items())]
        if isinstance(weights, Mapping):
            return [int(getattr(tensor, "nbytes", 0)) for tensor in weights.values()]
        return list(sizes.values()) if self._share.whole else []

    def _files(self, files: tuple[LocalFile, ...]) -> tuple[LocalFile, ...]:
        """What goes along with the weights is small: rank 0 sees to it."""
        return files if self._share.rank == 0 else ()


class _Told:
    """Reports what is done, tensor by tensor."""

    def __init__(self, attempt: Attempt, sizes: Sequence[int]) -> None:
        self._attempt = attempt
        self._bytes = self._tensors = 0
        self._of_bytes, self._of_tensors = sum(sizes), len(sizes)

    def __call__(self, tensor: HostTensor) -> None:
        self._tensors += 1
        self._bytes += tensor.data.nbytes
        self._attempt.report(
            Step.ENCODING,
            bytes_done=self._bytes,
            bytes_total=self._of_bytes,
            tensors_done=self._tensors,
            tensors_total=self._of_tensors,
        )


def _silent(_: HostTensor) -> None:
    """The tensor was told of before."""


def _telling(changes: Iterable[tuple[HostTensor, SparseTensor]], hooks: Hooks) -> Iterator[tuple[HostTensor, SparseTensor]]:
    for tensor, change in changes:
        yield tensor, change
        hooks.told(tensor)


def _whole(
    changes: Iterable[tuple[HostTensor, SparseTensor]],
    base: Mapping[str, TensorSpec],
    old: Callable[[str], tuple[HostTensor, StateDigest]],
) -> Iterator[HostTensor]:
    """All tensors of the version that the changes lead to."""
    changed: set[str] = set()
    for tensor, _ in changes:
        changed.add(tensor.name)
        yield tensor
    yield from (old(name)[0] for name in base if name not in changed)


def _digests(specs: Iterable[TensorSpec]) -> Encoded:
    """Of weights of which nothing is written."""
    return Encoded(kind=Kind.FULL, codec=Codec.SAFETENSORS, weights=(), files=(), tensors=tuple(specs), complete=False)


def _sizes(specs: Iterable[TensorSpec]) -> list[tuple[str, int]]:
    return [(spec.name, tensor_sizes([spec])) for spec in specs]


def _directory_sizes(directory: Path) -> list[tuple[str, int]]:
    with open_checkpoint(directory) as checkpoint:
        return [(tensor.name, tensor.data.nbytes) for tensor in checkpoint.tensors()]
