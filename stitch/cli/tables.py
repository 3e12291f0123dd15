"""The look of every table that a command prints: light, and the same for all."""

from __future__ import annotations

from rich import box
from rich.table import Table


def table(*columns: str) -> Table:
    """An empty table with these columns."""
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
