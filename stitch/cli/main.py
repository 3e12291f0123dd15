"""The `stitch` command. Commands are imported when they are called, so that none pays for another's libraries."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any, Final

import click

from stitch.core.errors import StitchError

_COMMANDS: Final = {
    "demo": ("stitch.cli.demo.command", "demo", "A real RL loop on this machine: learn, publish, follow, watch."),
    "gateway": ("stitch.cli.serve", "gateway", "Admit requests by version and route them to replicas."),
    "replica": ("stitch.cli.serve", "replica", "Keep one engine at its channel's version and answer through it."),
    "engine": ("stitch.cli.engine", "engine", "Run the reference engine, or make a checkpoint for it."),
    "publish": ("stitch.cli.publish", "publish", "Publish a checkpoint directory as a version."),
    "pull": ("stitch.cli.pull", "pull", "Write a version as a checkpoint directory."),
    "verify": ("stitch.cli.verify", "verify", "Check that versions are there, whole and right."),
    "diff": ("stitch.cli.diff", "diff", "Show what changed from one version to another."),
    "status": ("stitch.cli.inspect", "status", "Show policies, channels and replicas."),
    "log": ("stitch.cli.inspect", "log", "Look into the log."),
    "channel": ("stitch.cli.steer", "channel", "Move a channel: promote, pin, roll back."),
    "quarantine": ("stitch.cli.steer", "quarantine", "Take a bad version out of service."),
    "compact": ("stitch.cli.compact", "compact", "Add full forms to old versions, so that joining stays cheap."),
    "gc": ("stitch.cli.gc", "gc", "Retire versions that nobody needs, and delete their bytes."),
    "doctor": ("stitch.cli.doctor", "doctor", "Check log and store, and say how to mend what is wrong."),
    "topics": ("stitch.cli.inspect", "topics", "Make the log's streams, or check them."),
}
INTERRUPTED: Final = 130


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_) for name, (_, _, help_) in _COMMANDS.items()])


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, envvar="STITCH_DEBUG", help="Show the trace of an error.")
@click.version_option(package_name="stitch-rl", prog_name="stitch")
def cli(debug: bool) -> None:
    """Versioned control plane for disaggregated reinforcement learning.

    \b
    Exit codes: 0 done, 1 refused or failed, 2 usage, 3 outcome unknown, 4 fenced, 70 terminal replica failure.
    """


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and ends the process: an error is one line that says what to do."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments or bool(os.environ.get("STITCH_DEBUG"))
    arguments = [a for a in arguments if a != "--debug"]
    sys.exit(_run(arguments, debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        result: Any = cli.main(arguments, prog_name="stitch", standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (StitchError, OSError) as error:
        if debug:
            traceback.print_exc()
        else:
            click.echo(f"stitch: {_one_line(error)}", err=True)
        return error.exit_code if isinstance(error, StitchError) else 1
    return result if isinstance(result, int) else 0


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    main()
