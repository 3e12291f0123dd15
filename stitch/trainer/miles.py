"""The hook for Miles: `--custom-update-weight-post-write-path stitch.trainer.miles.publish` (docs/cookbook/slime.md)."""

from __future__ import annotations

from typing import Any, Final

from stitch.trainer.hook_session import Session

_session: Final = Session("miles")


def publish(args: Any, version_dir: str, rollout_engines: Any) -> None:
    """Publishes the version that Miles has written to `version_dir` under the number that its name says.

    To be called on every rank, as Miles does; on return the version is durable and accepted, so the directory may go. A directory
    that is named otherwise is the one above them, before the first version: then the run is opened with `args.hf_checkpoint` as
    version 0. `rollout_engines` are left to Miles.

    STITCH_LOG, STITCH_STORE, STITCH_POLICY and STITCH_RUN say where to; STITCH_TAKE_OVER=1 lets a new run follow another;
    STITCH_PUBLISH_TIMEOUT bounds, in seconds, how long a log or store that is away is waited for.
    """
    _session.handle(args, version_dir)


def close() -> None:
    """Ends the publisher, as the end of the process does. The next version opens it anew."""
    _session.close()
