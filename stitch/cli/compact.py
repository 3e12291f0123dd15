"""`stitch compact`: full forms for versions whose chains are long, without a trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.progress import DownloadColumn, TransferSpeedColumn

from stitch.cli.options import json_option, log_option, policy_option, run, store_option
from stitch.cli.progress import scratch_option, told_bar
from stitch.cli.sizes import size_text
from stitch.core.anchors import ANCHOR_EVERY, AnchorRule
from stitch.core.ids import policy_id
from stitch.log.opening import open_log
from stitch.operators.compaction import Chain, Compactor, Report
from stitch.operators.compaction import Progress as Tell
from stitch.operators.ledger import new_operator, open_ledger
from stitch.operators.versions import find, published
from stitch.store.opening import open_store
from stitch.store.scratch import scratch_folder


@click.command()
@click.argument("versions", nargs=-1, metavar="[VERSION]...")
@log_option()
@store_option()
@policy_option()
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=ANCHOR_EVERY,
    show_default=True,
    help="Versions in a chain, its full one included, beyond which it gets another full one. Not with VERSION.",
)
@scratch_option()
@click.option("--dry-run", is_flag=True, help="Show which versions would be anchored; change nothing.")
@json_option()
def compact(
    versions: tuple[str, ...],
    log_url: str,
    store_url: str,
    policy: str,
    every: int,
    scratch: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Add full forms to old versions, so that who joins loads one and few deltas.

    VERSION is a number (41), a full name (run/weight_v000041) or a channel (latest). Without one, those living versions are taken
    whose chains are too long, or weigh more than a full form. The trainer need not run, and may. The scratch folder takes a model.
    """
    with (
        scratch_folder("compact", scratch) as workdir,
        told_bar(DownloadColumn(), TransferSpeedColumn(), silent=as_json) as tell,
    ):
        report = run(_compact(versions, log_url, store_url, policy, AnchorRule(every=every), workdir, dry_run, tell))
    if as_json:
        click.echo(json.dumps(_row(report)))
    else:
        _print(report)


async def _compact(
    versions: tuple[str, ...], log_url: str, store_url: str, policy: str, rule: AnchorRule, workdir: Path, dry_run: bool, tell: Tell
) -> Report:
    async with open_log(log_url) as log, open_ledger(log, policy_id(policy), source="/stitch/compact") as ledger:
        lineage = published(await ledger.read_on())
        wanted = [find(lineage, text).ref for text in versions]
        with open_store(store_url) as store:
            compactor = Compactor(ledger, store, workdir, writer=new_operator(), rule=rule, progress=tell)
            return await compactor.run(wanted, dry_run=dry_run)


def _row(report: Report) -> dict[str, Any]:
    return {
        "policy": report.policy,
        "dry_run": report.dry_run,
        "planned": [_chain(chain) for chain in report.planned],
        "anchored": [{**_chain(done.before), "bytes": done.size, "manifest_key": done.manifest_key} for done in report.anchored],
        "skipped": [{"version": str(ref), "why": why} for ref, why in report.skipped],
    }


def _chain(chain: Chain) -> dict[str, Any]:
    return {"version": str(chain.ref), "chain_deltas": chain.deltas, "chain_bytes": chain.size}


def _print(report: Report) -> None:
    for ref, why in report.skipped:
        click.echo(f"{ref}: skipped: {why}")
    if report.dry_run:
        for chain in report.planned:
            click.echo(f"{chain.ref}: would be anchored; {_told(chain)}")
    for done in report.anchored:
        click.echo(f"{done.before.ref}: anchored with {size_text(done.size)}; {_told(done.before)}")
    if not report.planned and not report.skipped:
        click.echo(f"no chain of policy {report.policy} is too long")


def _told(chain: Chain) -> str:
    return f"its chain: {chain.deltas} deltas on a full form, {size_text(chain.size)}"
