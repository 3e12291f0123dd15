"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re
from typing import Any, Final

import click

UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[kmgtp]?)(?P<binary>i?)b?\s*\Z", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def size_text(count: int) -> str:
    """`5.3 MiB`: bytes for people."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} bytes" if unit == 0 else f"{value:.3g} {UNITS[unit]}" if value < 1000 else f"{value:.0f} {UNITS[unit]}"


class Size(click.ParamType):  # type: ignore[type-arg] # generic in the newest click only
    """A number of bytes as people write it: `5GB` (10^9), `4GiB` (2^30), `1000`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.match(str(value))
        if match is None:
            self.fail(f"{value!r} is no size; write it as 5GB, 4GiB or 1000000", param, ctx)
        count = int(float(match["number"]) * (1024 if match["binary"] else 1000) ** _POWERS[match["prefix"].lower()])
        if count < 1:
            self.fail("must be at least one byte", param, ctx)
        return count
