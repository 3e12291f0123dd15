"""`stitch verify`: whether the bytes of versions are there and right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape

from stitch.cli import tables
from stitch.cli.options import json_option, log_option, policy_option, run, store_option
from stitch.cli.progress import bar_of, scratch_option, stoppable
from stitch.cli.sizes import size_text
from stitch.core.lineage import Version
from stitch.operators.verification import Checked, verify_versions
from stitch.operators.versions import find, read_policy, unretired
from stitch.operators.watched import Watched
from stitch.store.opening import open_store

ROWS: Final = 40
"""Of the table. Beyond them only what is damaged has one."""


@click.command()
@click.argument("versions", nargs=-1, metavar="[VERSION]...")
@click.option("--all", "every", is_flag=True, help="Every version that was not retired.")
@click.option("--deep", is_flag=True, help="Read every byte, and every tensor of the versions named.")
@click.option("--chain/--no-chain", default=True, show_default=True, help="Also what the versions are built from.")
@scratch_option()
@log_option()
@store_option()
@policy_option()
@json_option()
def verify(
    versions: tuple[str, ...],
    every: bool,
    deep: bool,
    chain: bool,
    scratch: Path | None,
    log_url: str,
    store_url: str,
    policy: str,
    as_json: bool,
) -> None:
    """Check that versions can be loaded. Ends with 1 where one cannot, and says which file or tensor is wrong.

    VERSION is a number (41), a full name (run/weight_v000041) or a channel (latest). Manifests and objects must be there, with the
    right sizes; with --deep every object is read, and each version named is brought as a replica would, tensor by tensor.
    """
    if bool(versions) == every:
        raise click.UsageError("name versions, or give --all")
    lineage = run(read_policy(log_url, policy))
    asked = unretired(lineage) if every else tuple(find(lineage, text) for text in versions)
    with open_store(store_url) as store, stoppable() as stopped:
        watched = Watched(store)
        with bar_of(watched, silent=as_json) as bar:
            checked = verify_versions(
                watched, lineage, asked, deep=deep, chain=chain, scratch=scratch, tell=bar.tell, cancelled=stopped
            )
    sound = all(each.ok for each in checked)
    if as_json:
        click.echo(json.dumps({"ok": sound, "deep": deep, "policy": policy, "versions": [_row(each) for each in checked]}))
    else:
        _print(checked, deep=deep)
    if not sound:
        raise click.exceptions.Exit(1)


def _row(checked: Checked) -> dict[str, Any]:
    version = checked.version
    return {
        "version": str(version.ref),
        "ok": checked.ok,
        "asked": checked.asked,
        "kind": version.kind.value,
        "base": str(version.base) if version.base else None,
        "alias_of": str(version.alias_of) if version.alias_of else None,
        "anchored": version.anchor is not None,
        "objects": checked.objects,
        "bytes": checked.bytes,
        "tensors": checked.tensors,
        "faults": [{"file": fault.file, "what": fault.what} for fault in checked.faults],
    }


def _print(checked: Sequence[Checked], *, deep: bool) -> None:
    console = Console()
    shown = [each for each in checked if len(checked) <= ROWS or not each.ok]
    table = tables.table("version", "form")
    for name in ("objects", "size"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in shown:
        name = f"[bold]{each.version.ref}[/]" if each.asked else str(each.version.ref)
        table.add_row(name, _form(each.version), str(each.objects), size_text(each.bytes), _result(each))
    if shown:
        console.print(table)
    for each in checked:
        for fault in each.faults:  # not within the table, which would break keys into pieces
            file = f"{fault.file}: " if fault.file else ""
            console.print(f"[bold red]{each.version.ref}[/]: {escape(file + fault.what)}", soft_wrap=True, highlight=False)
    console.print(_summary(checked, deep=deep), soft_wrap=True, highlight=False)


def _form(version: Version) -> str:
    form = version.kind.value
    if version.alias_of is not None:
        form = f"the same as {version.alias_of}"
    elif version.base is not None:
        form = f"delta on {version.base.number if version.base.run == version.ref.run else version.base}"
    return f"{form}, and full" if version.anchor is not None else form


def _result(checked: Checked) -> str:
    if not checked.ok:
        return "[bold red]damaged[/]"
    return "[green]ok[/]" if checked.tensors is None else f"[green]ok[/], {checked.tensors} tensors"


def _summary(checked: Sequence[Checked], *, deep: bool) -> str:
    bad = sum(not each.ok for each in checked)
    count = f"{len(checked)} version{'s' if len(checked) != 1 else ''}"
    if bad:
        return f"[bold red]{bad} of {count} damaged[/]"
    size = size_text(sum(each.bytes for each in checked))
    if not deep:
        return f"[green]{count}, {size}: all objects are there, with the right sizes[/] (--deep reads them)"
    brought = [each.version.ref for each in checked if each.tensors is not None]
    which = str(brought[0]) if len(brought) == 1 else "all" if len(brought) == len(checked) else f"{len(brought)} of them"
    return f"[green]{count}, {size}: every byte was read and is right, and every tensor of {which}[/]"
