"""Checkpoint directories of the reference policy: `config.json` and safetensors, as any trainer would write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from stitch.core.errors import CorruptObject, InvalidRequest
from stitch.engines.reference.model import BOS, EOS, VOCABULARY, Array, ModelConfig, Params
from stitch.weights.digest import specs, weights_digest
from stitch.weights.host import host_tensors
from stitch.weights.safetensors import open_checkpoint, write_checkpoint

CONFIG_FILE: Final = "config.json"
MODEL_TYPE: Final = "stitch_reference"
MAX_CONFIG_BYTES: Final = 1024 * 1024
MAX_SIZE: Final = 4096
"""Of any of D, K and H: a config cannot ask for more memory than a test machine has."""


def save(path: Path, params: Params) -> None:
    """Writes a checkpoint directory; it must not hold one yet. The sizes are those of the arrays."""
    embedding = int(params["embed.weight"].shape[1])
    inputs, hidden = (int(size) for size in params["hidden.weight"].shape)
    write_checkpoint(path, dict(params))
    config = {
        "model_type": MODEL_TYPE,
        "architectures": ["StitchReferencePolicy"],
        "vocab_size": VOCABULARY,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "embedding_size": embedding,
        "context_size": inputs // embedding,
        "hidden_size": hidden,
    }
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_config(path: Path) -> ModelConfig:
    """The sizes that the directory's config.json states. Raises CorruptObject or InvalidRequest."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise InvalidRequest(f"checkpoint: {path} holds no {CONFIG_FILE}", field="model")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise CorruptObject(f"{file}: more than {MAX_CONFIG_BYTES} bytes")
    try:
        raw = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"{file}: not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("model_type") != MODEL_TYPE:
        raise InvalidRequest(f"{file}: not a checkpoint of the reference policy (model_type {MODEL_TYPE})", field="model")
    return ModelConfig(
        embedding=_size(file, raw, "embedding_size"),
        context=_size(file, raw, "context_size"),
        hidden=_size(file, raw, "hidden_size"),
    )


def _size(file: Path, raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise CorruptObject(f"{file}: {name} is {value!r}, not a whole number from 1 to {MAX_SIZE}")
    return value


def load(path: Path) -> dict[str, Array]:
    """All parameters, in memory of their own, with the dtypes of the files.

    Raises CorruptObject where files are damaged or hold other names or shapes than the config states, InvalidRequest where the
    directory is no such checkpoint, OSError where it cannot be read.
    """
    expected = load_config(path).shapes()
    params = _read(path)
    for name, shape in expected.items():
        array = params.get(name)
        if array is None:
            raise CorruptObject(f"{path}: tensor {name!r} is missing")
        if array.shape != shape:
            raise CorruptObject(f"{path}: tensor {name!r} is of shape {list(array.shape)}, not {list(shape)}")
        if array.dtype.kind not in "fV":  # ml_dtypes' types are of kind V
            raise CorruptObject(f"{path}: tensor {name!r} is {array.dtype}, no floating-point type")
    _refuse_others(path, params, expected)
    return params


def load_matching(path: Path, held: Params) -> dict[str, Array]:
    """As `load`, for an engine that holds weights already: names, shapes and dtypes must be the same."""
    params = load(path)
    for name, array in params.items():
        if (array.shape, array.dtype) != (held[name].shape, held[name].dtype):
            found, due = f"{array.dtype} {list(array.shape)}", f"{held[name].dtype} {list(held[name].shape)}"
            raise CorruptObject(f"{path}: tensor {name!r} is {found}, the engine holds {due}")
    return params


def _read(path: Path) -> dict[str, Array]:
    checkpoint = open_checkpoint(path)
    try:
        return {name: np.array(checkpoint.array(name)) for name in checkpoint.names}
    finally:
        checkpoint.close()


def _refuse_others(path: Path, params: Params, expected: Mapping[str, object]) -> None:
    other = sorted(params.keys() - expected.keys())
    if other:
        raise CorruptObject(f"{path}: tensor {other[0]!r} is none of the policy's")


def digest(params: Params) -> str:
    """The weights digest of what is in memory."""
    return weights_digest(specs(host_tensors(params)))
