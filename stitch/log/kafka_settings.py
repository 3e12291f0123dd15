"""What a `kafka://` URL says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

from aiokafka.helpers import create_ssl_context

from stitch.core.errors import InvalidRequest
from stitch.core.ids import check_name
from stitch.log.port import Stream

DEFAULT_NAMESPACE: Final = "stitch"
MAX_REPLICATION: Final = 16

_SECURITY: Final = frozenset({"security_protocol", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password"})
_TLS_FILES: Final = {"ssl_cafile": "cafile", "ssl_certfile": "certfile", "ssl_keyfile": "keyfile"}
_OPTIONS: Final = sorted({*_SECURITY, *_TLS_FILES, "replication"})
_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """Where the log is, and how to get in."""

    servers: tuple[str, ...]
    """host:port of the bootstrap brokers."""
    namespace: str = DEFAULT_NAMESPACE
    replication: int | None = None
    """Replicas of topics to be made; None: three where there are three brokers, else one."""
    security: Mapping[str, str] | None = None
    """The options of security, as the URL gives them."""

    @property
    def url(self) -> str:
        """Without the options, which may hold a password."""
        return f"kafka://{','.join(self.servers)}/{self.namespace}"

    def topic(self, stream: Stream) -> str:
        return f"{self.namespace}.{stream.value}"

    def client_options(self) -> dict[str, Any]:
        """Arguments that every aiokafka client takes. Reads the files of certificates that the URL names."""
        given = dict(self.security or {})
        options: dict[str, Any] = {name: given[name] for name in _SECURITY & given.keys()}
        if options.get("security_protocol", "").endswith("SSL"):
            files = {argument: given[name] for name, argument in _TLS_FILES.items() if name in given}
            try:
                options["ssl_context"] = create_ssl_context(**files)
            except OSError as error:
                raise InvalidRequest(f"log: the files of the TLS certificates: {error}", field="log") from error
        return {"bootstrap_servers": list(self.servers), **options}


def parse_kafka_url(url: str) -> KafkaSettings:
    """Raises InvalidRequest; no message repeats an option's value."""
    rest = url.removeprefix("kafka://")
    rest, _, query = rest.partition("?")
    authority, _, namespace = rest.partition("/")
    if "@" in authority:
        raise InvalidRequest("log: give user and password as options sasl_plain_username and sasl_plain_password", field="log")
    servers = tuple(authority.split(","))
    for server in servers:
        host, colon, port = server.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port[:6]) < 65536):
            raise InvalidRequest(f"log: {server[:80]!r} is not host:port, as in kafka://localhost:9092/stitch", field="log")
    options = _options(query)
    replication = options.pop("replication", None)
    return KafkaSettings(
        servers=servers,
        namespace=check_name(namespace or DEFAULT_NAMESPACE, "log"),
        replication=None if replication is None else _replication(replication),
        security=options,
    )


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise InvalidRequest(f"log: unknown option {name[:40]!r}; kafka:// takes {', '.join(_OPTIONS)}", field="log")
        if name in options:
            raise InvalidRequest(f"log: option {name} is given twice", field="log")
        options[name] = value
    if options.get("security_protocol", "PLAINTEXT") not in _PROTOCOLS:
        raise InvalidRequest(f"log: security_protocol is one of {', '.join(_PROTOCOLS)}", field="log")
    return options


def _replication(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text[:4]) <= MAX_REPLICATION):
        raise InvalidRequest(f"log: replication is a whole number from 1 to {MAX_REPLICATION}", field="log")
    return int(text)
