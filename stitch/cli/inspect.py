"""`stitch status`, `stitch log tail`, `stitch topics create`: what the log says, for people and for programs."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import Console

from stitch.cli import tables
from stitch.cli.options import json_option, log_option, policy_option, run
from stitch.core import lineage as lineage_fold
from stitch.core.admission import lag
from stitch.core.errors import UnreadableEvent
from stitch.core.events import Decision, Event, ReplicaState
from stitch.core.fleet import Fleet
from stitch.core.ids import Offset
from stitch.core.lineage import Lineage, PolicyLineage, Position
from stitch.core.replay import plain
from stitch.log.events import read
from stitch.log.follow import Follower
from stitch.log.opening import open_log
from stitch.log.port import EventLog, Record, Stream
from stitch.log.read import last_records, pages
from stitch.log.views import fleet_follower, lineage_follower
from stitch.wire.codec import Skipped

TAIL_POLL_SECONDS: Final = 1.0
"""How long one look for new records waits; bounds how late Ctrl-C is noticed."""


@click.command()
@log_option()
@policy_option(required=False)
@json_option()
def status(log_url: str, policy: str | None, as_json: bool) -> None:
    """Show each policy's tip and channels, and each replica's version and state."""
    report = run(status_report(log_url, policy))
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print_status(report)


async def status_report(log_url: str, policy: str | None = None) -> dict[str, Any]:
    """What the log says at this moment of one policy, or of all, and of its replicas; JSON values."""
    async with open_log(log_url) as log, _following(log) as followers:
        lineage, fleet = await followers[0].catch_up(), await followers[1].catch_up()
        members = sorted(fleet.members.items())
        return {
            "log": log.url,
            "policies": [_policy_row(p) for p in lineage.policies.values() if policy in (None, p.policy)],
            "replicas": [_replica_row(m.state, lineage, fleet) for _, m in members if policy in (None, m.state.policy)],
        }


@asynccontextmanager
async def _following(log: EventLog) -> AsyncIterator[tuple[Follower[Lineage], Follower[Fleet]]]:
    lineage, fleet = lineage_follower(log), fleet_follower(log)
    tasks = [asyncio.create_task(f.run()) for f in (lineage, fleet)]
    try:
        yield lineage, fleet
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _policy_row(policy: PolicyLineage) -> dict[str, Any]:
    return {
        "policy": policy.policy,
        "run": policy.owner.run if policy.owner else None,
        "writer": policy.owner.writer if policy.owner else None,
        "epoch": policy.epoch,
        "tip": str(policy.tip) if policy.tip else None,
        "weights_digest": policy.versions[policy.tip].manifest.weights_digest if policy.tip else None,
        "versions": len(policy.versions),
        "channels": {name: str(c.target) if c.target else None for name, c in sorted(policy.channels.items())},
    }


def _replica_row(state: ReplicaState, lineage: Lineage, fleet: Fleet) -> dict[str, Any]:
    member = fleet.members[state.replica]
    serving, known = state.serving, lineage.policy(state.policy)
    published = known.versions.get(serving) if serving else None
    return {
        "replica": state.replica,
        "policy": state.policy,
        "pool": state.pool,
        "phase": state.phase.value,
        "silent": fleet.silent(member),
        "serving": str(serving) if serving else None,
        "weights_digest": state.weights_digest,
        "as_published": None if published is None else state.weights_digest == published.manifest.weights_digest,
        "target": str(state.target) if state.target else None,
        "lag": lag(known, serving) if serving else None,
        "in_flight": state.in_flight,
        "pause_ms": state.pause_ms,
        "error": state.error,
        "url": state.url,
    }


def _print_status(report: dict[str, Any]) -> None:
    console = Console()
    if not report["policies"]:
        console.print("Nothing was published yet. `stitch publish DIR` makes the first version.")
    runs = {row["policy"]: row["run"] for row in report["policies"]}
    for row in report["policies"]:
        console.print(
            f"[bold]{row['policy']}[/]  run {row['run']}  tip {row['tip']}  epoch {row['epoch']}  {row['versions']} versions"
        )
        console.print("  channels: " + ", ".join(f"{name} -> {target or 'no version'}" for name, target in row["channels"].items()))
    table = tables.table("replica", "phase", "serving", "lag", "target", "in flight", "last pause", "error")
    for row in report["replicas"]:
        pause = "" if row["pause_ms"] is None else f"{row['pause_ms']:.1f} ms"
        phase = f"{row['phase']} (silent)" if row["silent"] and row["phase"] not in ("left", "failed") else row["phase"]
        serving, target = (_within(row[name], runs.get(row["policy"])) for name in ("serving", "target"))
        error = "serves other weights than were published" if row["as_published"] is False else row["error"]
        cells = (row["replica"], phase, serving, row["lag"], target, row["in_flight"], pause, error)
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    if report["replicas"]:
        console.print(table)


def _within(version: str | None, run: str | None) -> str | None:
    """The bare number of a version of the policy's own run, the whole name of another."""
    return str(int(version.rpartition("_v")[2])) if version and version.startswith(f"{run}/") else version


@click.group()
def log() -> None:
    """Look into the log."""


@log.command()
@log_option()
@click.option("--stream", type=click.Choice([s.value for s in Stream]), default=Stream.PUBLICATIONS.value, show_default=True)
@click.option("--follow/--no-follow", default=False, help="Go on with new records until stopped.")
@click.option("-n", "count", type=click.IntRange(min=0), default=20, show_default=True, help="Records to begin with.")
@json_option()
def tail(log_url: str, stream: str, follow: bool, count: int, as_json: bool) -> None:
    """Print the newest events of a stream; for publications, with what became of each."""
    run(_tail(log_url, Stream(stream), follow, count, as_json))


async def _tail(log_url: str, stream: Stream, follow: bool, count: int, as_json: bool) -> None:
    async with open_log(log_url) as log:
        end = (await log.bounds(stream)).end
        told = _Told()
        for row in await _newest(log, stream, count, end, told):
            _print_row(row, as_json)
        if not follow:
            return
        async with await log.reader(stream, end) as reader:
            while True:
                for record in await reader.poll(TAIL_POLL_SECONDS):
                    _print_row(told.row(record), as_json)


_Event = Event | Skipped | UnreadableEvent
_Judged = tuple[Record, _Event, str | None]


async def _newest(log: EventLog, stream: Stream, count: int, end: Offset, told: _Told) -> list[dict[str, Any]]:
    if stream is not Stream.PUBLICATIONS:
        return [told.row(record) for record in await last_records(log, stream, count, until=end)]
    # What became of a decision follows from all before it.
    newest: deque[_Judged] = deque(maxlen=count)
    async with aclosing(pages(log, stream, until=end)) as found:
        async for page in found:
            newest.extend((record, *told.take(record)) for record in page)
    return [_row(*each) for each in newest]


class _Told:
    """Rows of records, with the lineage so far, from which verdicts follow; None once a decision could not be read."""

    def __init__(self) -> None:
        self._lineage: Lineage | None = Lineage()

    def row(self, record: Record) -> dict[str, Any]:
        return _row(record, *self.take(record))

    def take(self, record: Record) -> tuple[_Event, str | None]:
        """What the record holds, and what became of it where that can be told."""
        try:
            event = read(record)
        except UnreadableEvent as error:
            self._lineage = None
            return error, None
        if self._lineage is None or record.stream is not Stream.PUBLICATIONS or not isinstance(event, Decision):
            return event, None
        at = Position(offset=record.offset, time_ms=record.time_ms)
        self._lineage, verdict = lineage_fold.apply(self._lineage, event, at)
        return event, verdict.value


def _row(record: Record, event: _Event, verdict: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"offset": record.offset, "time_ms": record.time_ms, "key": record.key}
    match event:
        case UnreadableEvent():
            return {**row, "type": "unreadable", "event": {"error": str(event)}}
        case Skipped():
            return {**row, "type": event.type, "event": {"skipped": event.reason}}
        case _:
            row = {**row, "type": type(event).__name__, "event": plain(event)}
            return row if verdict is None else {**row, "verdict": verdict}


def _print_row(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(row))
        return
    when = datetime.fromtimestamp(row["time_ms"] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    quiet = _QUIET | _QUIET_OF.get(row["type"], frozenset())
    told = " ".join(f"{k}={_short(v)}" for k, v in row["event"].items() if v not in (None, "", {}, []) and k not in quiet)
    click.echo(f"{row['offset']:>7}  {when}  {row.get('verdict', ''):<10.10} {row['type']:<18} {told}".rstrip())


_QUIET: Final = frozenset(
    {"base", "event_id", "life", "manifest", "anchor_manifest", "expected_head", "weights_digest", "source", "generation"}
)
_QUIET_OF: Final = {
    "ReplicaState": frozenset(
        {"policy", "channel", "pool", "url", "engine", "capacity", "heartbeat_ms", "incarnation", "following"}
    )
}
"""What a person has no use for in each line; --json has all of it."""


def _short(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"run", "number"}:
        return f"{value['run']}/{value['number']}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


@click.group()
def topics() -> None:
    """Make the log's streams, or check them."""


@topics.command()
@log_option()
def create(log_url: str) -> None:
    """Make the streams that are missing, and check the settings of all."""
    click.echo(run(_setup(log_url, create=True)))


@topics.command()
@log_option()
def check(log_url: str) -> None:
    """Check the streams; make nothing."""
    click.echo(run(_setup(log_url, create=False)))


async def _setup(log_url: str, *, create: bool) -> str:
    """What stands, in words."""
    async with open_log(log_url) as log:
        copies = await log.setup(create=create)
        return f"the log's streams stand: {log.url}, {copies}"
