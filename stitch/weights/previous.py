"""The bytes of the version before, kept by a publisher so that the next one can be a sparse delta.

They lie in memory, or in a file mapped into it where they exceed a budget, or are those of a base checkpoint directory, mapped
read-only until the first version moves on from it. They carry the weights digest of the version that they belong to and count for
no other. They move on only after a version was accepted, by that version's own files: so they also prove that what was published
rebuilds what was meant.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from stitch.core.errors import CorruptObject, InvalidRequest, StitchError
from stitch.core.ids import Digest
from stitch.core.manifest import Codec, TensorSpec
from stitch.weights.digest import state_digest
from stitch.weights.header import tensor_bytes
from stitch.weights.host import HostTensor
from stitch.weights.mapped import copy_bytes
from stitch.weights.safetensors import TensorFile, open_checkpoint
from stitch.weights.space import SPARE_BYTES
from stitch.weights.sparse import apply, unit_bytes

MEMORY_SHARE: Final = 0.25
"""Of the machine's memory, for all ranks of a trainer: what a host holds beside a trainer's own offloaded states."""
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")

_logger = logging.getLogger(__name__)


def default_budget(ranks: int = 1) -> int:
    """Bytes of memory for one rank: its part of a quarter of what the machine, or the container, has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(_CGROUP_LIMIT.read_text()))
    return int(memory * MEMORY_SHARE) // ranks


class Previous:
    """Of one rank: all tensors of a version, or those that this rank holds. One caller at a time, but `tensor` from many threads.

    `scratch` is a folder of its own, made where it is needed. `budget`: bytes of memory; what takes more goes to a file there.
    """

    def __init__(self, scratch: Path, budget: int) -> None:
        self._scratch, self._budget = scratch, budget
        self._held: _Held | None = None
        self._digest: Digest | None = None
        self.doubted = False
        """Whether a published version did not rebuild: nothing may build on it."""

    @property
    def digest(self) -> Digest | None:
        """The weights digest of the version whose bytes these are; None where they are of no use."""
        return self._digest

    def tensor(self, spec: TensorSpec) -> HostTensor | None:
        """The bytes of a tensor, read-only, if they are held. Those of a directory are held against the spec's digest first."""
        return None if self._held is None else self._held.tensor(spec)

    # --- where they come from ---

    def map_directory(self, directory: Path, digest: Digest) -> None:
        """A checkpoint directory with these weights. Each tensor is verified when it is asked for."""
        self.forget()
        self._held, self._digest = _Directory(directory), digest

    def take_file(self, path: Path, digest: Digest, tensors: Iterable[TensorSpec]) -> None:
        """A safetensors file that holds these verified tensors, and maybe others, and is ours from now on."""
        self.forget()
        self._held, self._digest, self.doubted = _Files([self._own(path)], tensors), digest, False

    def fill(self, layout: Iterable[tuple[str, str, tuple[int, ...]]]) -> Filling | None:
        """Room for a version of these names, dtypes and shapes, beside what is held; None, with a warning, where there is none."""
        rows = tuple(layout)
        room = self._allocate(rows, self._budget - (0 if self._held is None else self._held.memory))
        return None if room is None else Filling(room)

    # --- after a version was accepted ---

    def adopt(self, filling: Filling, digest: Digest) -> None:
        """The version that was copied while it was read."""
        self.forget()
        self._held, self._digest, self.doubted = filling.room, digest, False

    def follow_full(self, files: Sequence[Path], tensors: Sequence[TensorSpec], digest: Digest) -> None:
        """The version that these safetensors files hold, which are ours from now on."""
        self.forget()
        room = None
        if sum(path.stat().st_size for path in files) <= self._budget:
            room = self._allocate([(spec.name, spec.dtype, spec.shape) for spec in tensors], self._budget)
        if room is None:
            self._held = _Files([self._own(path) for path in files], tensors)
        else:
            for path in files:
                with TensorFile(path) as file:
                    for tensor in file.tensors():
                        room.put(tensor)
            self._held = room
        self._digest, self.doubted = digest, False

    def follow_delta(
        self,
        codec: Codec,
        files: Sequence[Path],
        before: Mapping[str, TensorSpec],
        after: Sequence[TensorSpec],
        digest: Digest,
    ) -> None:
        """The version that this delta makes of what is held; `after` are the tensors that this rank gave, others are let go.

        Where the result is not what was published, `doubted` is set, and an error logged.
        """
        if self._digest is None:
            return
        self._digest = None
        try:
            held = self._writable(before, after)
            if held is None:
                self.forget()
                return
            wanted = {spec.name: spec for spec in after}
            for path in files:
                with TensorFile(path) as file:
                    for name in file.names:
                        _advance(held, file.tensor(name), codec, before[name], wanted[name])
            held.keep(wanted)
        except (StitchError, KeyError) as error:
            why = f"a version that was published does not rebuild from its own files: {error!r}; the next one becomes full"
            _logger.error(why)  # noqa: TRY400 # where it happened says nothing to who reads the log
            self.forget()
            self.doubted = True
            return
        self._held, self._digest = held, digest

    def forget(self) -> None:
        """Lets go of the bytes, and of a file that holds them."""
        held, self._held, self._digest = self._held, None, None
        if held is not None:
            held.release()

    def close(self) -> None:
        self.forget()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _writable(self, before: Mapping[str, TensorSpec], after: Sequence[TensorSpec]) -> _Held | None:
        """What is held, where it may be written; else a copy that may be, of the tensors that are right."""
        held = self._held
        if held is None or held.writable:
            return held
        right = [tensor for spec in after if (tensor := held.tensor(before[spec.name])) is not None]
        room = self._allocate([(tensor.name, tensor.dtype, tensor.shape) for tensor in right], self._budget)
        if room is not None:
            for tensor in right:
                room.put(tensor)
        held.release()
        return room

    def _allocate(self, layout: Sequence[tuple[str, str, tuple[int, ...]]], budget: int) -> _Room | None:
        size = max(1, sum(_aligned(tensor_bytes(dtype, shape)) for _, dtype, shape in layout))
        if size <= budget:
            return _Room(_memory(size), layout, memory=size)
        try:
            self._scratch.mkdir(parents=True, exist_ok=True)
            return _Room(_map_new(self._free_path(), size), layout, memory=0)
        except OSError as error:
            _logger.warning("versions cannot be sparse deltas, there is no room for the bytes of the one before: %s", error)
            return None

    def _own(self, path: Path) -> Path:
        """Moves a file below our folder."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        target = self._free_path()
        shutil.move(path, target)
        return target

    def _free_path(self) -> Path:
        taken = {path.name for path in self._scratch.iterdir()}
        return next(self._scratch / f"{number}" for number in range(len(taken) + 1) if f"{number}" not in taken)


class Filling:
    """A version's tensors copied one by one, from whatever threads, before anybody knows whether it will be accepted."""

    def __init__(self, room: _Room) -> None:
        self.room: Final = room

    def put(self, tensor: HostTensor) -> None:
        """Raises InvalidRequest for a tensor that no room was made for."""
        self.room.put(tensor)

    def drop(self) -> None:
        """The version was not accepted."""
        self.room.release()


class _Held:
    """Tensors by name. `memory` is what they take of it, a file's cached pages left out."""

    writable = True
    memory = 0

    def __init__(self) -> None:
        self.views: dict[str, tuple[str, tuple[int, ...], memoryview]] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.views)

    def tensor(self, spec: TensorSpec) -> HostTensor | None:
        found = self.views.get(spec.name)
        if found is None or found[:2] != (spec.dtype, spec.shape):
            return None
        return HostTensor(name=spec.name, dtype=spec.dtype, shape=spec.shape, data=found[2].toreadonly())

    def keep(self, names: Iterable[str]) -> None:
        self.views = {name: self.views[name] for name in names if name in self.views}

    def release(self) -> None:
        self.views.clear()


class _Room(_Held):
    """One mapping, of a file without a header or of memory."""

    def __init__(self, mapped: mmap.mmap, layout: Iterable[tuple[str, str, tuple[int, ...]]], memory: int) -> None:
        super().__init__()
        self._map, self.memory = mapped, memory
        view, start = memoryview(mapped), 0
        for name, dtype, shape in layout:
            size = tensor_bytes(dtype, shape)
            self.views[name] = (dtype, shape, view[start : start + size])
            start += _aligned(size)

    def put(self, tensor: HostTensor) -> None:
        found = self.views.get(tensor.name)
        if found is None or found[:2] != (tensor.dtype, tensor.shape):
            raise InvalidRequest(f"weights: tensor {tensor.name!r} is not of the form of the version before", field="weights")
        copy_bytes(found[2], tensor.data)

    def release(self) -> None:
        super().release()
        with contextlib.suppress(BufferError):  # then the last view unmaps it
            self._map.close()


class _Files(_Held):
    """Safetensors files of our own, mapped for writing; other tensors in them are not looked at."""

    def __init__(self, paths: Sequence[Path], tensors: Iterable[TensorSpec]) -> None:
        super().__init__()
        self._paths = tuple(paths)
        self._maps: list[mmap.mmap] = []
        wanted = {spec.name for spec in tensors}
        for path in paths:
            with TensorFile(path) as file, path.open("r+b") as handle:
                mapped = mmap.mmap(handle.fileno(), 0)
                self._maps.append(mapped)
                for name in file.names:
                    info, start = file.spec(name), file.offset(name)
                    if name in wanted:
                        self.views[name] = (info.dtype, info.shape, memoryview(mapped)[start : start + info.end - info.begin])

    def release(self) -> None:
        super().release()
        for mapped in self._maps:
            with contextlib.suppress(BufferError):
                mapped.close()
        for path in self._paths:
            path.unlink(missing_ok=True)


class _Directory(_Held):
    """A checkpoint directory of somebody else, who may change it: nothing of it is believed before it was digested."""

    writable = False

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._opened = ExitStack()
        checkpoint = self._opened.enter_context(open_checkpoint(directory))
        for tensor in checkpoint.tensors():
            self.views[tensor.name] = (tensor.dtype, tensor.shape, tensor.data)
        self._right: dict[str, str] = {}

    def tensor(self, spec: TensorSpec) -> HostTensor | None:
        found = super().tensor(spec)
        if found is None or self._right.get(spec.name) == spec.state:
            return found
        if state_digest(found.data) != spec.state:
            _logger.warning("%s: tensor %r is no longer what it was; it is not used as a base", self._directory, spec.name)
            return None
        self._right[spec.name] = spec.state
        return found

    def release(self) -> None:
        super().release()
        self._opened.close()


def _advance(held: _Held, change: HostTensor, codec: Codec, before: TensorSpec, after: TensorSpec) -> None:
    """One changed tensor, in place. Raises CorruptObject where the result is not what the manifest says."""
    found = held.views.get(change.name)
    if found is None:
        return
    target = found[2]
    if codec is Codec.SPARSE:
        state = apply([change.data], target, width=unit_bytes(after.dtype), state=before.state)
    else:
        copy_bytes(target, change.data)
        state = state_digest(target)
    if state != after.state:
        raise CorruptObject(f"tensor {change.name!r} came to the state digest {state}, not {after.state}")


def _aligned(size: int) -> int:
    """Tensors begin at whole words."""
    return size + -size % 8


def _memory(size: int) -> mmap.mmap:
    """Memory of its own mapping, so that all of it goes back at once; in large pages where there are such, as numpy's arrays."""
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _map_new(path: Path, size: int) -> mmap.mmap:
    """A file that takes its room at once, since a mapped write that finds the disk full kills the process. Raises OSError."""
    free = shutil.disk_usage(path.parent).free
    if size + SPARE_BYTES > free:
        raise OSError(errno.ENOSPC, f"{size} bytes and {SPARE_BYTES} to spare are needed in {path.parent}, {free} are free")
    with path.open("w+b") as handle:
        path.unlink()  # it lives as long as it is mapped, and no crash leaves it behind
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle.fileno(), 0, size)
        else:
            handle.truncate(size)
        return mmap.mmap(handle.fileno(), size)
