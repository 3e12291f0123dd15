"""`stitch engine reference`: the reference engine as a process, and random checkpoints for it."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def engine() -> None:
    """Run the reference engine, or make a checkpoint for it."""


@engine.command()
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Checkpoint directory to serve.")
@click.option(
    "--init", "init_dir", type=click.Path(path_type=Path), metavar="DIR", help="Write a random base checkpoint there and end."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random checkpoint.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=int, default=0, show_default=True, help="0 takes a free one.")
@click.option("--label", default="0", show_default=True, help="The weight version to begin with.")
@click.option("--misbehave-allowed", is_flag=True, help="Offer faults on demand at /misbehave, for tests.")
@click.option("--parent-pid", type=int, hidden=True)
def reference(
    model: Path | None,
    init_dir: Path | None,
    seed: int,
    host: str,
    port: int,
    label: str,
    misbehave_allowed: bool,
    parent_pid: int | None,
) -> int:
    """A small policy in numpy, served over SGLang's HTTP contract."""
    from stitch.engines.reference.serve import init_checkpoint, run_reference_engine

    if (model is None) == (init_dir is None):
        raise click.UsageError("give either --model or --init")
    if init_dir is not None:
        init_checkpoint(init_dir, seed)
        click.echo(f"{init_dir}: a random checkpoint of seed {seed}")
        return 0
    assert model is not None
    return run_reference_engine(model, host, port, misbehave_allowed=misbehave_allowed, label=label, parent_pid=parent_pid)
