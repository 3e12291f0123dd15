"""What a trainer's hook is told by the environment. Rank 0's counts; the others need none of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.core.ids import policy_id, run_id
from stitch.trainer.publisher import PUBLISH_SECONDS

LOG: Final = "STITCH_LOG"
STORE: Final = "STITCH_STORE"
POLICY: Final = "STITCH_POLICY"
RUN: Final = "STITCH_RUN"
TAKE_OVER: Final = "STITCH_TAKE_OVER"
TIMEOUT: Final = "STITCH_PUBLISH_TIMEOUT"
REQUIRED: Final = {
    LOG: "where versions are announced, such as kafka://HOST:PORT/NAMESPACE",
    STORE: "where their bytes go, such as s3://BUCKET/PREFIX",
    POLICY: "the name of the line of models that is trained",
    RUN: "the name of this numbering of its versions; a new one for each start of the trainer",
}
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`timeout` in seconds, of one publication."""

    log: str
    store: str
    policy: str
    run: str
    take_over: bool = False
    timeout: float = PUBLISH_SECONDS


def settings_of(environment: Mapping[str, str]) -> Settings:
    """Raises InvalidRequest naming every variable that is missing, or the one that is malformed."""
    missing = [name for name in REQUIRED if not environment.get(name)]
    if missing:
        what = "; ".join(f"{name}: {REQUIRED[name]}" for name in missing)
        raise InvalidRequest(
            f"the hook needs {', '.join(missing)} in the environment of the trainer's ranks ({what})", field=missing[0]
        )
    return Settings(
        log=environment[LOG],
        store=environment[STORE],
        policy=policy_id(environment[POLICY]),
        run=run_id(environment[RUN]),
        take_over=_flag(environment, TAKE_OVER),
        timeout=_seconds(environment, TIMEOUT, PUBLISH_SECONDS),
    )


def _flag(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "").strip().lower()
    if text not in _YES | _NO:
        raise InvalidRequest(f"{name}: {text[:80]!r} is neither 1 nor 0", field=name)
    return text in _YES


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequest(f"{name}: {text[:80]!r} is no number of seconds", field=name)
    return seconds
