"""`stitch demo`."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.live import Live

from stitch.cli.options import json_option, log_option, run, store_option

FRAMES_PER_SECOND: Final = 4
SEED: Final = 7


@click.command()
@click.option("--steps", type=click.IntRange(min=3), default=100, show_default=True, help="Versions to publish.")
@click.option("--replicas", type=click.IntRange(min=1), default=2, show_default=True, help="Replicas to begin with.")
@log_option(required=False)
@store_option(required=False)
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Leave log, store and the processes' logs there.")
@json_option()
def demo(steps: int, replicas: int, log_url: str | None, store_url: str | None, keep: Path | None, as_json: bool) -> int:
    """Learn a small task by policy gradient on this machine, a version a step, while replicas follow.

    One replica is added on the way and one is killed. The exit code is 1 where any answer was computed by another version than it
    says, or by one that its request did not allow.
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise click.BadParameter(f"{keep} is not empty; name a new folder", param_hint="--keep")
    workdir = (keep or Path(tempfile.mkdtemp(prefix="stitch-demo-"))).resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        result = run(_demo(steps, replicas, log_url, store_url, workdir, as_json), patience=2)
    finally:
        if keep is None:
            shutil.rmtree(workdir, ignore_errors=True)
    _say(result, as_json, keep)
    return 1 if result["wrong_version_answers"] or result["constraint_violations"] else 0


async def _demo(
    steps: int, replicas: int, log_url: str | None, store_url: str | None, workdir: Path, as_json: bool
) -> dict[str, Any]:
    from stitch.cli.demo.ledger import Ledger
    from stitch.cli.demo.scene import scene

    ledger = Ledger(steps=steps)
    log_url = log_url or f"sqlite://{workdir / 'log.db'}"
    store_url = store_url or f"file://{workdir / 'store'}"
    began = time.monotonic()
    async with scene(workdir=workdir / "processes", log_url=log_url, store_url=store_url, ledger=ledger) as stage:
        watch = _report_lines(stage) if as_json or not sys.stdout.isatty() else _live(stage)
        watching = asyncio.create_task(watch)
        try:
            await _play(stage, log_url, store_url, workdir, steps, replicas)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    return ledger.result(time.monotonic() - began)


async def _play(stage: Any, log_url: str, store_url: str, workdir: Path, steps: int, replicas: int) -> None:
    from stitch.cli.demo.loop import learn
    from stitch.cli.demo.scene import POLICY, RUN
    from stitch.engines.reference.serve import init_checkpoint
    from stitch.trainer.publisher import Publisher

    base = workdir / "base"
    starting = asyncio.create_task(stage.pool.scale(replicas))
    init_checkpoint(base, SEED)
    publisher = await asyncio.to_thread(Publisher.open, policy=POLICY, run=RUN, log=log_url, store=store_url, base=base)
    try:
        await starting
        stage.ledger.notes.append("replicas load version 0")
        await stage.wait_for(replicas)
        await learn(stage, publisher, base, steps=steps, seed=SEED)
    finally:
        await asyncio.to_thread(publisher.close)


async def _live(stage: Any) -> None:
    from stitch.cli.demo.view import render

    with Live(refresh_per_second=FRAMES_PER_SECOND, screen=False) as live:
        try:
            while True:
                live.update(render(stage.ledger, stage.killed, "stitch demo"))
                await asyncio.sleep(1 / FRAMES_PER_SECOND)
        finally:
            live.update(render(stage.ledger, stage.killed, "stitch demo"))


async def _report_lines(stage: Any) -> None:
    """For a terminal that is none: a line for every few steps, to stderr."""
    told = 0
    while True:
        ledger = stage.ledger
        if len(ledger.rewards) >= told + max(1, ledger.steps // 10):
            told = len(ledger.rewards)
            click.echo(
                f"step {told}/{ledger.steps}  reward {ledger.rewards[-1]:.2f}  head {ledger.head}  replicas {stage.alive()}  "
                f"answers {ledger.answers}  wrong {ledger.wrong}",
                err=True,
            )
        await asyncio.sleep(1 / FRAMES_PER_SECOND)


def _say(result: dict[str, Any], as_json: bool, keep: Path | None) -> None:
    if as_json:
        click.echo(json.dumps(result))
        return
    console = Console()
    console.print(
        f"reward {result['reward_first']} -> {result['reward_last']} over {result['versions']} versions, "
        f"{result['answers']} answers, {result['activations']} activations "
        f"(pause {result['pause_ms_p50']} ms at the median), {result['seconds']} s"
    )
    console.print(
        f"wrong-version answers: {result['wrong_version_answers']}   constraint violations: {result['constraint_violations']}   "
        f"replicas added: {result['replicas_added']}, killed: {result['replicas_killed']}"
    )
    if keep is not None:
        console.print(f"left in {keep}: look with  stitch log tail --log sqlite://{keep.resolve() / 'log.db'}")
