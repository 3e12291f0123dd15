"""Stored files turned back into one safetensors file that holds every tensor: full checkpoints merged, deltas applied in place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stitch.core.errors import CorruptObject
from stitch.core.manifest import Codec, Manifest, TensorSpec
from stitch.weights.digest import check_tensor
from stitch.weights.files import write_at
from stitch.weights.safetensors import TensorFile, TensorWriter

Check = Callable[[], None]
"""Called between tensors; raises to stop."""


def merge(shards: Sequence[Path], target: Path, check: Check) -> None:
    """One file of all tensors of several. Raises CorruptObject naming the tensor that stands in two of them."""
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(TensorFile(shard)) for shard in shards]
        infos = [(file, file.spec(name)) for file in files for name in file.names]
        seen: set[str] = set()
        for file, info in infos:
            if info.name in seen:
                raise CorruptObject(f"{file.path.name}: tensor {info.name!r} is in another shard too")
            seen.add(info.name)
        with TensorWriter(target, [(info.name, info.dtype, info.shape) for _, info in infos]) as writer:
            for file, info in infos:
                check()
                writer.write(info.name, file.data(info.name))


def apply_delta(delta: Manifest, files: Sequence[Path], target: Path, check: Check) -> None:
    """Brings the safetensors file `target` from the delta's base to the delta's version, in place; `files` are its weight files.

    Not atomic: a caller that is interrupted must throw the target away. What the target then holds is not verified here. Raises
    CorruptObject naming the version and the tensor.
    """
    apply = _APPLY.get(delta.codec)
    if apply is None:
        raise CorruptObject(f"{delta.ref}: {delta.codec} is no delta codec that this release reads")
    apply(delta, files, target, check)


def verify(path: Path, tensors: Sequence[TensorSpec], source: str, check: Check) -> None:
    """Holds every tensor of a file against its spec: names, dtypes, shapes, state digests. CorruptObject names the tensor."""
    with TensorFile(path) as file:
        expected = {spec.name for spec in tensors}
        for name in file.names:
            if name not in expected:
                raise CorruptObject(f"{source}: tensor {name!r} is not in the manifest")
        present = frozenset(file.names)
        for spec in tensors:
            check()
            if spec.name not in present:
                raise CorruptObject(f"{source}: tensor {spec.name!r} is missing")
            check_tensor(file.tensor(spec.name), spec, source)


def _apply_changed_tensors(delta: Manifest, files: Sequence[Path], target: Path, check: Check) -> None:
    with TensorFile(target) as layout, _open_for_writing(target) as handle:
        known = frozenset(layout.names)
        for path in files:
            with TensorFile(path) as changed:
                for tensor in changed.tensors():
                    check()
                    if tensor.name not in known:
                        raise CorruptObject(f"{delta.ref}: tensor {tensor.name!r} is not in its base")
                    info = layout.spec(tensor.name)
                    if (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
                        raise CorruptObject(
                            f"{delta.ref}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, "
                            f"in its base {info.dtype} {list(info.shape)}"
                        )
                    write_at(handle, layout.offset(tensor.name), tensor.data)


@contextlib.contextmanager
def _open_for_writing(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR)
    try:
        yield handle
    finally:
        os.close(handle)


_APPLY: Final[Mapping[Codec, Callable[[Manifest, Sequence[Path], Path, Check], None]]] = {
    Codec.CHANGED_TENSORS: _apply_changed_tensors,
}
