"""A small autoregressive policy over bytes, in numpy: an embedding of the last K tokens, one hidden layer, a softmax.

Tokens 0-255 are bytes, 256 fills the context before the text begins (and is never sampled), 257 ends it. Parameters are a
mapping from name to array; all functions here are pure. Training keeps them in f32 and publishes `to_bf16` of them; the
engine serves those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Params = Mapping[str, Array]
"""embed.weight [V, D], hidden.weight [K*D, H], hidden.bias [H], output.weight [H, V], output.bias [V]."""
Episode = tuple[Sequence[int], Sequence[int]]
"""The tokens of a prompt and those that the policy wrote after it."""

BOS: Final = 256
EOS: Final = 257
VOCABULARY: Final = 258
NEVER: Final = np.float32(-1e30)
"""The logit of BOS: its probability is zero, and no infinity takes part in any sum."""

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_PRINTABLE: Final = slice(32, 127)
_PRINTABLE_BIAS: Final = 3.0
"""Puts about nine tenths of a fresh policy's probability on printable ASCII."""
_EOS_BIAS: Final = 3.0
"""Makes a fresh policy end after about a hundred tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a policy: D, K and H."""

    embedding: int = 16
    context: int = 8
    hidden: int = 64

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter."""
        return {
            "embed.weight": (VOCABULARY, self.embedding),
            "hidden.weight": (self.context * self.embedding, self.hidden),
            "hidden.bias": (self.hidden,),
            "output.weight": (self.hidden, VOCABULARY),
            "output.bias": (VOCABULARY,),
        }


def init(config: ModelConfig, seed: int) -> dict[str, Array]:
    """A random policy, f32. The same seed gives the same bytes."""
    rng = np.random.default_rng(seed)
    scales = {
        "embed.weight": 1.0,
        "hidden.weight": (config.context * config.embedding) ** -0.5,
        "hidden.bias": 0.1,
        "output.weight": 1.5 * config.hidden**-0.5,
        "output.bias": 0.1,
    }
    params = {name: (rng.standard_normal(shape) * scales[name]).astype(np.float32) for name, shape in config.shapes().items()}
    params["output.bias"][_PRINTABLE] += np.float32(_PRINTABLE_BIAS)
    params["output.bias"][EOS] += np.float32(_EOS_BIAS)
    return params


def to_bf16(params: Params) -> dict[str, Array]:
    """What is published: matrices rounded to bf16; biases stay f32, being small and summed into every logit."""
    return {name: array.astype(BFLOAT16 if array.ndim > 1 else np.float32) for name, array in params.items()}


def to_f32(params: Params) -> dict[str, Array]:
    """What is computed with: every parameter as f32, exact for bf16."""
    return {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in params.items()}


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    """The text of the bytes among the tokens; what is no UTF-8 becomes U+FFFD."""
    return bytes(token for token in tokens if token < BOS).decode(errors="replace")


def context_size(params: Params) -> int:
    """K, as the shapes tell it."""
    return int(params["hidden.weight"].shape[0] // params["embed.weight"].shape[1])


def last_context(tokens: Sequence[int], size: int) -> list[int]:
    """The last `size` tokens, filled up with BOS from the left."""
    tail = list(tokens[-size:])
    return [BOS] * (size - len(tail)) + tail


def contexts_of(episode: Episode, size: int) -> Array:
    """The context before each output token: int64 [len(output), size]."""
    prompt, output = episode
    whole = np.asarray([BOS] * size + list(prompt) + list(output), dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(whole, size)
    return windows[len(prompt) : len(prompt) + len(output)]


def logits(params: Params, contexts: Array) -> Array:
    """f32 [B, V] for int contexts [B, K].

    A row's result does not depend on the other rows to the last bit: each is multiplied on its own, so that what the engine
    says for a request is the same whatever else it computes at that moment.
    """
    rows = params["embed.weight"][contexts].reshape(len(contexts), 1, params["hidden.weight"].shape[0])
    hidden = np.tanh(rows @ params["hidden.weight"] + params["hidden.bias"])
    out: Array = (hidden @ params["output.weight"] + params["output.bias"])[:, 0, :]
    out[:, BOS] = NEVER
    return out


def log_softmax(scores: Array) -> Array:
    """Row-wise logarithms of the probabilities."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def log_probabilities(params: Params, episode: Episode) -> Array:
    """f32 [len(output)]: how likely the policy was to write each output token, at temperature 1."""
    table = log_softmax(logits(params, contexts_of(episode, context_size(params))))
    result: Array = table[np.arange(len(table)), np.asarray(episode[1], dtype=np.int64)]
    return result


def policy_gradient(params: Params, sequences: Sequence[Episode], advantages: Sequence[float]) -> dict[str, Array]:
    """The gradient of the sum over sequences of advantage * log probability of the output, at temperature 1.

    `params` are f32 (or f64), one advantage per sequence; the result has their names, shapes and dtypes. Add it, times a
    learning rate.
    """
    if len(sequences) != len(advantages):
        raise ValueError(f"{len(sequences)} sequences but {len(advantages)} advantages")
    grads = {name: np.zeros_like(array) for name, array in params.items()}
    pairs = [(episode, scale) for episode, scale in zip(sequences, advantages, strict=True) if len(episode[1])]
    if not pairs:
        return grads
    size = context_size(params)
    dtype = params["embed.weight"].dtype
    contexts = np.concatenate([contexts_of(episode, size) for episode, _ in pairs])
    targets = np.concatenate([np.asarray(output, dtype=np.int64) for (_, output), _ in pairs])
    weight = np.repeat(np.asarray([scale for _, scale in pairs], dtype=dtype), [len(output) for (_, output), _ in pairs])

    rows = params["embed.weight"][contexts].reshape(len(contexts), -1)
    hidden = np.tanh(rows @ params["hidden.weight"] + params["hidden.bias"])
    scores = hidden @ params["output.weight"] + params["output.bias"]
    scores[:, BOS] = NEVER
    # d(log p[target]) / d(score) = onehot(target) - p
    d_scores = -np.exp(log_softmax(scores)) * weight[:, None]
    d_scores[np.arange(len(targets)), targets] += weight
    d_scores[:, BOS] = 0
    d_hidden = (d_scores @ params["output.weight"].T) * (1 - hidden * hidden)
    d_rows = (d_hidden @ params["hidden.weight"].T).reshape(len(contexts), size, -1)

    grads["output.weight"][...] = hidden.T @ d_scores
    grads["output.bias"][...] = d_scores.sum(axis=0)
    grads["hidden.weight"][...] = rows.T @ d_hidden
    grads["hidden.bias"][...] = d_hidden.sum(axis=0)
    np.add.at(grads["embed.weight"], contexts, d_rows)
    return grads
