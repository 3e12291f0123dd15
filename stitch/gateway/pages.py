"""Everything but generation: what the gateway knows, for people, scrapers and orchestrators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from stitch.core import admission as judge
from stitch.core.fleet import Member
from stitch.core.ids import PolicyId
from stitch.core.lineage import Lineage, PolicyLineage
from stitch.gateway import metrics
from stitch.gateway.admission import Admission
from stitch.gateway.feed import Feed
from stitch.gateway.forward import ROUTES
from stitch.gateway.metrics import GatewayMetrics, Gauge
from stitch.gateway.table import ReplicaTable
from stitch.http import answers
from stitch.http.answers import Answer, json_answer
from stitch.log.follow import Follower

OPEN: Final = frozenset({"/livez", "/readyz", "/metrics"})
"""Paths that need no token: orchestrators and scrapers hold none, and they tell no secret."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the gateway may be sent requests, and what speaks against it."""

    reasons: tuple[str, ...]

    @property
    def ready(self) -> bool:
        return not self.reasons


class Pages:
    """The endpoints, over one gateway's parts."""

    def __init__(self, admission: Admission, feed: Feed, counters: GatewayMetrics) -> None:
        self.admission, self.feed, self.counters = admission, feed, counters
        self.closing = False

    @property
    def table(self) -> ReplicaTable:
        return self.admission.table

    @property
    def lineage(self) -> Follower[Lineage]:
        return self.table.lineage

    def routes(self) -> list[Route]:
        """For Starlette."""
        return [
            Route("/", self.index),
            Route("/livez", self.livez),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{model}", self.model),
            Route("/policies", self.policies),
            Route("/replicas", self.replicas),
            Route("/events", self.events),
        ]

    def readiness(self) -> Readiness:
        """Ready once both folds reached the end of the log. From then on a log that is away makes the table stale, not the gateway
        unready: replicas judge for themselves, and losing the log shall stop no rollout. A fold that froze is another matter."""
        reasons = []
        complete = self.table.complete
        for follower in (self.lineage, self.table.fleet):
            if follower.frozen is not None:
                reasons.append(f"{follower.stream.value}: {follower.frozen}")
            elif not complete and not follower.healthy:
                reasons.append(f"{follower.stream.value}: {follower.error or 'not read to its end yet'}")
        if self.closing:
            reasons.append("the gateway stops")
        return Readiness(tuple(reasons))

    # --- endpoints -----------------------------------------------------------------------------------------------------------

    async def index(self, request: Request) -> Answer:
        paths = sorted({*ROUTES, *(route.path for route in self.routes())})
        return json_answer(200, {"service": "stitch gateway", "policies": self.admission.policies(), "paths": paths})

    async def livez(self, request: Request) -> Answer:
        return json_answer(200, {"live": True})

    async def readyz(self, request: Request) -> Answer:
        readiness = self.readiness()
        body = {"ready": readiness.ready, "reasons": readiness.reasons, **self._health()}
        return json_answer(200 if readiness.ready else 503, body)

    async def metrics(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse(metrics.text([*self.counters.all(), *self._gauges()]), media_type=metrics.CONTENT_TYPE)

    async def models(self, request: Request) -> Answer:
        return json_answer(200, {"object": "list", "data": self._models()})

    async def model(self, request: Request) -> Answer:
        wanted = request.path_params["model"]
        found = next((model for model in self._models() if model["id"] == wanted), None)
        return (
            json_answer(200, found)
            if found
            else answers.error_answer(
                404,
                "NotFound",
                f"model: {wanted[:200]!r} is neither a policy nor policy@channel here",
                retryable=False,
                field="model",
            )
        )

    async def policies(self, request: Request) -> Answer:
        return json_answer(200, {"policies": [self._policy(p) for p in self.admission.policies()], **self._health()})

    async def replicas(self, request: Request) -> Answer:
        members = sorted(self.table.members(), key=lambda m: m.state.replica)
        return json_answer(200, {"replicas": [self._replica(m) for m in members], **self._health()})

    async def events(self, request: Request) -> Answer | StreamingResponse:
        if self.feed.full:
            return answers.busy("as many listen to /events as may")
        return StreamingResponse(self.feed.listen(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    # --- what they show ------------------------------------------------------------------------------------------------------

    def _health(self) -> Json:
        silence = self.table.silence
        return {
            "stale": self.table.stale,
            "seconds_since_heard": None if silence is None else round(silence, 3),
            "streams": {f.stream.value: _stream(f) for f in (self.lineage, self.table.fleet)},
        }

    def _models(self) -> list[Json]:
        found: list[Json] = []
        for policy in self.admission.policies():
            lineage = self.admission.lineage(policy)
            created = lineage.owner.position.time_ms // 1000 if lineage.owner else 0
            names = [policy, *(f"{policy}@{channel}" for channel in sorted(lineage.channels))]
            found.extend({"id": name, "object": "model", "created": created, "owned_by": "stitch"} for name in names)
        return found

    def _policy(self, policy: PolicyId) -> Json:
        lineage = self.admission.lineage(policy)
        owner = lineage.owner
        return {
            "policy": policy,
            "run": owner.run if owner else None,
            "owner": owner.writer if owner else None,
            "owned_since_ms": owner.position.time_ms if owner else None,
            "epoch": lineage.epoch,
            "head": lineage.head,
            "tip": _text(lineage.tip),
            "versions": len(lineage.versions),
            "channels": {name: _channel(lineage, name) for name in sorted(lineage.channels)},
            "replicas": sum(row.policy == policy for row in self.table.rows.values()),
        }

    def _replica(self, member: Member) -> Json:
        state = member.state
        lineage = self.admission.lineage(state.policy)
        lag = judge.lag(lineage, state.serving) if state.serving is not None and state.serving in lineage.versions else None
        return {
            "replica": state.replica,
            "url": state.url,
            "policy": state.policy,
            "channel": state.channel,
            "pool": state.pool,
            "engine": state.engine,
            "incarnation": member.incarnation,
            "phase": state.phase.value,
            "transition": state.transition.value,
            "in_rotation": state.replica in self.table.rows,
            "serving": _text(state.serving),
            "weights_digest": state.weights_digest,
            "target": _text(state.target),
            "staged": _text(state.staged),
            "lag": lag,
            "capacity": state.capacity,
            "in_flight": state.in_flight,
            "in_flight_here": self.table.in_flight.get(state.replica, 0),
            "suspected": self.table.suspected(state.replica),
            "lease_seconds_left": round(self.table.lease_left(member), 3),
            "heard_ms": member.heard.time_ms,
            "pause_ms": state.pause_ms,
            "error": state.error,
            "labels": dict(state.labels),
        }

    def _gauges(self) -> Iterable[Gauge]:
        table = self.table
        return (
            Gauge(
                "stitch_gateway_waiting", "Requests held for a version or for room.", lambda: [((), len(self.admission.waiting))]
            ),
            Gauge("stitch_gateway_in_flight", "Requests under way at replicas.", lambda: [((), sum(table.in_flight.values()))]),
            Gauge("stitch_gateway_table_stale", "1 while the log is away or silent for all.", lambda: [((), int(table.stale))]),
            Gauge("stitch_gateway_ready", "1 while ready.", lambda: [((), int(self.readiness().ready))]),
            Gauge("stitch_gateway_event_listeners", "Open /events streams.", lambda: [((), self.feed.listeners)]),
            Gauge(
                "stitch_gateway_replicas",
                "Replicas heard of, by policy and phase.",
                lambda: metrics.counted((m.state.policy, m.state.phase.value) for m in table.members()).items(),
                ("policy", "phase"),
            ),
            *self._stream_gauges(),
        )

    def _stream_gauges(self) -> Iterable[Gauge]:
        streams = (self.lineage, self.table.fleet)
        return (
            Gauge(
                "stitch_gateway_log_lag",
                "Offsets between the end of a stream and what was folded of it.",
                lambda: [((f.stream.value,), f.lag) for f in streams if f.lag is not None],
                ("stream",),
            ),
            Gauge(
                "stitch_gateway_log_age_seconds",
                "Since the log last answered for a stream.",
                lambda: [((f.stream.value,), f.age) for f in streams if f.age is not None],
                ("stream",),
            ),
            Gauge(
                "stitch_gateway_events_skipped",
                "Optional events that this release cannot read, since the start.",
                lambda: [((f.stream.value, type_), count) for f in streams for type_, count in f.skipped.items()],
                ("stream", "type"),
            ),
        )


def _stream(follower: Follower[Any]) -> Json:
    error = follower.frozen or follower.error
    return {
        "caught_up": follower.caught_up,
        "frozen": follower.frozen is not None,
        "position": follower.position,
        "lag": follower.lag,
        "skipped": dict(follower.skipped),
        "error": str(error) if error else None,
    }


def _channel(lineage: PolicyLineage, name: Any) -> Json:
    channel = lineage.channels[name]
    return {"sequence": channel.sequence, "target": _text(channel.target), "moved_ms": channel.position.time_ms}


def _text(value: object | None) -> str | None:
    return None if value is None else str(value)
