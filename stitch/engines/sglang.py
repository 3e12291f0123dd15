"""The adapter for SGLang (0.5.23 and what keeps its HTTP contract), a client of a server that runs elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import aiohttp

from stitch.engines import sglang_requests as requests
from stitch.engines.port import Engine, EngineFailed, EngineReport, Json, LabelSpan, LoadRefused, PauseMode, RouteKind

PROBE_TIMEOUT_S: Final = 5.0
"""For a question about state: answered from memory, in milliseconds unless the machine is overloaded."""
COMMAND_TIMEOUT_S: Final = 30.0
"""For pausing, resuming, labelling, aborting: SGLang looks at aborted requests once a second, and waits for a step of the model."""
LOAD_TIMEOUT_S: Final = 600.0
"""For reading a checkpoint: a terabyte at 2 GB/s. An engine that takes longer is taken for hung."""
MAX_CONFIG_BYTES: Final = 16 * 1024 * 1024
CLEAN_REFUSALS: Final = ("Failed to get weights iterator",)
"""How SGLang begins to say that it found no weights to load. Any other failure may have come after it touched its own; one
surely did: that the weights were updated, but the cache was not flushed."""

_HTTP_OK: Final = 200
_BAD_REQUEST: Final = 400
_NOT_FOUND: Final = 404
_SERVER_ERROR: Final = 500


class SglangEngine(Engine):
    """See the port.

    Token ids are checked against the vocabulary of the checkpoint that the engine holds (its `config.json`, which this process
    must be able to read), or against `vocabulary` where that is given.
    """

    name: ClassVar[str] = "sglang"
    generation_routes: ClassVar[Mapping[str, RouteKind]] = {
        "/generate": RouteKind.GENERATE,
        "/v1/completions": RouteKind.COMPLETIONS,
        "/v1/chat/completions": RouteKind.CHAT,
    }
    # Not /server_info, which shows keys, nor /health, which generates.
    read_only_routes: ClassVar[frozenset[str]] = frozenset({"/model_info", "/v1/models", "/v1/loads"})
    pause_modes: ClassVar[frozenset[PauseMode]] = frozenset(PauseMode)

    def __init__(self, url: str, *, vocabulary: int | None = None, load_timeout: float = LOAD_TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._vocabulary = vocabulary
        self._vocabulary_given = vocabulary is not None
        self._load_timeout = load_timeout
        self._overlaps = True
        self._asked_schedule = False
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return self._url

    @property
    def carry_mode(self) -> PauseMode | None:
        """Retract, unless the server runs without overlap scheduling.

        With it, a pause in place leaves the last batch's result for later: tokens that the old weights computed are recorded after
        the load, and SGLang 0.5.23 counts them as the new version's. A retraction records them first.
        """
        return PauseMode.RETRACT if self._overlaps else PauseMode.IN_PLACE

    # --- control -----------------------------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        try:
            status, _ = await self._call("GET", "/ready", timeout=PROBE_TIMEOUT_S)
        except EngineFailed:
            return False
        return status == _HTTP_OK

    async def alive(self) -> bool:
        try:
            status, _ = await self._call("GET", "/model_info", timeout=PROBE_TIMEOUT_S)
        except EngineFailed:
            return False
        return status < _SERVER_ERROR

    async def report(self) -> EngineReport:
        status, info = await self._call("GET", "/model_info", timeout=PROBE_TIMEOUT_S)
        if status == _NOT_FOUND:
            status, info = await self._call("GET", "/get_model_info", timeout=PROBE_TIMEOUT_S)
        path = info.get("model_path")
        if status != _HTTP_OK or not isinstance(path, str):
            raise EngineFailed(f"{self._url}: does not say what it serves (status {status})")
        label = info["weight_version"] if "weight_version" in info else await self._older_label()
        paused = info.get("paused")
        await self._learn_vocabulary(Path(path), only_first=True)
        if not self._asked_schedule:
            _, server = await self._call("GET", "/server_info", timeout=COMMAND_TIMEOUT_S)
            self._overlaps = server.get("disable_overlap_schedule") is not True
            self._asked_schedule = True
        return EngineReport(
            model_path=path,
            label=label if isinstance(label, str) else None,
            paused=paused if isinstance(paused, bool) else None,
        )

    async def _older_label(self) -> object:
        """Before 0.5.21 the label had a route of its own."""
        status, answer = await self._call("GET", "/get_weight_version", timeout=PROBE_TIMEOUT_S)
        return answer.get("weight_version") if status == _HTTP_OK else None

    async def pause(self, mode: PauseMode) -> None:
        await self._command("/pause_generation", {"mode": mode.value})
        # The answer says that the order was sent on. This question goes the same way behind it and comes back from the scheduler.
        status, _ = await self._call("GET", "/server_info", timeout=COMMAND_TIMEOUT_S)
        if status != _HTTP_OK:
            raise EngineFailed(f"{self._url}: its scheduler did not confirm the pause (status {status})")

    async def resume(self) -> None:
        await self._command("/continue_generation", {})

    async def load(self, path: Path, label: str, *, flush_cache: bool) -> None:
        before = await self.report()
        order = {"model_path": str(path), "weight_version": label, "flush_cache": flush_cache}
        status, answer = await self._call("POST", "/update_weights_from_disk", order, timeout=self._load_timeout)
        if status == _HTTP_OK and answer.get("success") is True:
            await self._learn_vocabulary(path, only_first=False)
            return
        message = str(answer.get("message") or answer)
        if status == _BAD_REQUEST and answer.get("success") is False and self._is_clean_refusal(message):
            after = await self.report()
            if (after.model_path, after.label) == (before.model_path, before.label):
                raise LoadRefused(f"{self._url}: refused to load {path}: {message}")
        raise EngineFailed(f"{self._url}: loading {path} failed (status {status}): {message}")

    def _is_clean_refusal(self, message: str) -> bool:
        """Whether the message proves that the weights were not touched."""
        return message.startswith(CLEAN_REFUSALS)

    async def set_label(self, label: str) -> None:
        await self._command("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def abort(self, request_id: str | None) -> None:
        await self._command("/abort_request", {"abort_all": True} if request_id is None else {"rid": request_id})

    async def in_flight(self) -> int | None:
        """As the scheduler published it last; requests held before it, by a pause, are not counted."""
        status, answer = await self._call("GET", "/v1/loads", timeout=PROBE_TIMEOUT_S)
        if status == _NOT_FOUND:
            return None
        try:
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in answer["loads"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"{self._url}: does not tell its load (status {status})") from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- data --------------------------------------------------------------------------------------------------------------

    def tells_versions(self, kind: RouteKind, *, stream: bool) -> bool:
        return kind is RouteKind.GENERATE or not stream

    def prepare(self, kind: RouteKind, body: Json, *, request_id: str, cache_namespace: str | None) -> Json:
        return requests.prepared(kind, body, request_id=request_id, cache_namespace=cache_namespace, vocabulary=self._vocabulary)

    def spans(self, kind: RouteKind, answer: Json) -> Sequence[LabelSpan] | None:
        return requests.spans(kind, answer)

    def start_label(self, kind: RouteKind, answer: Json) -> str | None:
        return requests.start_label(kind, answer)

    def aborted(self, kind: RouteKind, answer: Json) -> bool:
        return requests.aborted(kind, answer)

    # --- HTTP --------------------------------------------------------------------------------------------------------------

    async def _command(self, path: str, body: Json) -> None:
        status, answer = await self._call("POST", path, body, timeout=COMMAND_TIMEOUT_S)
        if status != _HTTP_OK:
            raise EngineFailed(f"{self._url}: {path} answered {status}: {answer.get('message') or answer}")

    async def _call(self, method: str, path: str, body: Json | None = None, *, timeout: float) -> tuple[int, Json]:
        """Status and JSON object (empty where the answer is none). Raises EngineFailed where no answer came in time."""
        if self._session is None:
            # Control calls are few; a connection of its own spares each the one that the server is just closing.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, self._url + path, json=body, timeout=limit) as response:
                raw = await response.read()
                return response.status, _json_object(raw)
        except TimeoutError as error:
            raise EngineFailed(f"{self._url}: {path} did not answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(f"{self._url}: {path} could not be reached: {error!r}") from error

    async def _learn_vocabulary(self, path: Path, *, only_first: bool) -> None:
        if self._vocabulary_given or (only_first and self._vocabulary is not None):
            return
        self._vocabulary = await asyncio.to_thread(_vocabulary_size, path) or self._vocabulary


def _json_object(raw: bytes) -> Json:
    try:
        value = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _vocabulary_size(path: Path) -> int | None:
    """`vocab_size` of a model's config.json, or of the text part of a multi-modal one."""
    try:
        file = path / "config.json"
        config: Any = json.loads(file.read_bytes()) if file.stat().st_size <= MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    for holder in (config, config.get("text_config") if isinstance(config, dict) else None):
        size = holder.get("vocab_size") if isinstance(holder, dict) else None
        if type(size) is int and size > 0:
            return size
    return None
