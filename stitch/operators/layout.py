"""Keys of a store read back: which attempt an object belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.core.ids import Digest, Epoch, PolicyId, RunId, VersionNumber, run_id, version_number
from stitch.core.retention import Attempt
from stitch.store.manifests import attempt_prefix, base_prefix
from stitch.store.port import Entry

_KEY: Final = re.compile(
    r"(?P<run>[^/]+)/(?P<number>[0-9]{1,16})\.(?:e(?P<epoch>[0-9]{1,16})|base-(?P<base>[0-9a-f]{16}))"
    r"(?:/[0-9a-f]{64}|(?P<manifest>\.[0-9a-f]{16}\.json))\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An object that lies where versions lie. `is_manifest`: by its key."""

    entry: Entry
    attempt: Attempt
    is_manifest: bool

    @property
    def key(self) -> str:
        return self.entry.key


def policy_prefix(policy: PolicyId) -> str:
    """What all keys of the policy begin with, and none of another."""
    return f"{policy}/"


def placed(policy: PolicyId, entry: Entry) -> Placed | None:
    """The object's place; None where no writer of this policy makes such a key."""
    beginning = policy_prefix(policy)
    match = _KEY.match(entry.key, len(beginning)) if entry.key.startswith(beginning) else None
    if match is None:
        return None
    try:
        attempt = Attempt(
            run=run_id(match["run"]),
            number=version_number(int(match["number"])),
            epoch=None if match["epoch"] is None else Epoch(int(match["epoch"])),
            base=match["base"],
        )
    except InvalidRequest:
        return None
    if not entry.key.startswith(attempt_path(policy, attempt)):
        return None  # leading zeros, say
    return Placed(entry=entry, attempt=attempt, is_manifest=match["manifest"] is not None)


def attempt_path(policy: PolicyId, attempt: Attempt) -> str:
    """What the keys of the attempt begin with; no slash at the end."""
    run, number = RunId(attempt.run), VersionNumber(attempt.number)
    if attempt.epoch is None:
        return base_prefix(policy, run, number, Digest(attempt.base or ""))
    return attempt_prefix(policy, run, number, attempt.epoch)
