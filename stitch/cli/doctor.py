"""`stitch doctor`: whether log and store are what the protocol needs, and how to mend what is not.

Nothing is appended to the log, since its decisions stay for ever: how it is set up, what it holds and how fast it answers is read.
To the store a few objects are written under a prefix of the check's own, and removed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape

from stitch.cli import tables
from stitch.cli.options import json_option, log_option, run, store_option
from stitch.core.errors import InvalidRequest, LogDiverged, StitchError, Unavailable, UnreadableEvent
from stitch.core.events import FORMAT_LEVEL
from stitch.core.lineage import Lineage, Version
from stitch.core.pointers import stale_channels
from stitch.log.follow import Follower
from stitch.log.opening import open_log
from stitch.log.port import Copies, EventLog, Stream
from stitch.log.views import Pointers, fleet_follower, lineage_follower, pointers_follower
from stitch.store.opening import open_store
from stitch.store.port import BlobStore
from stitch.store.probe import Probe, probe

READ_SECONDS: Final = 120.0
"""For the history of a stream: a million decisions on a slow log."""
ROUND_TRIPS: Final = 5
SLOW_LOG_MS: Final = 250.0
"""Of one look at the log. A publish makes about four, so it would take more than a second for nothing."""
REPAIR_SECONDS: Final = 15.0
"""In which a live fleet writes pointers that are behind: three reconcile intervals of a replica."""
REPAIR_POLL_SECONDS: Final = 0.5
LOG_ROOM: Final = 256 << 20
"""Free bytes: a log grows by some hundred bytes for each decision, and by its write-ahead file."""
STORE_ROOM: Final = 1 << 30
MIB: Final = 1 << 20


class State(StrEnum):
    """What a check came to."""

    OK = "ok"
    NOTE = "note"
    """Works, and could be better."""
    MEND = "mend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. `mend` says what to do, where something is to be done."""

    name: str
    state: State
    found: str
    mend: str = ""


@click.command()
@log_option(required=False)
@store_option(required=False)
@json_option()
def doctor(log_url: str | None, store_url: str | None, as_json: bool) -> None:
    """Check the log and the store, and say how to mend what is wrong. Ends with 1 where something is.

    Nothing is appended to the log. To the store a few objects are written, and removed.
    """
    if log_url is None and store_url is None:
        raise click.UsageError("--log, --store or both")
    checks = run(examine(log_url, store_url))
    sound = all(check.state is not State.MEND for check in checks)
    if as_json:
        click.echo(json.dumps({"ok": sound, "checks": [asdict(check) for check in checks]}))
    else:
        _print(checks)
    if not sound:
        raise click.exceptions.Exit(1)


def _print(checks: list[Check]) -> None:
    colours = {State.OK: "green", State.NOTE: "yellow", State.MEND: "bold red"}
    table = tables.table("check", "", "found")
    for check in checks:
        table.add_row(check.name, f"[{colours[check.state]}]{check.state}[/]", escape(check.found))
    Console().print(table)
    for check in checks:
        if check.mend:  # not within the table, which would break a command into pieces
            click.echo(f"{check.name}: {check.mend}")


async def examine(log_url: str | None, store_url: str | None) -> list[Check]:
    """All checks of what is given. What cannot be reached is a finding, not an error."""
    checks: list[Check] = []
    lineage: Lineage | None = None
    if log_url is not None:
        lineage = await _examine_log(log_url, checks)
    if store_url is not None:
        await asyncio.to_thread(_examine_store, store_url, lineage, checks)
    return checks


# --- the log ---------------------------------------------------------------------------------------------------------------------


async def _examine_log(url: str, checks: list[Check]) -> Lineage | None:
    """The lineage, where the log could be read."""
    try:
        log = open_log(url)
    except StitchError as error:
        checks.append(_failed("log", error))
        return None
    async with log:
        try:
            copies = await log.setup(create=False)
        except StitchError as error:
            checks.append(_failed("log settings", error))
            return None
        checks.append(_kept(log, copies))
        if url.startswith("sqlite://"):
            checks.append(_room("log disk", Path(url.removeprefix("sqlite://")).parent, LOG_ROOM))
        try:
            checks.append(await _round_trip(log))
            return await _examine_streams(log, checks)
        except StitchError as error:
            checks.append(_failed("log", error))
            return None


async def _round_trip(log: EventLog) -> Check:
    times = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        await log.bounds(Stream.PUBLICATIONS)
        times.append(1000 * (time.perf_counter() - start))
    found = f"{statistics.median(times):.1f} ms for a look at its end"
    if statistics.median(times) <= SLOW_LOG_MS:
        return Check(name="log latency", state=State.OK, found=found)
    return Check(name="log latency", state=State.NOTE, found=found, mend="bring the brokers nearer, or find out what they wait for")


def _kept(log: EventLog, copies: Copies) -> Check:
    found = f"{log.url}: the four streams keep what they must; {copies}"
    if copies.acknowledged > 1 or log.embedded:
        return Check(name="log settings", state=State.OK, found=found)
    mend = "with three brokers or more, give each topic three replicas by kafka-reassign-partitions.sh, then min.insync.replicas=2"
    return Check(name="log settings", state=State.NOTE, found=found, mend=mend)


async def _examine_streams(log: EventLog, checks: list[Check]) -> Lineage | None:
    lineages, pointers, fleets = lineage_follower(log), pointers_follower(log), fleet_follower(log)
    async with _running(lineages), _running(pointers), _running(fleets):
        sound = [await _read_stream(follower, checks) for follower in (lineages, pointers, fleets)]
        if not sound[0]:
            return None
        level = lineages.state.level
        found = f"the log stands at {level}, this release knows {FORMAT_LEVEL}"
        checks.append(Check(name="format level", state=State.OK if level == FORMAT_LEVEL else State.NOTE, found=found))
        if sound[1]:
            checks.append(await _pointers(lineages, pointers))
        return lineages.state


@asynccontextmanager
async def _running(follower: Follower[Any]) -> AsyncIterator[None]:
    task = asyncio.create_task(follower.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _read_stream(follower: Follower[Any], checks: list[Check]) -> bool:
    """Whether the stream could be read and folded to its end."""
    name, start = f"stream {follower.stream}", time.perf_counter()
    try:
        await follower.catch_up(READ_SECONDS)
    except StitchError as error:
        checks.append(_failed(name, error))
        return False
    found = f"read to offset {follower.position} in {time.perf_counter() - start:.2f} s"
    if not follower.skipped:
        checks.append(Check(name=name, state=State.OK, found=found))
        return True
    skipped = ", ".join(f"{count} of {kind}" for kind, count in sorted(follower.skipped.items()))
    mend = "upgrade this release, so that it reads what others write; decisions are not affected"
    checks.append(Check(name=name, state=State.NOTE, found=f"{found}; skipped {skipped}", mend=mend))
    return True


async def _pointers(lineages: Follower[Lineage], pointers: Follower[Pointers]) -> Check:
    """Behind at one moment is nothing: any replica or trainer writes them within seconds."""
    deadline = time.monotonic() + REPAIR_SECONDS
    while behind := stale_channels(await lineages.catch_up(READ_SECONDS), dict((await pointers.catch_up(READ_SECONDS)).last)):
        if time.monotonic() > deadline:
            channels = ", ".join(f"{policy}/{channel}" for policy, channel in behind)
            mend = "start a replica of the policy, or publish: either writes them. Until then a replica without the log is stranded"
            return Check(name="channel pointers", state=State.MEND, found=f"behind the decisions: {channels}", mend=mend)
        await asyncio.sleep(REPAIR_POLL_SECONDS)
    return Check(name="channel pointers", state=State.OK, found=f"{len(pointers.state.last)}, abreast of the decisions")


# --- the store -------------------------------------------------------------------------------------------------------------------


def _examine_store(url: str, lineage: Lineage | None, checks: list[Check]) -> None:
    folder = Path(url.removeprefix("file://")).absolute() if url.startswith("file://") else None
    if folder is not None and not folder.is_dir():  # to open it would make it, whatever was mistyped
        checks.append(Check(name="store", state=State.MEND, found=f"{folder} is no folder", mend=f"mkdir -p {folder}"))
        return
    try:
        with open_store(url) as store:
            checks += _of_probe(store, probe(store))
            if lineage is not None:
                checks.append(_manifests(store, lineage))
    except StitchError as error:
        checks.append(_failed("store", error))
    if folder is not None:
        targets = list(_targets(lineage)) if lineage is not None else []
        checks.append(_room("store disk", folder, max([STORE_ROOM, *(2 * version.size for version in targets)])))


def _of_probe(store: BlobStore, told: Probe) -> Iterator[Check]:
    """What was tried and held, and then each finding, which says what is wrong and after it how to mend it."""
    promises = [
        ("store creates", told.conditional_writes, "of 16 who create one object at once, one wins"),
        ("store checksums", told.checksums, "bytes mangled on the way are refused"),
        ("store reads", told.read_back, "an object comes back as it was written"),
    ]
    for name, kept, found in promises:
        if kept:
            yield Check(name=name, state=State.OK, found=found)
        elif not told.findings:
            yield Check(name=name, state=State.MEND, found="does not hold", mend=f"use another store than {store.url}")
    for finding in told.findings:
        found, _, mend = finding.rpartition("; ")
        yield Check(name="store", state=State.MEND, found=found or mend, mend=mend)
    if told.get_mib_s:
        speed = f"put {told.put_mib_s:.0f} MiB/s, get {told.get_mib_s:.0f} MiB/s, {told.latency_ms:.1f} ms for a small one"
        yield Check(name="store speed", state=State.OK, found=speed)
    if told.clock_skew_s is not None:
        yield Check(name="store clock", state=State.OK, found=f"{told.clock_skew_s:+.1f} s against this machine's")


def _targets(lineage: Lineage) -> Iterator[Version]:
    """What the channels name, and all that those are built on; each once."""
    for policy in lineage.policies.values():
        refs = {version.ref for c in policy.channels.values() if c.target is not None for version in policy.chain(c.target)}
        yield from (policy.versions[ref] for ref in refs)


def _manifests(store: BlobStore, lineage: Lineage) -> Check:
    """That bytes are there is told by the manifests; `size` and digests are what replicas check."""
    versions = list(_targets(lineage))
    missing = [str(v.ref) for v in versions if store.stat((v.anchor or v.manifest).key) is None]
    if not missing:
        return Check(name="versions", state=State.OK, found=f"the manifests of the {len(versions)} that channels need are there")
    found = f"no manifest of {', '.join(sorted(missing)[:5])}{' and others' if len(missing) > 5 else ''}"
    mend = "is this the store (and prefix) that the trainer writes to? If it is, restore it, or move the channels to other versions"
    return Check(name="versions", state=State.MEND, found=found, mend=mend)


# --- both ------------------------------------------------------------------------------------------------------------------------


def _room(name: str, folder: Path, wanted: int) -> Check:
    free = shutil.disk_usage(folder).free
    found = f"{free // MIB} MiB free in {folder.absolute()}"
    if free >= wanted:
        return Check(name=name, state=State.OK, found=found)
    return Check(name=name, state=State.MEND, found=found, mend=f"make room: {wanted // MIB} MiB should be free")


_FOUND: Final[dict[type[StitchError], str]] = {
    InvalidRequest: "not as it must be",
    LogDiverged: "records are gone",
    Unavailable: "cannot be reached",
    UnreadableEvent: "holds what cannot be read",
}


def _failed(name: str, error: StitchError) -> Check:
    """The messages of our errors say what to do."""
    found = _FOUND.get(type(error), type(error).__name__)
    return Check(name=name, state=State.MEND, found=found, mend=" ".join(str(error).split()))
