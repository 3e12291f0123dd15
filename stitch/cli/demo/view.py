"""The demo's live view: reward, versions, replicas, staleness, and the count that must stay 0."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stitch.cli.demo.ledger import Ledger
from stitch.core.events import Phase

WIDTH: Final = 60
HEIGHT: Final = 6
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_COLOURS: Final = {
    Phase.SERVING: "green",
    Phase.ACTIVATING: "yellow",
    Phase.FAILED: "red",
    Phase.LEFT: "dim",
    Phase.DRAINING: "yellow",
}


def render(ledger: Ledger, gone: Sequence[str], title: str) -> RenderableType:
    """One picture of the ledger. `gone` are the replicas that were killed."""
    top = Table.grid(expand=True, padding=(0, 1))
    top.add_column(ratio=3)
    top.add_column(ratio=2)
    top.add_row(
        Panel(_curve(ledger.rewards), title="reward per step", border_style="cyan"),
        Panel(_facts(ledger), title="versions", border_style="cyan"),
    )
    notes = Text("\n".join(ledger.notes[-3:]) or "starting", style="dim")
    progress = Table.grid(expand=True)  # a bar alone does not end its line
    progress.add_row(ProgressBar(total=ledger.steps, completed=len(ledger.rewards)))
    return Panel(Group(progress, top, _replicas(ledger, gone), notes), title=title)


def _curve(rewards: Sequence[float]) -> Text:
    """Columns of eighths of a cell, HEIGHT lines high, the newest WIDTH steps."""
    recent = list(rewards[-WIDTH:])
    lines = []
    for row in reversed(range(HEIGHT)):
        levels = (min(8, max(0, round(value * HEIGHT * 8) - row * 8)) for value in recent)
        lines.append("".join(_BLOCKS[level] for level in levels))
    caption = (
        f"step {len(rewards)}   now {rewards[-1]:.2f}   at first {rewards[0]:.2f}" if rewards else "waiting for the first step"
    )
    return Text("\n".join(lines), style="cyan").append(f"\n{caption}", style="bold")


def _facts(ledger: Ledger) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    bad = "green" if ledger.wrong == 0 else "bold red"
    pause = f"{median(ledger.pauses):.1f} ms" if ledger.pauses else "-"
    for name, value, style in (
        ("head version", str(ledger.head), "bold"),
        ("activations", f"{ledger.activations}, pause {pause}", ""),
        ("answers", str(ledger.answers), ""),
        ("wrong-version answers", str(ledger.wrong), bad),
        ("constraint violations", str(ledger.violations), "green" if ledger.violations == 0 else "bold red"),
    ):
        table.add_row(name, Text(value, style=style))
    most = max(ledger.staleness.values(), default=1)
    for lag in sorted(ledger.staleness):
        count = ledger.staleness[lag]
        table.add_row(f"  stale by {lag}", Text("█" * max(1, round(12 * count / most)) + f" {count}", style="magenta"))
    return table


def _replicas(ledger: Ledger, gone: Sequence[str]) -> Table:
    table = Table("replica", "state", "version", "target", "answers", "last pause", expand=True)
    for replica, state in sorted(ledger.replicas.items()):
        killed = replica in gone
        phase = Text("killed", style="red") if killed else Text(state.phase.value, style=_COLOURS.get(state.phase, ""))
        table.add_row(
            replica,
            phase,
            str(state.serving.number) if state.serving else "-",
            str(state.target.number) if state.target else "-",
            str(ledger.served[replica]),
            f"{ledger.last_pause[replica]:.1f} ms" if replica in ledger.last_pause else "-",
        )
    return table
