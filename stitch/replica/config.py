"""How a replica is to run. The command line and the pools fill this in; nothing here is read from the environment."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.core.fleet import SLOT_MS
from stitch.core.ids import LATEST, ChannelName, PolicyId, PoolName, ReplicaId
from stitch.log.views import LONGEST_HEARTBEAT_MS
from stitch.weights.verify import Verify

DEFAULT_POOL: Final = PoolName("default")
DEFAULT_CAPACITY: Final = 256
"""Requests answered at a time: what one engine batches before more of them only wait in its queue."""
REFERENCE: Final = "reference"
"""The engine that a replica can start without being told how."""
MODEL_FIELD: Final = "{model}"
PORT_FIELD: Final = "{port}"
SCRUB_SECONDS: Final = 900.0
"""Between two scrubs: a model of 140 GB takes one core a minute or so at half speed, less than a tenth of the time."""


class Mode(StrEnum):
    """What becomes of running requests at an activation."""

    IN_PLACE = "in_place"
    """They go on with the new weights; their answers say which tokens came from which version."""
    QUIESCE = "quiesce"
    """They finish on the old weights, within a limit, before the new ones are loaded; the KV cache is dropped."""


class KvScope(StrEnum):
    """Which requests may share cached prefixes."""

    SESSION = "session"
    """Those whose sessions began at the same version."""
    VERSION = "version"
    """Those that were admitted at the same version."""
    NONE = "none"
    """All: prefixes of older versions are reused. The operator's choice."""


class AuditMode(StrEnum):
    """Which answers are recorded on the stream of rollouts."""

    OFF = "off"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """One replica. Times in seconds; `url`s as `open_log` and `open_store` take them.

    Exactly one of `engine_url` (beside a running engine) and `command` (started and supervised here, with `{model}` and
    `{port}` filled in) is given; the reference engine needs neither. `port` 0 takes a free one.
    """

    log: str
    store: str
    policy: PolicyId
    replica: ReplicaId
    workdir: Path
    channel: ChannelName = LATEST
    pool: PoolName = DEFAULT_POOL
    host: str = "127.0.0.1"
    port: int = 0
    advertise_url: str | None = None
    engine: str = REFERENCE
    engine_url: str | None = None
    command: tuple[str, ...] = ()
    base: Path | None = None
    """A checkpoint at hand, which spares the download of a version with the same weights."""
    single_buffer: bool = False
    """Stage into the files of the version that serves, for disks that hold the model once: see `stitch.weights.staging`."""
    verify: Verify = Verify.FULL
    """What is read again before the engine is given a version: every byte, or what changed; the rest then by scrubs."""
    scrub_seconds: float = SCRUB_SECONDS
    """Between two readings of all that is staged, where `verify` is incremental."""
    disk_budget: int | None = None
    """Bytes that `workdir` may hold. About one model and its newest deltas per buffer, and one model more while an anchor of
    another model is loaded. None: as many as the disk has."""
    memory_budget: int | None = None
    """Bytes that decoding deltas may take beside mapped files; None: what a thread per core takes."""
    capacity: int = DEFAULT_CAPACITY
    mode: Mode = Mode.IN_PLACE
    kv_scope: KvScope = KvScope.SESSION
    audit: AuditMode = AuditMode.OFF
    token: str | None = None
    control_token: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    heartbeat_seconds: float = 2.0
    reconcile_seconds: float = 5.0
    drain_seconds: float = 30.0
    """How long requests that cannot live through an activation are waited for."""
    swap_seconds: float = 60.0
    """Bound on the time with the gate closed. With `drain_seconds` it stays below the bound on a slot of the budget."""
    gate_wait_seconds: float = 60.0
    """How long a request waits at the closed gate before it is refused as not started."""
    boot_seconds: float = 600.0
    """How long an engine may take to start."""
    slot_seconds: float = SLOT_MS / 1000
    """Bound on an activation's length, by which a replica that cannot read the stream paces itself."""
    drain_timeout: float = 1800.0
    """How long requests are waited for when the replica leaves."""
    watchdog_seconds: float = 2.0
    watchdog_failures: int = 5
    """Looks at the engine in a row that may fail before it is given up."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest naming the field."""
        if self.engine_url is not None and self.command:
            raise InvalidRequest("command: not together with an engine URL", field="command")
        if self.engine_url is None and not self.command and self.engine != REFERENCE:
            raise InvalidRequest(f"engine: {self.engine} needs an engine URL, or a command that starts it", field="engine")
        if self.command and not any(PORT_FIELD in part for part in self.command):
            raise InvalidRequest(f"command: {shlex.join(self.command)!r} does not say {PORT_FIELD}", field="command")
        if self.command and not any(MODEL_FIELD in part for part in self.command):
            raise InvalidRequest(f"command: {shlex.join(self.command)!r} does not say {MODEL_FIELD}", field="command")
        if self.capacity < 1:
            raise InvalidRequest(f"capacity: {self.capacity} is below 1", field="capacity")
        if not 0 < 1000 * self.heartbeat_seconds <= LONGEST_HEARTBEAT_MS:
            raise InvalidRequest(
                f"heartbeat: {self.heartbeat_seconds} s is not above 0 and up to {LONGEST_HEARTBEAT_MS / 1000:g}",
                field="heartbeat_seconds",
            )
        for name in (
            "reconcile_seconds",
            "drain_seconds",
            "swap_seconds",
            "gate_wait_seconds",
            "boot_seconds",
            "slot_seconds",
            "scrub_seconds",
        ):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name}: not above 0", field=name)
        for name in ("disk_budget", "memory_budget"):
            budget = getattr(self, name)
            if budget is not None and budget <= 0:
                raise InvalidRequest(f"{name}: {budget} bytes is not above 0", field=name)

    @property
    def supervised(self) -> bool:
        """Whether the replica starts its engine itself."""
        return self.engine_url is None

    @property
    def source(self) -> str:
        """Who says so, on every record that the replica writes."""
        return f"stitch/replica/{self.replica}"
