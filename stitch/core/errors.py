"""Every error that Stitch raises on purpose.

StitchError
├── Rejected                    a definite no: nothing happened, and asking again will not help by itself
│   ├── Fenced                  another writer owns the policy now
│   ├── VersionConflict         the number is taken by other bytes, or not above what was accepted
│   ├── WeightVersionNotReady   no replica serves the version yet (retryable)
│   ├── VersionGone             the version can never be served again
│   ├── CorruptObject           bytes do not match their digest, size, name, dtype or shape
│   └── InvalidRequest          malformed input; the message names the field
├── LogDiverged                 the log no longer holds a record that was read from it before
├── OutcomeUnknown              something was sent and its fate could not be learnt before the deadline
└── Unavailable                 a log, store, engine or gateway could not be reached; nothing was done
"""

from __future__ import annotations

from typing import ClassVar


class StitchError(Exception):
    """Base of all. `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 1


class Rejected(StitchError):
    """A definite no."""


class Fenced(Rejected):
    """Another writer claimed the policy. A supervisor must not restart the writer blindly."""

    exit_code: ClassVar[int] = 4


class VersionConflict(Rejected):
    """The version number names other bytes already, or is not above every accepted one of its run."""


class WeightVersionNotReady(Rejected):
    """No replica serves a version that satisfies the constraint yet."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds that the server asked to wait, where it did."""


class VersionGone(Rejected):
    """The version is abandoned, retired, superseded or was never accepted; no later record changes that."""


class CorruptObject(Rejected):
    """Bytes read do not match what their manifest promises."""


class InvalidRequest(Rejected):
    """Input from outside is malformed; `field` names the place."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnreadableEvent(StitchError):
    """A record that must not be skipped cannot be decoded: its schema is newer than this release, or its bytes are damaged."""


class LogDiverged(StitchError):
    """The log was truncated or recreated under a reader or writer."""


class OutcomeUnknown(StitchError):
    """What was appended may still take effect; the next attempt settles it first."""

    exit_code: ClassVar[int] = 3


class Unavailable(StitchError):
    """A part could not be reached; nothing was appended."""
