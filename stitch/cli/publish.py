"""`stitch publish DIR`: a checkpoint directory as a version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from stitch.cli.options import json_option, log_option, policy_option, store_option
from stitch.cli.progress import Bar
from stitch.cli.sizes import size_text

if TYPE_CHECKING:
    from stitch.trainer.attempt import Progress
    from stitch.trainer.author import Publication

STEPS: Final = {
    "encoded": "uploading",
    "uploaded": "writing the manifest",
    "described": "deciding",
    "appended": "deciding",
    "accepted": "accepted",
    "done": "finishing",
}
"""What comes after a step that a publisher tells of; the others tell what is being done."""
WAITING_CHARACTERS: Final = 60
"""Of why the log or the store is waited for; the error at the end has all of it."""


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@log_option()
@store_option()
@policy_option()
@click.option("--run", "run_name", required=True, metavar="NAME", help="The numbering that the version belongs to.")
@click.option("--number", type=click.IntRange(min=0), help="Default: one above the run's greatest, or a delta directory's own.")
@click.option("--kind", type=click.Choice(["auto", "full", "delta"]), default="auto", show_default=True)
@click.option(
    "--base",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Checkpoint that a new run begins with, as version 0 or --boot-version.",
)
@click.option("--boot-version", metavar="VERSION", help="Go on from this version; what lies beyond is abandoned.")
@click.option("--take-over", is_flag=True, help="Open a new run although another owns the policy.")
@click.option(
    "--previous",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Checkpoint with the weights of the version before: a delta then holds what changed, not whole tensors.",
)
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
    base: Path | None,
    boot_version: str | None,
    take_over: bool,
    previous: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Publish a checkpoint directory as a version. On return it is durable and accepted.

    DIRECTORY is a checkpoint as Hugging Face's tools write it, or a version directory of Slime or Miles, full or delta. Files
    beside the weights (configuration, tokenizer) go along.

    Ends with 3 where the outcome is unknown: run the same command again, which settles it. Ends with 4 where another writer owns
    the policy.
    """
    from stitch.trainer.publisher import Publisher

    boot = int(boot_version) if boot_version is not None and boot_version.isdecimal() else boot_version
    steps = _Steps(silent=as_json)
    with (
        steps.bar,
        Publisher.open(
            policy=policy,
            run=run_name,
            log=log_url,
            store=store_url,
            boot_version=boot,
            base=base,
            take_over=take_over,
            previous=previous,
            keep_previous=False,
            timeout=timeout,
            progress=steps.told,
        ) as publisher,
    ):
        done = publisher.publish(directory, number=number, kind=kind, timeout=timeout)
    click.echo(json.dumps(_row(done)) if as_json else _text(done))


class _Steps:
    """A publisher's progress, on a bar."""

    def __init__(self, *, silent: bool) -> None:
        self._bytes: tuple[int, int | None] = (0, None)
        self.bar = Bar(Console(stderr=True), lambda: self._bytes, silent=silent)
        self.bar.tell("opening")

    def told(self, progress: Progress) -> None:
        self._bytes = progress.bytes_done, progress.bytes_total or None
        text = STEPS.get(progress.step.value, progress.step.value)
        if progress.waiting is not None:
            text = f"waiting: {progress.waiting[:WAITING_CHARACTERS]}"
        elif progress.tensors_total:
            text = f"{text}, {progress.tensors_done} of {progress.tensors_total} tensors"
        self.bar.tell(text)


def _row(done: Publication) -> dict[str, Any]:
    return {
        "version": str(done.ref),
        "number": done.ref.number,
        "kind": done.kind.value,
        "manifest_key": done.manifest_key,
        "weights_digest": done.weights_digest,
        "bytes_written": done.bytes_written,
        "offset": done.offset,
    }


def _text(done: Publication) -> str:
    size = size_text(done.bytes_written)
    return f"published {done.ref} of policy {done.ref.policy}: {done.kind.value}, {size}, at offset {done.offset}"
