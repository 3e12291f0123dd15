"""`stitch diff`: what changed from one version to another, as a table of tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stitch.cli import tables
from stitch.cli.options import json_option, log_option, policy_option, run, store_option
from stitch.cli.progress import bar_of, scratch_option, stoppable
from stitch.cli.sizes import size_text
from stitch.operators.difference import SORTS, Change, Difference, TensorChange, Way, difference, ordered
from stitch.operators.values import Moved
from stitch.operators.versions import find, read_policy
from stitch.operators.watched import Watched
from stitch.store.opening import open_store

BINS: Final = 8
"""Columns of the histogram; the last one holds all that moved further."""
LEGEND: Final = "by one: to a neighbouring number; steps: by 1, 2-3, 4-7, 8-15, … 128 and more"
LEGEND_OF_VALUES: Final = "largest: |difference|; relative: its norm over the norm of V1's tensor"
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_COLOURS: Final = {Change.ADDED: "green", Change.REMOVED: "red", Change.RESHAPED: "yellow"}


@click.command()
@click.argument("first", metavar="V1")
@click.argument("second", metavar="V2")
@click.option("--values", is_flag=True, help="Compare values also where a delta tells what changed.")
@click.option("--sort", type=click.Choice(sorted(SORTS)), default="share", show_default=True, help="Greatest first.")
@click.option("--top", type=click.IntRange(min=0), default=20, show_default=True, help="Tensors in the table; 0 for all.")
@scratch_option()
@log_option()
@store_option()
@policy_option()
@json_option()
def diff(
    first: str,
    second: str,
    values: bool,
    sort: str,
    top: int,
    scratch: Path | None,
    log_url: str,
    store_url: str,
    policy: str,
    as_json: bool,
) -> None:
    """Show what changed from version V1 to V2, tensor by tensor: how many values, and by how much.

    V1 and V2 are numbers (41), full names (run/weight_v000041) or channels (latest), also of two runs. Where V2 is a sparse delta
    on V1, the delta alone is downloaded, and tells of steps between neighbouring numbers; otherwise, or with --values, both
    versions are brought, and their values are compared.
    """
    lineage = run(read_policy(log_url, policy))
    versions = find(lineage, first), find(lineage, second)
    with open_store(store_url) as store, stoppable() as stopped:
        watched = Watched(store)
        with bar_of(watched, silent=as_json) as bar:
            found = difference(watched, lineage, *versions, values=values, scratch=scratch, tell=bar.tell, cancelled=stopped)
    shown = ordered(found.tensors, sort)[: top or None]
    if as_json:
        click.echo(json.dumps(_report(found, shown)))
    else:
        _print(found, shown)


# --- for programs --------------------------------------------------------------------------------------------------------------


def _report(found: Difference, shown: Sequence[TensorChange]) -> dict[str, Any]:
    return {
        "first": str(found.first),
        "second": str(found.second),
        "way": found.way.value,
        "changed_tensors": len(found.tensors),
        "unchanged_tensors": found.unchanged,
        "values": found.values,
        "changed_values": _changed(found),
        "bytes": found.bytes,
        "stored": found.stored,
        "tensors": [_row(tensor) for tensor in shown],
    }


def _row(tensor: TensorChange) -> dict[str, Any]:
    moved = tensor.moved
    return {
        "name": tensor.name,
        "change": tensor.change.value,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "old_dtype": tensor.old_dtype,
        "old_shape": None if tensor.old_shape is None else list(tensor.old_shape),
        "values": tensor.values,
        "share": tensor.share,
        "changed": moved.changed if moved else tensor.values,
        "by_one_step": moved.by_one if moved else None,
        "steps": list(moved.steps) if moved else None,
        "largest": moved.largest if moved else None,
        "relative": moved.relative if moved else None,
        "nonfinite": moved.nonfinite if moved else None,
        "stored": tensor.stored,
    }


# --- for people ----------------------------------------------------------------------------------------------------------------


def _print(found: Difference, shown: Sequence[TensorChange]) -> None:
    console = Console()
    if shown:
        console.print(_table(found, shown))
    if len(shown) < len(found.tensors):
        console.print(f"and {len(found.tensors) - len(shown)} more; --top 0 shows all", highlight=False)
    if shown and any(tensor.moved is not None for tensor in shown):
        console.print(f"[dim]{LEGEND}[/]", highlight=False)
        if found.way is Way.VALUES:
            console.print(f"[dim]{LEGEND_OF_VALUES}[/]", highlight=False)
    for line in _notes(found):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(_summary(found), soft_wrap=True, highlight=False)


def _table(found: Difference, shown: Sequence[TensorChange]) -> Table:
    table = tables.table()
    table.add_column("tensor", overflow="fold", ratio=1)
    table.add_column("form", overflow="fold")
    by_values, stored = found.way is Way.VALUES, any(tensor.stored is not None for tensor in shown)
    for name in ("changed", "by one", *(("largest", "relative") if by_values else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("steps", no_wrap=True)
    if stored:
        table.add_column("delta", justify="right", no_wrap=True)
    for tensor in shown:
        cells = [escape(tensor.name), _form(tensor)]
        if tensor.moved is None:
            cells += [f"[{_COLOURS[tensor.change]}]{tensor.change}[/]", "", *(("", "") if by_values else ()), ""]
        else:
            cells += _cells(tensor, tensor.moved, by_values=by_values)
        if stored:
            cells.append("" if tensor.stored is None else size_text(tensor.stored))
        table.add_row(*cells)
    return table


def _form(tensor: TensorChange) -> str:
    form = _form_text(tensor.dtype, tensor.shape)
    if tensor.old_dtype is None or tensor.old_shape is None:
        return form
    return f"{_form_text(tensor.old_dtype, tensor.old_shape)} → {form}"


def _form_text(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype} {'×'.join(map(str, shape))}".rstrip()


def _cells(tensor: TensorChange, moved: Moved, *, by_values: bool) -> list[str]:
    known = sum(moved.steps)
    cells = [_percent(tensor.share), _percent(moved.by_one / known) if known else "?"]
    if by_values:
        cells += [_number(moved.largest), _number(moved.relative)]
    return [*cells, f"[cyan]{_histogram(moved.steps)}[/]"]


def _percent(share: float) -> str:
    if 0 < share < 0.0001:  # what would be rounded to nothing
        return "<0.01%"
    return "100%" if share == 1 else f"{100 * share:.2f}%" if share < 0.9999 else ">99.99%"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _histogram(steps: Sequence[int]) -> str:
    """One column for values that moved by 1 step, by 2 to 3, by 4 to 7, and so on; the tallest is full."""
    bins = [*steps[: BINS - 1], sum(steps[BINS - 1 :])]
    most = max(bins, default=0)
    return "".join(_BLOCKS[max(1, round(8 * count / most)) if count else 0] for count in bins).ljust(BINS)


def _notes(found: Difference) -> list[str]:
    nonfinite = [tensor for tensor in found.tensors if tensor.moved is not None and tensor.moved.nonfinite]
    notes = []
    if nonfinite:
        names = ", ".join(escape(tensor.name) for tensor in nonfinite[:3])
        count = sum(tensor.moved.nonfinite or 0 for tensor in nonfinite if tensor.moved is not None)
        notes.append(f"[bold red]infinite or not a number now[/]: {count:,} of the changed values, in {names}")
    for change, colour in _COLOURS.items():
        if tensors := found.of(change):
            names = ", ".join(escape(tensor.name) for tensor in tensors[:3]) + (" and others" if len(tensors) > 3 else "")
            notes.append(f"[{colour}]{len(tensors)} {change}[/]: {names}")
    return notes


def _changed(found: Difference) -> int:
    return sum(tensor.moved.changed for tensor in found.tensors if tensor.moved is not None)


def _summary(found: Difference) -> str:
    between = f"[bold]{found.first} → {found.second}[/]"
    if found.way is Way.SAME:
        return f"{between}: the same weights, bit for bit"
    values = found.of(Change.VALUES)
    steps = [tensor.moved.steps for tensor in values if tensor.moved is not None]
    known, by_one = sum(map(sum, steps)), sum(each[0] for each in steps if each)
    total = len(found.tensors) - len(found.of(Change.REMOVED)) + found.unchanged
    share = _percent(_changed(found) / max(1, found.values))
    text = f"{between}: {share} of {found.values:,} values changed, in {len(values)} of {total} tensors"
    if known:
        text += f"; {_percent(by_one / known)} of them by one step"
    if found.stored is not None:
        text += f"; a delta of {size_text(found.stored)} for {size_text(found.bytes)}"
    return text
