"""Deltas applied to a safetensors file in place: a chain of them in one pass over each tensor.

All deltas are opened and held against each other first, so that whatever is wrong with names, dtypes, shapes, units or versions is
found before the first byte changes. Then every tensor that changed is brought through all versions at once, several tensors at a
time, straight in the mapped file.

The file is mapped shared: what is written is in the kernel's page cache, so that an engine on the same machine reads it at once,
and reaches the disk in the kernel's own time. On file systems that write every change to a new place (btrfs, reflinked XFS) a disk
that fills up meanwhile may end the process; the buffer is then dirty by its record, and built anew.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from stitch.core.errors import CorruptObject
from stitch.core.manifest import Codec, Manifest, TensorSpec
from stitch.weights import sparse
from stitch.weights.digest import state_digest
from stitch.weights.header import TensorInfo, tensor_bytes
from stitch.weights.mapped import copy_bytes, make_writable, mapped
from stitch.weights.parallel import Check, run_all
from stitch.weights.safetensors import TensorFile
from stitch.weights.sparse_format import read_header
from stitch.weights.verify import check_layout, check_state

BLOB_DTYPE: Final = "U8"
GROUP_BYTES: Final = 16 * 1024 * 1024
"""Small tensors are handed to threads together, up to so many bytes."""
THREAD_CHUNKS: Final = 16
"""What one thread holds at most while it decodes, counted in a codec's chunks: streams, positions, words, about 30 bytes for each
unit of two. Where a few of a hundred units change it is far less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A delta's manifest, and where its weight files lie on the local disk."""

    manifest: Manifest
    files: Sequence[Path]


@dataclass(slots=True, kw_only=True)
class _Edit:
    """What one tensor goes through: replaced by `whole` if that is set, then all `blobs`, oldest first.

    `before` is the spec that the first blob is applied to: of the start, or of the version that brought `whole`.
    """

    before: TensorSpec
    after: TensorSpec
    source: str
    whole: memoryview | None = None
    blobs: list[memoryview] = field(default_factory=list)


class Chain:
    """Deltas, oldest first, upon tensors of these specs. Use as a context: their files stay mapped until it ends."""

    def __init__(self, start: Sequence[TensorSpec], deltas: Sequence[Delta], *, source: str) -> None:
        """`source` names the newest version.

        Raises CorruptObject naming the version and the tensor: one that is renamed, missing, extra, reshaped or of another dtype,
        changed without a trace in the files, or of a form that its codec does not have.
        """
        self._start = tuple(start)
        self._source = source
        self._edits: dict[str, _Edit] = {}
        self._chunk_bytes = 0
        with contextlib.ExitStack() as opened:
            before = {spec.name: spec for spec in start}
            for delta in deltas:
                before = self._add(opened, delta, before)
            self._opened = opened.pop_all()

    @property
    def changed(self) -> frozenset[str]:
        """Names of the tensors that are written."""
        return frozenset(self._edits)

    @property
    def thread_bytes(self) -> int:
        """Memory that one thread takes while it decodes, beyond mapped files."""
        return THREAD_CHUNKS * self._chunk_bytes

    def check(self, target: Path) -> None:
        """Holds names, dtypes and shapes of the file against those of the start. CorruptObject names the tensor."""
        with TensorFile(target) as layout:
            self._layout(layout)

    def apply(self, target: Path, check: Check, *, threads: int, unread: bool = False) -> None:
        """Brings the file from the start to the newest version, in place. `check` is called between tensors and raises to stop.

        Not atomic: a caller that is interrupted must throw the file away. Each changed tensor's new digest follows from its
        changed words and must be the manifest's; tensors that did not change are not read. With `unread` no digest is kept, for a
        caller that reads the whole file afterwards. Raises CorruptObject naming version and tensor.
        """
        with TensorFile(target) as layout, mapped(target) as data:
            self._layout(layout)
            work = partial(self._apply_all, data, layout, unread)
            run_all((partial(work, group) for group in self._groups()), threads, check)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- opening -----------------------------------------------------------------------------------------------------------

    def _add(self, opened: contextlib.ExitStack, delta: Delta, before: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Adds one delta's changes; returns the specs after it."""
        manifest, source = delta.manifest, str(delta.manifest.ref)
        take = {Codec.SPARSE: self._take_blob, Codec.CHANGED_TENSORS: self._take_whole}.get(manifest.codec)
        if take is None:
            raise CorruptObject(f"{source}: {manifest.codec} is no delta codec that this release reads")
        after = {spec.name: spec for spec in manifest.tensors}
        _check_same_form(before, after, source)
        held: set[str] = set()
        for path in delta.files:
            file = opened.enter_context(TensorFile(path))
            for name in file.names:
                if name not in after:
                    raise CorruptObject(f"{source}: tensor {name!r} is not in its base")
                if name in held:
                    raise CorruptObject(f"{source}: tensor {name!r} stands in two of its files")
                held.add(name)
                take(before[name], after[name], source, file.spec(name), file.data(name))
        for name, spec in after.items():
            if spec.state != before[name].state and name not in held:
                raise CorruptObject(f"{source}: tensor {name!r} differs from its base, but the delta does not hold it")
        return after

    def _take_whole(self, before: TensorSpec, after: TensorSpec, source: str, info: TensorInfo, data: memoryview) -> None:
        if (info.dtype, info.shape) != (after.dtype, after.shape):
            raise CorruptObject(
                f"{source}: tensor {after.name!r} is {info.dtype} {list(info.shape)}, in its base {after.dtype} {list(after.shape)}"
            )
        self._edits[after.name] = _Edit(before=after, after=after, source=source, whole=data)

    def _take_blob(self, before: TensorSpec, after: TensorSpec, source: str, info: TensorInfo, data: memoryview) -> None:
        where = f"{source}: tensor {after.name!r}"
        if info.dtype != BLOB_DTYPE or len(info.shape) != 1:
            raise CorruptObject(f"{where}: its delta is {info.dtype} {list(info.shape)}, not one row of {BLOB_DTYPE}")
        try:
            header = read_header(data)
        except CorruptObject as error:
            raise CorruptObject(f"{where}: {error}") from error
        width, size = sparse.unit_bytes(after.dtype), tensor_bytes(after.dtype, after.shape)
        if header.width > width or header.units * header.width != size:
            raise CorruptObject(
                f"{where}: its delta is of {header.units} units of {header.width} bytes, "
                f"the tensor of {size} bytes in units of {width}"
            )
        self._chunk_bytes = max(self._chunk_bytes, header.chunk_bytes)
        edit = self._edits.get(after.name)
        if edit is None:
            edit = self._edits[after.name] = _Edit(before=before, after=after, source=source)
        edit.blobs.append(data)
        edit.after, edit.source = after, source

    def _layout(self, layout: TensorFile) -> None:
        check_layout({name: layout.spec(name) for name in layout.names}, self._start, self._source)

    # --- applying ----------------------------------------------------------------------------------------------------------

    def _groups(self) -> Iterator[list[_Edit]]:
        """Tensors that one thread takes, the largest first, so that none is left alone with one at the end."""
        sized = ((tensor_bytes(edit.after.dtype, edit.after.shape), edit) for edit in self._edits.values())
        group: list[_Edit] = []
        held = 0
        for size, edit in sorted(sized, key=lambda pair: -pair[0]):
            group.append(edit)
            held += size
            if held >= GROUP_BYTES:
                yield group
                group, held = [], 0
        if group:
            yield group

    def _apply_all(self, data: memoryview, layout: TensorFile, unread: bool, edits: Iterable[_Edit]) -> None:
        for edit in edits:
            begin = layout.offset(edit.after.name)
            self._apply(edit, data[begin : begin + tensor_bytes(edit.after.dtype, edit.after.shape)], unread)

    def _apply(self, edit: _Edit, target: memoryview, unread: bool) -> None:
        if edit.whole is not None or sum(blob.nbytes for blob in edit.blobs) * mmap.PAGESIZE > target.nbytes:
            make_writable(target)  # a byte of a blob stands for a changed unit or two, so nearly every page will be written
        if edit.whole is not None:
            copy_bytes(target, edit.whole)
        width = sparse.unit_bytes(edit.after.dtype)
        try:
            if unread:
                sparse.apply(edit.blobs, target, width=width, state=None)
                return
            state = edit.before.state if edit.whole is None else state_digest(target)
            state = sparse.apply(edit.blobs, target, width=width, state=state)
        except CorruptObject as error:
            raise CorruptObject(f"{edit.source}: tensor {edit.after.name!r}: {error}") from error
        check_state(edit.after, state, edit.source)


def _check_same_form(before: dict[str, TensorSpec], after: dict[str, TensorSpec], source: str) -> None:
    for name, spec in after.items():
        base = before.get(name)
        if base is None:
            raise CorruptObject(f"{source}: tensor {name!r} is not in its base")
        if (spec.dtype, spec.shape) != (base.dtype, base.shape):
            raise CorruptObject(
                f"{source}: tensor {name!r} is {spec.dtype} {list(spec.shape)}, in its base {base.dtype} {list(base.shape)}"
            )
    if len(after) != len(before):
        raise CorruptObject(f"{source}: tensor {min(before.keys() - after.keys())!r} of its base is missing")
