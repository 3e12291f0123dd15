"""`stitch pull`: a version as a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path

import click

from stitch.cli.options import json_option, log_option, policy_option, run, store_option
from stitch.cli.progress import bar_of, stoppable
from stitch.cli.sizes import Size, size_text
from stitch.core.errors import StitchError
from stitch.operators.pulling import Pulled, check_free, scratch_of
from stitch.operators.pulling import pull as pull_version
from stitch.operators.versions import find, read_policy
from stitch.operators.watched import Watched
from stitch.store.opening import open_store


@click.command()
@click.argument("version")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--max-shard-size", type=Size(), default="5GB", show_default=True, metavar="SIZE", help="Of one weight file.")
@log_option()
@store_option()
@policy_option()
@json_option()
def pull(version: str, directory: Path, max_shard_size: int, log_url: str, store_url: str, policy: str, as_json: bool) -> None:
    """Write a version as a checkpoint directory that any loader takes, with its configuration and tokenizer.

    VERSION is a number (41), a full name (run/weight_v000041) or a channel (latest). DIRECTORY is new or empty, and appears as a
    whole once everything was verified. What was interrupted goes on when the same command is run again.
    """
    check_free(directory)
    lineage = run(read_policy(log_url, policy))
    found = find(lineage, version)
    with open_store(store_url) as store:
        watched = Watched(store)
        try:
            with stoppable() as stopped, bar_of(watched, silent=as_json) as bar:
                pulled = pull_version(
                    watched, lineage, found, directory, max_shard_bytes=max_shard_size, tell=bar.tell, cancelled=stopped
                )
        except (StitchError, OSError, KeyboardInterrupt):
            if (scratch := scratch_of(directory)).exists():
                click.echo(f"What was brought so far is in {scratch}; the same command goes on from it.", err=True)
            raise
    click.echo(json.dumps(_row(pulled)) if as_json else _told(pulled))


def _row(pulled: Pulled) -> dict[str, object]:
    return {
        "version": str(pulled.ref),
        "directory": str(pulled.directory),
        "weights_digest": pulled.weights_digest,
        "weights": list(pulled.weights),
        "files": list(pulled.files),
        "bytes": pulled.bytes,
        "bytes_downloaded": pulled.bytes_downloaded,
    }


def _told(pulled: Pulled) -> str:
    weights = pulled.weights[0] if len(pulled.weights) == 1 else f"{len(pulled.weights)} shards"
    beside = ", ".join(pulled.files) if len(pulled.files) <= 4 else f"{len(pulled.files)} other files"
    return (
        f"pulled {pulled.ref} of policy {pulled.ref.policy} into {pulled.directory}: "
        f"{weights}{f' and {beside}' if beside else ''}, {size_text(pulled.bytes)}, every tensor verified"
    )
