"""From a URL to a log."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stitch.core.errors import InvalidRequest
from stitch.core.ids import check_name
from stitch.log.port import EventLog

FORMS: Final = "sqlite:///PATH, kafka://host:port[,host:port]/namespace or memory://[name]"


def open_log(url: str) -> EventLog:
    """The log behind `url`. Nothing is read, written or connected to before the first call; `setup` checks it.

    What follows `sqlite://` is the path: `sqlite:///tmp/x` is absolute, `sqlite://x` relative. Raises InvalidRequest.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InvalidRequest(f"log: not a URL; use {FORMS}", field="log")
    match scheme:
        case "memory":
            return _memory(rest)
        case "sqlite":
            return _sqlite(rest)
        case "kafka":
            return _kafka(url)
        case _:
            raise InvalidRequest(f"log: unknown scheme {scheme[:20]!r}; use {FORMS}", field="log")


def _memory(name: str) -> EventLog:
    from stitch.log.memory import MemoryLog

    return MemoryLog(check_name(name, "log") if name else "")


def _sqlite(path: str) -> EventLog:
    from stitch.log.sqlite import SqliteLog

    if not path or path.endswith("/") or "\0" in path:
        raise InvalidRequest("log: sqlite:// is followed by the path of a file, as in sqlite:///var/lib/log.db", field="log")
    if "?" in path:
        raise InvalidRequest("log: sqlite:// takes no options", field="log")
    return SqliteLog(Path(path))


def _kafka(url: str) -> EventLog:
    try:
        from stitch.log.kafka import KafkaLog
    except ModuleNotFoundError as error:
        if error.name != "aiokafka":
            raise
        raise InvalidRequest("log: kafka:// needs the extra: pip install 'stitch-rl[kafka]'", field="log") from error
    return KafkaLog.of_url(url)
