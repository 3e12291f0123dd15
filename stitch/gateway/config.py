"""What an operator decides about a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.core.ids import PolicyId, PoolName
from stitch.http.request import MAX_WAIT_SECONDS
from stitch.http.server import MAX_BODY

DEADLINE_SECONDS: Final = 30.0
"""Bound on finding a replica with room. Longer than a rolling activation's pause; a client that waits more is better told."""
ANSWER_SECONDS: Final = 3600.0
"""Bound on the wait for an answer's first byte: the longest rollout that is not streamed."""
MAX_WAITING: Final = 4096
"""Requests held for a version or for room; each holds its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """`policy` is meant where a request names none; `pool` restricts the table to the replicas of one pool. Times in seconds."""

    log: str
    host: str = "127.0.0.1"
    port: int = 0
    policy: PolicyId | None = None
    pool: PoolName | None = None
    token: str | None = field(default=None, repr=False)
    default_max_lag: int | None = None
    default_wait: float = 0.0
    max_waiting: int = MAX_WAITING
    deadline: float = DEADLINE_SECONDS
    answer_timeout: float | None = ANSWER_SECONDS
    max_body: int = MAX_BODY

    def __post_init__(self) -> None:
        """Raises InvalidRequest, naming the field."""
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"port: {self.port} is not from 0 to 65535", field="port")
        if self.default_max_lag is not None and self.default_max_lag < 0:
            raise InvalidRequest(f"default_max_lag: {self.default_max_lag} is negative", field="default_max_lag")
        if not 0 <= self.default_wait <= MAX_WAIT_SECONDS:
            raise InvalidRequest(f"default_wait: not from 0 to {MAX_WAIT_SECONDS:g} seconds", field="default_wait")
        if self.max_waiting < 0:
            raise InvalidRequest(f"max_waiting: {self.max_waiting} is negative", field="max_waiting")
        if not 0 < self.deadline <= MAX_WAIT_SECONDS:
            raise InvalidRequest(f"deadline: not above 0 and up to {MAX_WAIT_SECONDS:g} seconds", field="deadline")
