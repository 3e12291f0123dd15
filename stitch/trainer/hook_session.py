"""What the hooks for Slime and Miles share: one publisher for the life of a trainer's process, opened by its first version.

Both call a hook on every rank with a version's directory once it is written; and, in delta mode, once before on rank 0 alone with
the emptied directory above it. The others then wait elsewhere, so that call takes part in no collective: rank 0 opens the run by
itself, so that version 0 can serve the rollouts that come before the first update, and closes it again.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from stitch.core.errors import Fenced, InvalidRequest, VersionConflict
from stitch.trainer.comms import SingleProcess, TorchComms, TrainerComms
from stitch.trainer.hook_settings import RUN, TAKE_OVER, Settings, settings_of
from stitch.trainer.publisher import Publisher
from stitch.weights.slime import number_of

_BEGIN_ANEW: Final = (
    f"a trainer that starts again counts from 1 again, and a run's numbers are never used twice: start it with another {RUN}, and"
    f" with {TAKE_OVER}=1, so that the new run may follow the old one"
)
_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Session:
    """One per process. `trainer` is what it is called in a version's metadata."""

    def __init__(self, trainer: str) -> None:
        self.trainer: Final = trainer
        self._turn = threading.Lock()
        self._comms: TrainerComms | None = None
        self._publisher: Publisher | None = None
        self._timeout = 0.0
        self._closes_at_exit = False

    def handle(self, args: Any, version_dir: str) -> None:
        """One call of the hook. On return the version is durable and accepted; what one rank raises, all raise.

        Raises InvalidRequest for what is missing in the environment or half-written in the directory, VersionConflict where the
        trainer counts from the beginning again, Fenced where another trainer owns the policy, else as Publisher does.
        """
        directory = Path(version_dir)
        number = number_of(directory)
        with self._turn:
            try:
                if number is None:
                    self._begin(args, directory)
                else:
                    self._publish(args, directory, number)
            except VersionConflict as error:
                raise VersionConflict(f"{error} [{_BEGIN_ANEW}]") from error

    def close(self) -> None:
        """Waits for what is under way. The next call opens anew."""
        with self._turn:
            self._close()

    def _begin(self, args: Any, directory: Path) -> None:
        """The call before the first version: alone, so nothing of the other ranks may be needed."""
        publisher, alone = self._publisher, self._publisher is None
        if publisher is None:
            publisher = self._open(settings_of(os.environ), SingleProcess(), _base(args))
        try:
            _logger.info("run %s begins at %s; versions come from %s", publisher.run, publisher.head, directory)
            if publisher.next_number > 1:
                raise VersionConflict(
                    f"run {publisher.run} has versions up to {publisher.next_number - 1} already, and this trainer begins at 1"
                )
        finally:
            if alone and _world_size() > 1:
                self._close()

    def _publish(self, args: Any, directory: Path, number: int) -> None:
        if self._publisher is None:
            comms = self._comms = self._comms or (TorchComms() if _world_size() > 1 else SingleProcess())

            def look() -> tuple[Settings | None, Path | None]:
                # What comes later builds on versions that the run has; only the first is against the base.
                return settings_of(os.environ) if comms.rank == 0 else None, _base(args) if number <= 1 else None

            settings, base = _together(comms, look)
            assert settings is not None
            self._open(settings, comms, base)
        assert self._publisher is not None
        metadata = {"trainer": self.trainer, "directory": directory.name}
        done = self._publisher.publish(directory, number=number, metadata=metadata, timeout=self._timeout)
        if self._comms is None or self._comms.rank == 0:
            _logger.info("published %s: %s, %d bytes", done.ref, done.kind, done.bytes_written)

    def _open(self, settings: Settings, comms: TrainerComms, base: Path | None) -> Publisher:
        try:
            publisher = Publisher.open(
                policy=settings.policy,
                run=settings.run,
                log=settings.log,
                store=settings.store,
                base=base,
                take_over=settings.take_over,
                timeout=settings.timeout,
                comms=comms,
            )
        except Fenced as error:
            raise Fenced(f"{error} [as a hook: set {TAKE_OVER}=1, and a {RUN} that no other trainer had]") from error
        self._publisher, self._timeout = publisher, settings.timeout
        self._close_at_exit()
        return publisher

    def _close(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _close_at_exit(self) -> None:
        if not self._closes_at_exit:
            self._closes_at_exit = True
            # As the thread pools of the standard library: what atexit itself calls comes after them, when no thread can be begun
            # any more, and a log is closed in threads.
            getattr(threading, "_register_atexit", atexit.register)(self.close)


def _base(args: Any) -> Path:
    """The checkpoint that the trainer began with: version 0."""
    given = getattr(args, "hf_checkpoint", None)
    if not given or not Path(given).is_dir():
        raise InvalidRequest(
            f"hf_checkpoint: {given!r} is no local directory; version 0 is this checkpoint, so download it first",
            field="hf_checkpoint",
        )
    return Path(given)


def _world_size() -> int:
    """Ranks of the trainer. Asks nobody."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return int(torch.distributed.get_world_size())


def _together(comms: TrainerComms, make: Callable[[], T]) -> T:
    """Rank 0's value, once every rank made its own; or what the first of them raised, at all of them."""
    value: T | None = None
    error: Exception | None = None
    try:
        value = make()
    except Exception as raised:  # noqa: BLE001 # told to the other ranks, and raised by all
        error = raised
    errors = comms.gather(error)
    verdict = None if errors is None else (value, next(filter(None, errors), None))
    value, error = comms.broadcast(verdict)
    if error is not None:
        raise error
    assert value is not None
    return value
