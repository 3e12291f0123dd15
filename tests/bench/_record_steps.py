"""Records steps of a small transformer under AdamW: `python -m tests.bench._record_steps` (needs torch; a few minutes).

A byte-level transformer with fp32 master weights first learns to continue this repository's own text, then takes policy-gradient
steps with the settings that RL trainers use (learning rate 1e-6 to 3e-6, betas .9 and .98, weight decay .1, gradients clipped to
1): groups of completions are sampled from the model itself, each rewarded by the share of letters in it, advantages normalised
within the group. What is recorded is what a rollout engine would be given: the weights rounded to bf16, after every step.

The recording (`_steps.py` reads it) holds the base as planes of low and high bytes, and each step as the distance between changed
places and new minus old; it owes nothing to the codec that it is there to measure.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bench._steps import RECORDING

ROOT = Path(__file__).parents[2]
SEED = 20
VOCABULARY, WIDTH, HEADS, LAYERS, HIDDEN = 256, 160, 5, 4, 432
CONTEXT, COMPLETION, GROUPS, GROUP = 40, 16, 4, 8
LEARNING_STEPS, SETTLING_STEPS = 800, 20
RATES = [1e-6] * 12 + [2e-6] * 12 + [3e-6] * 12
"""Learning rates of the recorded steps."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.post_attention_layernorm = nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        query, key, value = (
            project(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(-2))
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT + COMPLETION, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * LAYERS) if deep else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def text() -> Tensor:
    files = sorted([*ROOT.glob("stitch/**/*.py"), *ROOT.glob("docs/**/*.md")])
    return torch.tensor(np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8).astype(np.int64))


def windows(source: Tensor, count: int, length: int) -> Tensor:
    starts = torch.randint(len(source) - length, (count,))
    return torch.stack([source[start : start + length] for start in starts])


def step(model: Model, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def learn(model: Model, source: Tensor) -> None:
    """Plain next-byte training, so that the weights are those of a model and not noise."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)
    for number in range(LEARNING_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (number + 1) / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * number / LEARNING_STEPS)) / 2)
        batch = windows(source, 24, CONTEXT + COMPLETION)
        loss = functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        step(model, optimizer, loss)
        if number % 100 == 0:
            print(f"learning: step {number}, loss {loss.item():.3f}", file=sys.stderr)


@torch.no_grad()
def sample(model: Model, prompts: Tensor) -> Tensor:
    tokens = prompts
    for _ in range(COMPLETION):
        chances = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
    return tokens


def reward(completions: Tensor) -> Tensor:
    """The share of letters."""
    lower = completions | 32
    return ((lower >= ord("a")) & (lower <= ord("z"))).float().mean(1)


def policy_loss(model: Model, source: Tensor) -> Tensor:
    prompts = windows(source, GROUPS, CONTEXT).repeat_interleave(GROUP, 0)
    tokens = sample(model, prompts)
    rewards = reward(tokens[:, CONTEXT:]).reshape(GROUPS, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
    taken = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[:, CONTEXT - 1 :, 0]
    return -(advantages * taken).mean()


def record(model: Model, source: Tensor, keep: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Calls `keep` with the bf16 weights, as bit patterns, of the base and then after every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[0], betas=(0.9, 0.98), weight_decay=0.1)
    for number in range(SETTLING_STEPS + len(RATES)):
        if number >= SETTLING_STEPS:
            optimizer.param_groups[0]["lr"] = RATES[number - SETTLING_STEPS]
        if number == SETTLING_STEPS:
            keep(bits(model))
        step(model, optimizer, policy_loss(model, source))
        if number >= SETTLING_STEPS:
            keep(bits(model))


def bits(model: Model) -> dict[str, np.ndarray]:
    return {name: tensor.detach().bfloat16().view(torch.uint16).numpy().copy() for name, tensor in model.named_parameters()}


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the same sums in the same order, on any machine
    source = text()
    model = Model()
    learn(model, source)
    states: list[np.ndarray] = []
    shapes: dict[str, list[int]] = {}

    def keep(weights: dict[str, np.ndarray]) -> None:
        shapes.update({name: list(array.shape) for name, array in weights.items()})
        states.append(np.concatenate([array.reshape(-1) for array in weights.values()]))
        if len(states) > 1:
            print(f"step {len(states) - 1}: {np.mean(states[-1] != states[-2]):.2%} changed", file=sys.stderr)

    record(model, source, keep)
    low, high = states[0].view(np.uint8).reshape(-1, 2).T
    arrays = {"base_low": low.copy(), "base_high": high.copy()}
    for number, (old, new) in enumerate(pairwise(states), 1):
        where = np.flatnonzero(old != new)
        arrays[f"gaps_{number}"] = np.diff(where, prepend=-1).astype(np.uint32 if np.diff(where).max() > 65535 else np.uint16)
        arrays[f"differences_{number}"] = (new[where] - old[where]).view(np.int16)
    about = {"shapes": shapes, "rates": RATES, "steps": len(RATES)}
    RECORDING.parent.mkdir(exist_ok=True)
    np.savez_compressed(RECORDING, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
    print(f"{RECORDING}: {RECORDING.stat().st_size / 1e6:.2f} MB, {states[0].size} parameters", file=sys.stderr)


if __name__ == "__main__":
    main()
