"""What the demo's policy learns: to answer with digits of the parity of the one that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from stitch.engines.reference.model import Array, Episode, Params, policy_gradient

ANSWER_TOKENS: Final = 6
GROUP: Final = 12
"""Answers to one prompt, whose mean reward is the baseline of each."""
_DIGIT: Final = 0.2
"""Reward of a digit of the wrong parity: the first thing to be learnt is to write digits."""


def prompts(rng: np.random.Generator, groups: int) -> list[str]:
    """As many prompts, each with a random digit."""
    return [f"like {rng.integers(10)}:" for _ in range(groups)]


def reward(prompt: str, output_ids: Sequence[int]) -> float:
    """0 to 1: the mean over the answer's places of 1 for a digit of the prompt's parity, 0.2 for another digit."""
    parity = int(prompt[-2]) % 2
    total = 0.0
    for token in output_ids[:ANSWER_TOKENS]:
        if ord("0") <= token <= ord("9"):
            total += 1.0 if (token - ord("0")) % 2 == parity else _DIGIT
    return total / ANSWER_TOKENS


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one prompt's answers against their mean, in units of their spread."""
    values = np.asarray(rewards)
    return [float(a) for a in (values - values.mean()) / (values.std() + 1e-3)]


class Adam:
    """The optimizer of Kingma and Ba (2015), ascending, over f32 master weights."""

    def __init__(self, params: Params, *, learning_rate: float = 0.005, beta1: float = 0.9, beta2: float = 0.95) -> None:
        self.params: dict[str, Array] = {name: array.copy() for name, array in params.items()}
        self._rate, self._beta1, self._beta2 = learning_rate, beta1, beta2
        self._mean = {name: np.zeros_like(array) for name, array in params.items()}
        self._square = {name: np.zeros_like(array) for name, array in params.items()}
        self._steps = 0

    def step(self, episodes: Sequence[Episode], weights: Sequence[float]) -> None:
        """One step along the policy gradient of the episodes, each with its advantage."""
        self._steps += 1
        gradient = policy_gradient(self.params, episodes, [w / len(episodes) for w in weights])
        for name, g in gradient.items():
            self._mean[name] = self._beta1 * self._mean[name] + (1 - self._beta1) * g
            self._square[name] = self._beta2 * self._square[name] + (1 - self._beta2) * g * g
            mean = self._mean[name] / (1 - self._beta1**self._steps)
            square = self._square[name] / (1 - self._beta2**self._steps)
            self.params[name] += (self._rate * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
