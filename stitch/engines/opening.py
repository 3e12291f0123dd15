"""From an engine's name to its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from stitch.core.errors import InvalidRequest
from stitch.engines.port import Engine
from stitch.engines.reference.client import ReferenceEngineClient
from stitch.engines.sglang import SglangEngine

ENGINES: Final[Mapping[str, type[SglangEngine]]] = {
    SglangEngine.name: SglangEngine,
    ReferenceEngineClient.name: ReferenceEngineClient,
}


def open_engine(name: str, url: str) -> Engine:
    """The adapter for the engine that answers at `url`. Connects on first use. Raises InvalidRequest."""
    adapter = ENGINES.get(name)
    if adapter is None:
        raise InvalidRequest(f"engine: {name!r} is not known; use one of {', '.join(sorted(ENGINES))}", field="engine")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InvalidRequest(f"engine URL: {url!r} is not of the form http://host:port", field="engine_url")
    return adapter(url)
