"""What a `kafka://` URL says, and the environment beside it: secrets are better kept out of URLs, which end up in logs and
process lists.

    kafka://a:9093,b:9093/namespace?security_protocol=SASL_SSL&ssl_cafile=/etc/kafka/ca.pem

with STITCH_KAFKA_USERNAME and STITCH_KAFKA_PASSWORD in the environment. Options:

- `security_protocol`: PLAINTEXT (default), SSL, SASL_PLAINTEXT or SASL_SSL.
- `ssl_cafile`: the authority that signed the brokers' certificates (default: the system's). `ssl_certfile`, `ssl_keyfile`: this
  client's own certificate, where brokers ask for one. The name in a broker's certificate must be the one it is reached by.
- `sasl_mechanism`: PLAIN (default), SCRAM-SHA-256 or SCRAM-SHA-512; `sasl_plain_username`, `sasl_plain_password`: before what the
  environment says.
- `replication`: of topics that are made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
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
_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_FROM_ENVIRONMENT: Final = {
    "sasl_plain_username": "STITCH_KAFKA_USERNAME",
    "sasl_plain_password": "STITCH_KAFKA_PASSWORD",  # the variable's name
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """Where the log is, and how to get in."""

    servers: tuple[str, ...]
    """host:port of the bootstrap brokers."""
    namespace: str = DEFAULT_NAMESPACE
    replication: int | None = None
    """Replicas of topics to be made; None: what the brokers' own default says, and three where that is one and there are three."""
    security: Mapping[str, str] | None = field(default=None, repr=False)
    """The options of security, as URL and environment give them. May hold a password."""

    @property
    def url(self) -> str:
        """Without the options, which may hold a password."""
        return f"kafka://{','.join(self.servers)}/{self.namespace}"

    def topic(self, stream: Stream) -> str:
        return f"{self.namespace}.{stream.value}"

    @property
    def hint(self) -> str:
        """What else may be wrong where no broker can be reached: a refused certificate or password looks the same."""
        protocol = (self.security or {}).get("security_protocol", "PLAINTEXT")
        if protocol == "PLAINTEXT":
            return ""
        return f" (with {protocol}, an untrusted certificate or a wrong user or password looks like this too)"

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
    return _with_credentials(options) if options.get("security_protocol", "").startswith("SASL_") else options


def _with_credentials(options: dict[str, str]) -> dict[str, str]:
    if options.setdefault("sasl_mechanism", "PLAIN") not in _MECHANISMS:
        raise InvalidRequest(f"log: sasl_mechanism is one of {', '.join(_MECHANISMS)}", field="log")
    for name, variable in _FROM_ENVIRONMENT.items():
        value = options.get(name) or os.environ.get(variable)
        if not value:
            raise InvalidRequest(f"log: SASL needs {name}; set {variable} in the environment", field="log")
        options[name] = value
    return options


def _replication(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text[:4]) <= MAX_REPLICATION):
        raise InvalidRequest(f"log: replication is a whole number from 1 to {MAX_REPLICATION}", field="log")
    return int(text)
