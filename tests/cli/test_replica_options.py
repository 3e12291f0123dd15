"""What the command line says of staging is what the replica is configured with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from stitch.cli.main import cli
from stitch.replica.config import ReplicaConfig
from stitch.weights.verify import Verify

pytestmark = pytest.mark.unit

COMMAND = ["replica", "--log", "memory://", "--store", "memory://", "--policy", "p"]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, ReplicaConfig | None]]:
    def configure(*options: str) -> tuple[Result, ReplicaConfig | None]:
        seen: list[ReplicaConfig] = []

        async def run_replica(config: ReplicaConfig, **_: Any) -> int:
            seen.append(config)
            return 0

        monkeypatch.setattr("stitch.replica.main.run_replica", run_replica)
        result = CliRunner().invoke(cli, [*COMMAND, *options])
        return result, seen[0] if seen else None

    return configure


def test_by_default_all_is_verified_in_two_buffers(configured: Callable[..., tuple[Result, ReplicaConfig | None]]) -> None:
    result, config = configured()
    assert config is not None, result.output
    assert (config.verify, config.single_buffer, config.disk_budget, config.memory_budget) == (Verify.FULL, False, None, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("5000", 5000), ("300GB", 300 * 10**9), ("1.5 GiB", 3 * 2**29), ("64MiB", 2**26), ("2k", 2000), ("7B", 7), ("1TiB", 2**40)],
)
def test_sizes_have_units(configured: Callable[..., tuple[Result, ReplicaConfig | None]], text: str, size: int) -> None:
    options = (
        "--disk-budget",
        text,
        "--memory-budget",
        "1MiB",
        "--verify",
        "incremental",
        "--scrub-interval",
        "60",
        "--single-buffer",
    )
    result, config = configured(*options)
    assert config is not None, result.output
    assert (config.disk_budget, config.memory_budget) == (size, 2**20)
    assert (config.verify, config.scrub_seconds, config.single_buffer) == (Verify.INCREMENTAL, 60.0, True)


@pytest.mark.parametrize("text", ["", "GB", "0", "0MiB", "-3", "1e9", "3 apples", "12GBB"])
def test_what_is_no_size_is_refused(configured: Callable[..., tuple[Result, ReplicaConfig | None]], text: str) -> None:
    result, config = configured("--disk-budget", text)
    assert config is None
    assert result.exit_code == 2
    assert "--disk-budget" in result.output
