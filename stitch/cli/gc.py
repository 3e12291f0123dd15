"""`stitch gc`: old versions retired, and the bytes that nobody needs any more deleted."""

from __future__ import annotations

import json
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn

from stitch.cli import tables
from stitch.cli.options import json_option, log_option, policy_option, run, store_option
from stitch.cli.progress import told_bar
from stitch.cli.sizes import size_text
from stitch.core.ids import policy_id
from stitch.core.retention import GRACE_MS, RETAIN
from stitch.log.opening import open_log
from stitch.operators.collection import Amount, Collector, Group, Holding, Report
from stitch.operators.collection import Progress as Tell
from stitch.operators.ledger import new_operator, open_ledger
from stitch.store.opening import open_store

ROWS: Final = 40
"""Of each table that a person is shown; --json has all."""


@click.command()
@log_option()
@store_option()
@policy_option()
@click.option("--retain", type=click.IntRange(min=1), default=RETAIN, show_default=True, help="Newest versions to keep.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=GRACE_MS / 1000,
    show_default=True,
    metavar="SECONDS",
    help="From a retirement to the end of its bytes, by the log's clock: longer than a replica takes to stage a version.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done; change nothing.")
@json_option()
def gc(log_url: str, store_url: str, policy: str, retain: int, grace: float, dry_run: bool, as_json: bool) -> None:
    """Retire versions that nobody needs, and delete their bytes once a grace period is over.

    Kept are the tip, what channels name or would fall back to, the newest versions, what replicas use, and all that those are built
    from. A retirement is for good. Run it now and then: bytes of versions that it retires go with a later run.
    """
    with told_bar(MofNCompleteColumn(), silent=as_json) as tell:
        report = run(_collect(log_url, store_url, policy, retain, round(1000 * grace), dry_run, tell))
    if as_json:
        click.echo(json.dumps(_row(report)))
    else:
        _print(report)


async def _collect(log_url: str, store_url: str, policy: str, retain: int, grace_ms: int, dry_run: bool, tell: Tell) -> Report:
    async with open_log(log_url) as log, open_ledger(log, policy_id(policy), source="/stitch/gc") as ledger:
        with open_store(store_url) as store:
            collector = Collector(ledger, store, writer=new_operator(), retain=retain, grace_ms=grace_ms, progress=tell)
            return await collector.run(dry_run=dry_run)


# --- for programs ----------------------------------------------------------------------------------------------------------------


def _row(report: Report) -> dict[str, Any]:
    return {
        "policy": report.policy,
        "dry_run": report.dry_run,
        "kept": [{**_holding(kept), "why": list(kept.why)} for kept in report.kept],
        "retired": [_holding(retired) for retired in report.retired],
        "refused": [{"version": str(ref), "verdict": verdict} for ref, verdict in report.refused],
        "deleted": [_group(group) for group in report.deleted],
        "deleted_bytes": sum(group.size for group in report.deleted),
        "waiting": _amount(report.waiting),
        "pending": _amount(report.pending),
        "unknown": {**_amount(report.unknown), "keys": list(report.unknown_keys)},
    }


def _holding(holding: Holding) -> dict[str, Any]:
    return {"version": str(holding.ref), "bytes": holding.size}


def _group(group: Group) -> dict[str, Any]:
    return {"prefix": group.path, "objects": len(group.keys), "bytes": group.size, "why": group.why}


def _amount(amount: Amount) -> dict[str, int]:
    return {"objects": amount.objects, "bytes": amount.size}


# --- for people ------------------------------------------------------------------------------------------------------------------


def _print(report: Report) -> None:
    console = Console()
    would = "would be " if report.dry_run else ""
    kept = tables.table("kept", "bytes", "why")
    for each in report.kept[:ROWS]:
        kept.add_row(str(each.ref), size_text(each.size), escape("; ".join(each.why)))
    console.print(kept)
    _more(len(report.kept))
    _versions(f"{would}retired", report.retired)
    for ref, verdict in report.refused:
        click.echo(f"not retired: {ref}: {verdict}")
    if report.deleted:
        freed = tables.table(f"{would}deleted", "objects", "bytes", "why")
        for group in report.deleted[:ROWS]:
            freed.add_row(group.path, str(len(group.keys)), size_text(group.size), group.why)
        console.print(freed)
        _more(len(report.deleted))
    total = Amount(objects=sum(len(g.keys) for g in report.deleted), size=sum(g.size for g in report.deleted))
    click.echo(f"{would}retired: {len(report.retired)} versions; {would}deleted: {_told(total)}")
    if report.waiting.objects:
        click.echo(f"left for a later run, since their grace is not over or a replica uses them: {_told(report.waiting)}")
    if report.pending.objects:
        click.echo(f"left, since they may still come to be named: {_told(report.pending)}")
    if report.unknown.objects:
        click.echo(f"left, since no writer of policy {report.policy} that this log knows made them: {_told(report.unknown)}")
        for key in report.unknown_keys:
            click.echo(f"  {key}")


def _versions(title: str, holdings: list[Holding]) -> None:
    if not holdings:
        return
    table = tables.table(title, "bytes")
    for each in holdings[:ROWS]:
        table.add_row(str(each.ref), size_text(each.size))
    Console().print(table)
    _more(len(holdings))


def _more(count: int) -> None:
    if count > ROWS:
        click.echo(f"and {count - ROWS} more; --json names all")


def _told(amount: Amount) -> str:
    return f"{amount.objects} objects, {size_text(amount.size)}"
