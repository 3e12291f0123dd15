"""A training loop of one's own on Stitch: rollouts through the gateway, a step, a published version.

    stitch engine reference --init base
    stitch gateway --log sqlite://run/log.db --port 8000 &
    stitch replica --log sqlite://run/log.db --store file://run/store --policy mine --workdir run/replica &
    python my_loop.py --log sqlite://run/log.db --store file://run/store --gateway http://127.0.0.1:8000 --base base

The policy is the reference engine's; with SGLang, `train` holds your own model and the rest stays as it is.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import stitch
from stitch.engines.reference import checkpoint
from stitch.engines.reference.model import encode, policy_gradient, to_bf16, to_f32

PROMPTS = [f"letter after {letter}:" for letter in "abcd"]
SAMPLES, TOKENS, STALENESS = 16, 4, 2


def reward(prompt: str, output_ids: list[int]) -> float:
    """How much of the answer is the letter that was asked for; any lower-case letter is a beginning."""
    wanted = ord(prompt[-2]) + 1
    return sum(1.0 if token == wanted else 0.2 * (97 <= token <= 122) for token in output_ids) / TOKENS


def train(params: dict, episodes: list, rewards: np.ndarray, rate: float = 0.3) -> None:
    """One step of policy gradient, each prompt's mean reward as the baseline of its answers."""
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, keepdims=True) + 1e-3)
    gradient = policy_gradient(params, episodes, list(advantages.ravel() / len(episodes)))
    for name, array in params.items():
        array += (rate * gradient[name]).astype(np.float32)


def main() -> None:
    options = argparse.ArgumentParser()
    for name in ("log", "store", "gateway", "base"):
        options.add_argument(f"--{name}", required=True)
    options.add_argument("--policy", default="mine")
    options.add_argument("--run", default="my-run")
    options.add_argument("--steps", type=int, default=20)
    given = options.parse_args()

    params = to_f32(checkpoint.load(Path(given.base)))
    with (
        stitch.Publisher.open(policy=given.policy, run=given.run, log=given.log, store=given.store, base=given.base) as publisher,
        stitch.RolloutClient(given.gateway, policy=given.policy, run=given.run) as client,
        ThreadPoolExecutor(32) as threads,
    ):

        def rollout(prompt: str, least: int) -> stitch.Answer:
            sampling = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
            return client.generate(prompt=prompt, sampling_params=sampling, min_version=least, wait=30)

        for step in range(given.steps):
            least = max(0, publisher.next_number - 1 - STALENESS)
            asked = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
            answers = list(threads.map(rollout, asked, [least] * len(asked)))
            episodes = [(encode(prompt), answer.output_ids) for prompt, answer in zip(asked, answers, strict=True)]
            rewards = np.array([reward(prompt, output) for prompt, (_, output) in zip(asked, episodes, strict=True)])
            train(params, episodes, rewards.reshape(len(PROMPTS), SAMPLES))
            done = publisher.publish(to_bf16(params))
            oldest = min(answer.version_start for answer in answers)
            print(f"step {step}: reward {rewards.mean():.3f}, oldest version used {oldest}, published {done.ref}", flush=True)


if __name__ == "__main__":
    main()
