"""The `stitch` command within the test's own process: as `stitch.cli.main` runs it, with the exit code and what it said."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from stitch.cli.main import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def command(*arguments: object) -> Said:
    """Runs `stitch ARGUMENTS`. Of the main thread, outside an event loop."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Said(code=code, out=out.getvalue(), err=err.getvalue())
