"""Whether a store keeps the promises that publishing rests on, found out by trying: `probe(store)`.

Many servers speak S3 and ignore its conditions or checksums. The log alone decides what counts, so on such a store nothing
decided is undone; but two writers may overwrite each other's bytes, and damage is noticed by readers instead of at the upload.
"""

from __future__ import annotations

import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from stitch.core.errors import CorruptObject, InvalidRequest, StitchError, Unavailable, VersionConflict
from stitch.store.port import BlobStore, Receipt

RACERS: Final = 16
"""Enough that a server which looks first and writes then lets several through."""
RACES: Final = 3
SAMPLE_BYTES: Final = 16 << 20
"""Long enough for a bandwidth to show, short enough for a slow link."""
LATENCY_LOOKS: Final = 7
LARGEST_SKEW_S: Final = 300.0
"""S3 refuses a request whose clock is off by fifteen minutes; a third of it is when to mend it."""
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """`findings` says what is wrong and how to mend it; empty where all is well.

    `clock_skew_s`: how far the store's clock is ahead of this machine's; None where it is the same. Bandwidths are those of one
    object of 16 MiB in MiB per second, `latency_ms` is the median of a look for a key; 0 where it could not be measured.
    """

    conditional_writes: bool = False
    checksums: bool = False
    read_back: bool = False
    clock_skew_s: float | None = None
    put_mib_s: float = 0.0
    get_mib_s: float = 0.0
    latency_ms: float = 0.0
    findings: tuple[str, ...] = ()


@dataclass(slots=True)
class _Findings:
    texts: list[str] = field(default_factory=list)

    def permitted(self, what: str, act: Callable[[], object]) -> bool:
        """Whether it is allowed; a refusal is a finding."""
        try:
            act()
        except InvalidRequest as refused:
            self.texts.append(f"{what} is refused: {refused}; allow it to these credentials")
            return False
        return True


def probe(store: BlobStore) -> Probe:
    """Tries the store under a prefix of its own, and removes what it wrote. Raises Unavailable where it cannot be reached."""
    prefix = f"stitch-probe-{secrets.token_hex(8)}"
    findings = _Findings()
    store.stat(f"{prefix}/nothing")  # an unreachable store is said at once, and a connection stands before the clock runs
    try:
        result = _try_all(store, prefix, findings) if _may_write(store, prefix, findings) else Probe()
    finally:
        _clean(store, prefix, findings)
    return replace(result, findings=tuple(findings.texts))


def _may_write(store: BlobStore, prefix: str, findings: _Findings) -> bool:
    return findings.permitted("writing objects", lambda: store.put(f"{prefix}/first", b"stitch"))


def _try_all(store: BlobStore, prefix: str, findings: _Findings) -> Probe:
    findings.permitted("listing objects", lambda: list(store.entries(f"{prefix}/")))
    if not findings.permitted("reading objects", lambda: store.stat(f"{prefix}/first")):
        return Probe()
    sample = _sample(store, prefix, findings)
    races = all(_race_is_won_once(store, f"{prefix}/race-{number}") for number in range(RACES))
    trials = store.trials(f"{prefix}/trials")
    if not races:
        findings.texts.append(
            "conditional writes do not hold: of 16 concurrent creates of one object several succeeded, or an object was "
            "overwritten; use a store that honours If-None-Match, or give each policy to one publisher only"
        )
    if not trials.conditional_parts:
        findings.texts.append(
            "an upload in parts overwrites an object in spite of If-None-Match; use a store that honours it there, too"
        )
    if not trials.checksums:
        findings.texts.append(
            "the store keeps an upload whose checksum is wrong, so what is mangled on the way is noticed by readers only; use one "
            "that checks CRC-32"
        )
    if trials.clock_skew_s is not None and abs(trials.clock_skew_s) > LARGEST_SKEW_S:
        findings.texts.append(f"the store's clock is {trials.clock_skew_s:+.0f} s off this machine's; keep both by NTP")
    return replace(
        sample,
        conditional_writes=races and trials.conditional_parts,
        checksums=trials.checksums,
        clock_skew_s=trials.clock_skew_s,
        latency_ms=_latency_ms(store, f"{prefix}/nothing"),
    )


def _sample(store: BlobStore, prefix: str, findings: _Findings) -> Probe:
    """What an object of some size comes back as, and how fast."""
    data = os.urandom(SAMPLE_BYTES)
    key = f"{prefix}/sample"
    began = time.perf_counter()
    receipt = store.put(key, data)
    stored = time.perf_counter()
    put_rate = SAMPLE_BYTES / MIB / (stored - began)
    try:
        store.get(key, limit=SAMPLE_BYTES, expect=receipt.blake3)
    except (CorruptObject, KeyError) as error:
        found = "it is gone" if isinstance(error, KeyError) else str(error)
        findings.texts.append(f"an object does not come back as it was written: {found}; do not use this store")
        return Probe(put_mib_s=put_rate)
    get_rate = SAMPLE_BYTES / MIB / (time.perf_counter() - stored)
    return Probe(read_back=True, put_mib_s=put_rate, get_mib_s=get_rate)


def _race_is_won_once(store: BlobStore, key: str) -> bool:
    """Whether one of 16 creates wins, the others know that they lost, and the winner's bytes stay."""
    start = threading.Barrier(RACERS)

    def create(number: int) -> Receipt | None:
        start.wait()
        try:
            return store.put(key, f"racer {number}".encode())
        except (VersionConflict, Unavailable):  # a loser may also be told to try again, and again
            return None

    with ThreadPoolExecutor(RACERS) as pool:
        winners = [receipt for receipt in pool.map(create, range(RACERS)) if receipt is not None]
    if len(winners) != 1:
        return False
    try:
        store.put(key, b"a late one")
    except VersionConflict:
        pass
    else:
        return False
    try:
        store.get(key, limit=MIB, expect=winners[0].blake3)
    except (CorruptObject, KeyError):
        return False
    return True


def _latency_ms(store: BlobStore, key: str) -> float:
    seconds: list[float] = []
    for _ in range(LATENCY_LOOKS):
        began = time.perf_counter()
        store.stat(key)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1000


def _clean(store: BlobStore, prefix: str, findings: _Findings) -> None:
    """Whatever else went wrong, and without hiding it."""
    names = [f"{prefix}/{name}" for name in ("first", "sample", "trials/mangled", "trials/parts")]
    for key in [*names, *(f"{prefix}/race-{number}" for number in range(RACES))]:
        try:
            store.delete(key)
        except StitchError as error:
            findings.texts.append(f"deleting objects fails: {error}; objects below {prefix}/ were left behind")
            return
