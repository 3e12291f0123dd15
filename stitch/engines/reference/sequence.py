"""One request inside the engine: its prompt, how to sample, what was written so far and by which weights."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stitch.engines.reference.model import BOS, EOS, Array, decode, last_context, log_softmax

TOP_K_ALL: Final = -1
DEFAULT_MAX_NEW_TOKENS: Final = 128
"""SGLang's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(slots=True)
class Span:
    """Output tokens [start, end) came from the weights known by `name`."""

    name: str
    start: int
    end: int


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Mutable; owned by the engine's loop. `text` holds complete characters only, until the end."""

    rid: str
    prompt: Items[int]
    sampling: Sampling
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[Span] = field(default_factory=list)
    digests: list[Span] = field(default_factory=list)
    text: str = ""
    finish: dict[str, Any] | None = None
    retractions: int = 0
    started: float = field(default_factory=time.monotonic)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by every token and by the end; a streaming reader clears it."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    _rng: np.random.Generator = field(init=False)
    _decoder: codecs.IncrementalDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(None if self.sampling.seed is None else abs(self.sampling.seed))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def context(self, size: int) -> list[int]:
        """The last `size` tokens of prompt and output."""
        if len(self.output) >= size:
            return self.output[-size:]
        return last_context([*self.prompt[-size:], *self.output], size)

    def choose(self, scores: Array) -> tuple[int, float]:
        """The next token and its log probability at the request's temperature, before top-k and top-p cut the rest off."""
        sampling = self.sampling
        if sampling.temperature == 0:
            logs = log_softmax(scores)
            token = int(np.argmax(logs))
            return token, float(logs[token])
        logs = log_softmax(scores / np.float32(sampling.temperature))
        allowed = _allowed(logs, sampling)
        # The largest of independently Gumbel-shifted log probabilities is a draw from the distribution.
        noise = self._rng.gumbel(size=logs.shape)
        token = int(np.argmax(np.where(allowed, logs + noise, -np.inf)))
        return token, float(logs[token])

    def append(self, token: int, logprob: float, *, label: str, digest: str) -> None:
        """Takes a token that weights of this label and digest computed, and ends the sequence where it is complete."""
        position = len(self.output)
        self.output.append(token)
        self.logprobs.append(logprob)
        _extend(self.labels, label, position)
        _extend(self.digests, digest, position)
        if token < BOS:
            self.text += self._decoder.decode(bytes((token,)))
        self._check_end(token)
        self.changed.set()

    def _check_end(self, token: int) -> None:
        sampling = self.sampling
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            self.end({"type": "stop", "matched": token})
            return
        for stop in sampling.stop:
            at = self.text.find(stop)
            if at >= 0:
                self.end({"type": "stop", "matched": stop}, text=self.text[:at])
                return
        if len(self.output) >= sampling.max_new_tokens:
            self.end({"type": "length", "length": sampling.max_new_tokens})

    def abort(self) -> None:
        """Ends with what there is. Nothing where it has ended."""
        if self.finish is None:
            self.end({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})

    def end(self, reason: dict[str, Any], *, text: str | None = None) -> None:
        self.finish = reason
        self.text = self.text + self._decoder.decode(b"", final=True) if text is None else text
        self.done.set()
        self.changed.set()


def _extend(spans: list[Span], name: str, position: int) -> None:
    if spans and spans[-1].name == name:
        spans[-1].end = position + 1
    else:
        spans.append(Span(name, position, position + 1))


def _allowed(logs: Array, sampling: Sampling) -> Array:
    """Which tokens may be drawn: the top k, and of those the fewest whose probability reaches top_p."""
    allowed = np.ones(logs.shape, dtype=bool)
    if sampling.top_k == TOP_K_ALL and sampling.top_p >= 1.0:
        return allowed
    order = np.argsort(-logs, kind="stable")
    if sampling.top_k != TOP_K_ALL:
        allowed[order[sampling.top_k :]] = False
    if sampling.top_p < 1.0:
        before = np.cumsum(np.exp(logs[order])) - np.exp(logs[order])
        allowed[order[before >= sampling.top_p]] = False
    return allowed


def token_text(token: int) -> str:
    """One token as text, for log probabilities."""
    return "" if token >= BOS else decode([token])
