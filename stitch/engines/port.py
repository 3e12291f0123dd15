"""The port Engine: what Stitch asks of an inference engine beside it.

Two halves. The control half pauses, loads, confirms and resumes; only the replica's agent calls it. The data half is pure: it tells
which HTTP routes generate, how a request is rewritten for the engine, and what an answer says about the versions that computed it.
The proxy itself moves the bytes.

An engine knows versions by labels: the bare digits of a number. Which run they belong to is the agent's knowledge; it never lets
a request live across a change of run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from stitch.core.errors import Rejected, StitchError

Json = dict[str, Any]


class PauseMode(StrEnum):
    """What becomes of requests in flight while the engine is paused."""

    ABORT = "abort"
    """They end at once, marked as aborted, with what they have."""
    RETRACT = "retract"
    """They go back to the queue and recompute their cache afterwards."""
    IN_PLACE = "in_place"
    """They stop where they are and go on with the new weights and their old cache."""


class RouteKind(StrEnum):
    """The three request and answer forms that Stitch understands."""

    GENERATE = "generate"
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What the engine says that it holds: the directory that it loaded last and its label."""

    model_path: str
    label: str | None
    paused: bool | None = None
    """None where the engine does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSpan:
    """Output tokens [start, end) were computed by the weights of this label."""

    label: str
    start: int
    end: int


class LoadRefused(Rejected):
    """The engine said no before it touched its weights: the old ones serve on."""


class EngineFailed(StitchError):
    """The engine is gone, hung, or in a state that it does not vouch for. After a load began this is terminal for the replica."""


class Engine(ABC):
    """Client of one engine. Every call is bounded by a time-out of the adapter's own."""

    name: ClassVar[str]
    generation_routes: ClassVar[Mapping[str, RouteKind]]
    """Path (POST) -> kind. Nothing else may generate."""
    read_only_routes: ClassVar[frozenset[str]]
    """Paths (GET) that change nothing and may be forwarded as they are."""
    pause_modes: ClassVar[frozenset[PauseMode]]

    @property
    @abstractmethod
    def url(self) -> str:
        """Base URL, without a trailing slash."""

    @property
    @abstractmethod
    def carry_mode(self) -> PauseMode | None:
        """The pause in which requests go on with other weights while their spans stay right to the token; None where there is
        none, so that no request may live across a load. Asked after the first `report`."""

    # --- control -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def ready(self) -> bool:
        """Whether the engine takes requests. False, never an exception, while it starts, is paused, or is gone."""

    @abstractmethod
    async def alive(self) -> bool:
        """Whether the process answers at all, true during a pause too. Generates nothing."""

    @abstractmethod
    async def report(self) -> EngineReport:
        """Raises EngineFailed."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Returns once no token is computed any more. Raises EngineFailed."""

    @abstractmethod
    async def resume(self) -> None:
        """Raises EngineFailed."""

    @abstractmethod
    async def load(self, path: Path, label: str, *, flush_cache: bool) -> None:
        """Replaces the weights by those of the checkpoint directory and sets the label. Call it while paused.

        `flush_cache` drops the KV cache; it must be False while requests are held in place. Raises LoadRefused or EngineFailed.
        Returning is no proof: confirm with `report`.
        """

    @abstractmethod
    async def set_label(self, label: str) -> None:
        """Changes the label alone, no request aborted. Raises EngineFailed."""

    @abstractmethod
    async def abort(self, request_id: str | None) -> None:
        """Ends one request by the id that `prepare` gave it, or all of them (None). An unknown id is no error."""

    @abstractmethod
    async def in_flight(self) -> int | None:
        """Requests running or queued, or None where the engine does not tell. Raises EngineFailed."""

    @abstractmethod
    async def aclose(self) -> None:
        """Frees the client; the engine itself goes on."""

    # --- data --------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def tells_versions(self, kind: RouteKind, *, stream: bool) -> bool:
        """Whether answers of this form carry the versions per token. Where not, a request must not live across an activation."""

    @abstractmethod
    def prepare(self, kind: RouteKind, body: Json, *, request_id: str, cache_namespace: str | None) -> Json:
        """The engine's own request: a copy of `body` with the request id and the cache namespace joined to the client's own, and
        without the fields that only Stitch understands. Raises InvalidRequest naming a field that would harm the engine."""

    @abstractmethod
    def spans(self, kind: RouteKind, answer: Json) -> Sequence[LabelSpan] | None:
        """The spans that an answer (or the last data event of a stream) tells; None where it tells none."""

    @abstractmethod
    def start_label(self, kind: RouteKind, answer: Json) -> str | None:
        """The label of the first token, as far as an answer or any data event of a stream tells it."""

    @abstractmethod
    def aborted(self, kind: RouteKind, answer: Json) -> bool:
        """Whether the answer ended because the request was aborted, not because it was finished."""
