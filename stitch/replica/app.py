"""The replica's HTTP surface: generation by way of the proxy, what the agent says of itself, and the few orders that it takes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from stitch.core.replay import plain
from stitch.engines.port import RouteKind
from stitch.http import answers
from stitch.http.answers import Answer, json_answer
from stitch.http.auth import Bearer
from stitch.http.server import AnswerCut, Message, Receive, Scope, Send
from stitch.replica.agent import Agent
from stitch.replica.audit import Audit
from stitch.replica.config import ReplicaConfig
from stitch.replica.proxy import Proxy

log = logging.getLogger(__name__)

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_OK: Final = 200
_ACCEPTED: Final = 202
_NOT_YET: Final = 503

Page = Callable[[], Answer]


class ReplicaApp:
    """An ASGI application. `drain` is called when an operator asks the replica to leave."""

    def __init__(
        self,
        config: ReplicaConfig,
        agent: Agent,
        proxy: Proxy,
        audit: Audit,
        *,
        generation: Mapping[str, RouteKind],
        read_only: frozenset[str],
        drain: Callable[[], None],
    ) -> None:
        self._config, self._agent, self._proxy, self._audit, self._drain = config, agent, proxy, audit, drain
        self._generation, self._read_only = generation, read_only
        self._rollout = Bearer(config.token)
        self._control = Bearer(config.token if config.control_token is None else config.control_token)
        self._open: Mapping[str, Page] = {"/livez": self._livez, "/startupz": self._startupz, "/readyz": self._readyz}
        self._shown: Mapping[str, Page] = {"/server_info": self._server_info, "/metrics": self._metrics}
        self._orders: Mapping[str, Page] = {"/wake": self._wake, "/drain": self._order_drain}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, HTTP only."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']}: only http is served")
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._route(scope)(scope, receive, watched)
        except AnswerCut:
            raise
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            if started:
                raise
            await answers.failed()(scope, receive, send)

    def _route(self, scope: Scope) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """Who answers. Whatever is not known here would by-pass admission, and is refused."""
        method, path = scope["method"], scope["path"]
        reads = method in ("GET", "HEAD")
        if reads and path in self._open:
            return self._open[path]()
        if method == "POST" and path in self._orders:
            return self._orders[path]() if self._control.allows(scope["headers"]) else answers.unauthorized()
        if not self._rollout.allows(scope["headers"]) and not self._control.allows(scope["headers"]):
            return answers.unauthorized()
        if reads and path in self._shown:
            return self._shown[path]()
        if method == "POST" and path in self._generation:
            return self._generate
        if method == "GET" and path in self._read_only:
            return self._proxy.read_only
        if path in self._generation or path in self._orders:
            return answers.wrong_method("POST")
        return answers.forbidden(method, path)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._proxy.generate(self._generation[scope["path"]], scope, receive, send)

    # --- pages -------------------------------------------------------------------------------------------------------------

    def _livez(self) -> Answer:
        """The agent works: it answers here, and its tasks end the process where they fail."""
        return json_answer(_OK, {"live": True})

    def _startupz(self) -> Answer:
        started = self._agent.caught_up
        return json_answer(_OK if started else _NOT_YET, {"started": started, "phase": self._agent.phase})

    def _readyz(self) -> Answer:
        ready = self._agent.ready
        return json_answer(_OK if ready else _NOT_YET, {"ready": ready, "phase": self._agent.phase})

    def _wake(self) -> Answer:
        self._agent.reconciler.wake()
        return json_answer(_ACCEPTED, {"woken": True})

    def _order_drain(self) -> Answer:
        self._drain()
        return json_answer(_ACCEPTED, {"draining": True})

    def _server_info(self) -> Answer:
        config, agent = self._config, self._agent
        gate, state = agent.gate, agent.announcer.state
        serving, target, tip = gate.serving, agent.reconciler.target, agent.reconciler.lineage.tip
        active = agent.staging.active
        return json_answer(
            _OK,
            {
                "policy": config.policy,
                "channel": config.channel,
                "replica": config.replica,
                "pool": config.pool,
                "life": agent.announcer.life,
                "incarnation": agent.announcer.incarnation,
                "phase": state.phase,
                "ready": agent.ready,
                "serving": None if serving is None else plain(serving.ref) | {"weights_digest": serving.weights_digest},
                "following": state.following,
                "target": None if target is None else plain(target.ref) | {"sequence": target.sequence, "origin": target.origin},
                "staged": None if state.staged is None else plain(state.staged),
                "tip": None if tip is None else str(tip),
                "buffers": {
                    "active": None if active is None else active.buffer,
                    "path": None if active is None else str(active.path),
                },
                "engine": {"name": config.engine, "url": agent.engine.url if agent.engine is not None else None},
                "mode": config.mode,
                "kv_scope": config.kv_scope,
                "gate": {
                    "open": not gate.closed,
                    "in_flight": len(gate.in_flight),
                    "waiting": gate.waiting,
                    "capacity": config.capacity,
                },
                "activations": agent.activations,
                "last_pause_ms": agent.announcer.state.pause_ms,
                "last_error": agent.announcer.state.error,
                "log": {
                    "publications": _said(agent.reconciler.follower.error),
                    "pointer": agent.reconciler.pointer_error,
                    "activations": agent.announcer.error,
                    "unwritten": agent.announcer.waiting,
                    "skipped": {
                        f.stream.value: dict(f.skipped) for f in (agent.reconciler.follower, agent.announcer.fleet) if f.skipped
                    },
                },
            },
        )

    def _metrics(self) -> Answer:
        agent, gate = self._agent, self._agent.gate
        serving = gate.serving
        values: list[tuple[str, str, float]] = [
            ("stitch_replica_ready", "gauge", agent.ready),
            ("stitch_replica_in_flight", "gauge", len(gate.in_flight)),
            ("stitch_replica_waiting", "gauge", gate.waiting),
            ("stitch_replica_gate_open", "gauge", not gate.closed),
            ("stitch_replica_serving_version", "gauge", -1 if serving is None else serving.ref.number),
            ("stitch_replica_activations_total", "counter", agent.activations),
            ("stitch_replica_last_pause_milliseconds", "gauge", agent.announcer.state.pause_ms or 0.0),
            ("stitch_replica_untruthful_total", "counter", self._proxy.untruthful),
            ("stitch_replica_buffers_damaged_total", "counter", agent.staging.damages),
            ("stitch_replica_audit_written_total", "counter", self._audit.written),
            ("stitch_replica_audit_dropped_total", "counter", self._audit.dropped),
        ]
        lines = [line for name, kind, value in values for line in (f"# TYPE {name} {kind}", f"{name} {float(value):g}")]
        lines.append("# TYPE stitch_replica_answers_total counter")
        lines += [f'stitch_replica_answers_total{{status="{s}"}} {n}' for s, n in sorted(self._proxy.statuses.items())]
        streams = (agent.reconciler.follower, agent.announcer.fleet)
        for name, measured in (
            ("stitch_replica_log_lag", [(f.stream, f.lag) for f in streams]),
            ("stitch_replica_log_age_seconds", [(f.stream, f.age) for f in streams]),
        ):
            lines.append(f"# TYPE {name} gauge")
            lines += [f'{name}{{stream="{stream}"}} {value:g}' for stream, value in measured if value is not None]
        body = "\n".join(lines) + "\n"
        return Answer(status=_OK, body=body.encode(), headers=((b"content-type", METRICS_TYPE.encode()),))


def _said(error: Exception | None) -> str | None:
    return None if error is None else str(error)
