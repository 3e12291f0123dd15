"""The demo's training loop: rollouts through the gateway, a policy-gradient step, a published version; and over again.

The next batch is requested before the step's version is published, so rollouts are always in flight while versions change. Each
request allows what is at most `STALENESS` versions behind what was published when it was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from stitch.cli.demo.ledger import Ledger
from stitch.cli.demo.scene import POLICY, RUN, Scene
from stitch.cli.demo.task import ANSWER_TOKENS, GROUP, Adam, advantages, prompts, reward
from stitch.engines.reference import checkpoint
from stitch.engines.reference.model import Episode, encode, to_bf16, to_f32
from stitch.trainer.publisher import Publisher
from stitch.trainer.rollout_answer import Answer
from stitch.trainer.rollout_client import AsyncRolloutClient

GROUPS: Final = 8
"""Prompts in a batch."""
STALENESS: Final = 2
"""Versions that a rollout may be behind."""
WAIT_SECONDS: Final = 30.0
"""How long a request waits at the gateway for a version that is fresh enough."""
REQUEST_SECONDS: Final = 60.0
"""Deadline of a request with all its retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer, and what it is worth."""

    prompt: str
    answer: Answer
    reward: float

    @property
    def episode(self) -> Episode:
        return encode(self.prompt), list(self.answer.output_ids or ())


async def learn(scene: Scene, publisher: Publisher, base: Path, *, steps: int, seed: int) -> None:
    """Trains for `steps` versions; adds a replica at a third of the way and kills one at two thirds."""
    rng = np.random.default_rng(seed)
    learner = Adam(to_f32(checkpoint.load(base)))
    async with AsyncRolloutClient(scene.gateway_url, policy=POLICY, run=RUN) as client:
        batch = await collect(client, scene.ledger, prompts(rng, GROUPS))
        for step in range(1, steps + 1):
            rollouts = [rollout for group in batch for rollout in group]
            scene.ledger.rewards.append(fmean(r.reward for r in rollouts))
            weights = [w for group in batch for w in advantages([r.reward for r in group])]
            learner.step([r.episode for r in rollouts], weights)
            upcoming = asyncio.create_task(collect(client, scene.ledger, prompts(rng, GROUPS))) if step < steps else None
            done = await asyncio.to_thread(publisher.publish, to_bf16(learner.params))
            scene.ledger.published(done.ref.number, done.weights_digest)
            scene.ledger.prove()
            await _disturb(scene, step, steps)
            if upcoming is not None:
                batch = await upcoming


async def collect(client: AsyncRolloutClient, ledger: Ledger, batch: Sequence[str]) -> list[list[Rollout]]:
    """A group of rollouts for each prompt."""
    least = max(0, ledger.head - STALENESS)
    return await asyncio.gather(*(_group(client, ledger, prompt, least) for prompt in batch))


async def _group(client: AsyncRolloutClient, ledger: Ledger, prompt: str, least: int) -> list[Rollout]:
    return await asyncio.gather(*(_rollout(client, ledger, prompt, least) for _ in range(GROUP)))


async def _rollout(client: AsyncRolloutClient, ledger: Ledger, prompt: str, least: int) -> Rollout:
    sampling = {"max_new_tokens": ANSWER_TOKENS, "temperature": 1.0}
    answer = await client.generate(
        prompt=prompt, sampling_params=sampling, min_version=least, wait=WAIT_SECONDS, timeout=REQUEST_SECONDS
    )
    ledger.answered(answer, least=least)
    return Rollout(prompt=prompt, answer=answer, reward=reward(prompt, answer.output_ids or ()))


async def _disturb(scene: Scene, step: int, steps: int) -> None:
    if step == max(1, steps // 3):
        await scene.add_replica()
    if step == max(2, 2 * steps // 3):
        await scene.kill_replica()
