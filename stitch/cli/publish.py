"""`stitch publish DIR`: a checkpoint directory as a version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from stitch.cli.options import json_option, log_option, policy_option, store_option


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@log_option()
@store_option()
@policy_option()
@click.option("--run", "run_name", required=True, metavar="NAME", help="The numbering that the version belongs to.")
@click.option("--number", type=click.IntRange(min=0), help="Of the version (default: one above the run's greatest).")
@click.option("--kind", type=click.Choice(["auto", "full", "delta"]), default="auto", show_default=True)
@click.option("--boot-version", metavar="VERSION", help="Go on from this version; what lies beyond is abandoned.")
@click.option("--take-over", is_flag=True, help="Open a new run although another owns the policy.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=1800.0, show_default=True, help="Seconds.")
@json_option()
def publish(
    directory: Path,
    log_url: str,
    store_url: str,
    policy: str,
    run_name: str,
    number: int | None,
    kind: Any,
    boot_version: str | None,
    take_over: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Publish a checkpoint directory as a version. On return it is durable and accepted."""
    from stitch.trainer.publisher import Publisher

    boot = int(boot_version) if boot_version is not None and boot_version.isdigit() else boot_version
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("encoding", total=None)

        def told(progress: Any) -> None:
            total = progress.bytes_total or None
            bar.update(task, description=progress.waiting or progress.step.value, completed=progress.bytes_done, total=total)

        with Publisher.open(
            policy=policy,
            run=run_name,
            log=log_url,
            store=store_url,
            boot_version=boot,
            take_over=take_over,
            timeout=timeout,
            progress=told,
        ) as publisher:
            done = publisher.publish(directory, number=number, kind=kind, timeout=timeout)
    if as_json:
        row = {"version": str(done.ref), "number": done.ref.number, "kind": done.kind.value, "manifest_key": done.manifest_key}
        click.echo(
            json.dumps({**row, "weights_digest": done.weights_digest, "bytes_written": done.bytes_written, "offset": done.offset})
        )
    else:
        click.echo(
            f"published {done.ref} of policy {policy}: {done.kind.value}, {done.bytes_written} bytes, at offset {done.offset}"
        )
