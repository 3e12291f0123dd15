"""`stitch channel move` and `stitch quarantine`: where channels point, and what no replica takes any more."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from stitch.cli.options import json_option, log_option, policy_option, run
from stitch.core.ids import LATEST, policy_id
from stitch.log.opening import open_log
from stitch.operators import steering
from stitch.operators.ledger import Ledger, new_operator, open_ledger
from stitch.operators.steering import Move

T = TypeVar("T")
_reason = click.option("--reason", default="", metavar="TEXT", help="Kept in the log, for whoever asks later.")


@click.group()
def channel() -> None:
    """Move channels."""


@channel.command()
@click.argument("channel")
@click.argument("version")
@log_option()
@policy_option()
@_reason
@json_option()
def move(channel: str, version: str, log_url: str, policy: str, reason: str, as_json: bool) -> None:
    """Make CHANNEL name VERSION: a promotion, a pin, or a rollback.

    VERSION is a number (41), a full name (run/weight_v000041) or another channel (latest). A new channel begins so. Replicas that
    follow the channel take the version, and requests in flight go on with it where their constraints allow. The channel
    `latest` follows the tip by itself and is not moved.
    """
    done = _decided(
        log_url,
        policy,
        "channel",
        lambda ledger: steering.move_channel(ledger, channel, version, writer=new_operator(), reason=reason),
    )
    if as_json:
        click.echo(json.dumps({"policy": policy, **_row(done)}))
    elif done.before == done.after:
        click.echo(f"{done.channel} names {done.after} already")
    else:
        click.echo(_told(done))


@click.command()
@click.argument("version")
@log_option()
@policy_option()
@_reason
@json_option()
def quarantine(version: str, log_url: str, policy: str, reason: str, as_json: bool) -> None:
    """Take a bad VERSION out of service, for good.

    No replica takes it any more, channels that name it go back to what they named before, and requests for it alone are refused.
    Its bytes stay, since later deltas build on them. VERSION is a number (41), a full name (run/weight_v000041) or a channel.
    """
    done = _decided(
        log_url, policy, "quarantine", lambda ledger: steering.quarantine(ledger, version, writer=new_operator(), reason=reason)
    )
    if as_json:
        row = {"policy": policy, "version": str(done.version), "quarantined": [str(ref) for ref in done.versions]}
        click.echo(json.dumps({**row, "is_tip": done.is_tip, "moves": [_row(each) for each in done.moves]}))
        return
    for ref in done.versions:
        click.echo(f"{ref}: quarantined" + ("" if ref == done.version else f", since {done.version} is another name of it"))
    if not done.versions:
        click.echo(f"{done.version} was quarantined before")
    for each in done.moves:
        click.echo(_told(each))
    if done.is_tip:
        click.echo(
            "It is the tip: the trainer's next version builds on it. To go on without it, open the run with an older boot version."
        )


def _decided(log_url: str, policy: str, source: str, decide: Callable[[Ledger], Awaitable[T]]) -> T:
    async def work() -> T:
        async with open_log(log_url) as log, open_ledger(log, policy_id(policy), source=f"/stitch/{source}") as ledger:
            return await decide(ledger)

    return run(work())


def _told(move: Move) -> str:
    if move.after is None:
        mend = (
            "no older one may be taken" if move.channel == LATEST else "it named no other before. Move it to one that may be taken"
        )
        return f"{move.channel}: {move.before} -> no version; {mend}"
    return f"{move.channel}: {move.before or 'new'} -> {move.after}"


def _row(move: Move) -> dict[str, Any]:
    names = {"before": move.before, "after": move.after}
    return {"channel": move.channel, **{k: None if v is None else str(v) for k, v in names.items()}, "sequence": move.sequence}
