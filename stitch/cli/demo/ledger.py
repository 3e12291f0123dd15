"""The demo's books: what was learnt, who served what, and whether any answer lied.

An answer's spans say which versions computed it. The reference engine says, apart from that, what the arrays in its memory
hashed to for each token. The ledger holds one against the other, by the weights digest of each version's manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from stitch.core.events import Phase, ReplicaState, Transition
from stitch.core.ids import ReplicaId
from stitch.trainer.rollout_answer import Answer


@dataclass(slots=True)
class Ledger:
    """Counts of one demo. Versions are the numbers of its one run."""

    steps: int
    rewards: list[float] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    replicas: dict[ReplicaId, ReplicaState] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    last_pause: dict[ReplicaId, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    answers: int = 0
    wrong: int = 0
    violations: int = 0
    activations: int = 0
    added: int = 0
    killed: int = 0
    _unproven: list[Answer] = field(default_factory=list)

    @property
    def head(self) -> int:
        """The newest published version."""
        return max(self.digests, default=0)

    def published(self, number: int, weights_digest: str) -> None:
        """A version exists, with the digest that its manifest states."""
        self.digests[number] = weights_digest

    def answered(self, answer: Answer, *, least: int) -> None:
        """An answer to a request that allowed no version below `least`."""
        self.answers += 1
        self.served[answer.replica or "?"] += 1
        self.staleness[self.head - answer.version_start] += 1
        if min(version for version, _, _ in answer.spans) < least:
            self.violations += 1
        self._unproven.append(answer)

    def prove(self) -> None:
        """Holds every answer so far against the engines' own digests. Call it once the versions they name are recorded."""
        waiting, self._unproven = self._unproven, []
        for answer in waiting:
            if any(version not in self.digests for version, _, _ in answer.spans) and self.head < answer.version_end:
                self._unproven.append(answer)
            elif not truthful(answer, self.digests):
                self.wrong += 1

    def heard(self, state: ReplicaState) -> None:
        """A record of the activation stream."""
        self.replicas[state.replica] = state
        if state.transition is Transition.ACTIVATED:
            self.activations += 1
            if state.pause_ms:
                self.pauses.append(state.pause_ms)
                self.last_pause[state.replica] = state.pause_ms

    def serving(self, replica: ReplicaId) -> bool:
        """Whether the replica said that it is in rotation."""
        state = self.replicas.get(replica)
        return state is not None and state.phase in (Phase.SERVING, Phase.ACTIVATING)

    def result(self, seconds: float) -> dict[str, Any]:
        """What `stitch demo --json` prints last."""
        self.prove()
        tenth = max(1, len(self.rewards) // 10)
        return {
            "reward_first": round(fmean(self.rewards[:tenth]), 4) if self.rewards else None,
            "reward_last": round(fmean(self.rewards[-tenth:]), 4) if self.rewards else None,
            "versions": len(self.digests),
            "activations": self.activations,
            "pause_ms_p50": round(median(self.pauses), 2) if self.pauses else None,
            "staleness_max": max(self.staleness, default=0),
            "answers": self.answers,
            "wrong_version_answers": self.wrong + len(self._unproven),
            "constraint_violations": self.violations,
            "replicas_added": self.added,
            "replicas_killed": self.killed,
            "seconds": round(seconds, 1),
        }


def truthful(answer: Answer, digests: Mapping[int, str]) -> bool:
    """Whether each token's engine digest is that of the version that the answer names for it."""
    told = _per_token((digests.get(version), start, end) for version, start, end in answer.spans)
    engine = _per_token((digest, start, end) for digest, start, end in answer.raw["meta_info"]["weights_digests"])
    return told == engine and None not in told and len(told) == len(answer.output_ids or ())


def _per_token(spans: Any) -> Sequence[str | None]:
    return [digest for digest, start, end in spans for _ in range(start, end)]
