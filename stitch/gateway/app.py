"""The gateway's application: the token, the hot path, and Starlette for all the rest."""

from __future__ import annotations

import logging
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stitch.core.fleet import Fleet
from stitch.core.lineage import Lineage
from stitch.gateway.admission import Admission
from stitch.gateway.config import GatewayConfig
from stitch.gateway.feed import Feed
from stitch.gateway.forward import ROUTES, Forwarder
from stitch.gateway.metrics import GatewayMetrics
from stitch.gateway.pages import OPEN, Pages
from stitch.gateway.table import ReplicaTable
from stitch.http import answers
from stitch.http.auth import Bearer
from stitch.http.server import AnswerCut, Message, Receive, Scope, Send
from stitch.http.upstream import Upstream
from stitch.log.follow import Follower

logger = logging.getLogger(__name__)

_READING: Final = frozenset({"GET", "HEAD"})


class Gateway:
    """One gateway as an ASGI application. It follows nothing by itself: run its two followers beside it."""

    def __init__(self, config: GatewayConfig, fleet: Follower[Fleet], lineage: Follower[Lineage], upstream: Upstream) -> None:
        self.config = config
        self.metrics = GatewayMetrics()
        self.feed = Feed()
        self.table = ReplicaTable(fleet, lineage, pool=config.pool)
        self.admission = Admission(config, self.table)
        self.pages = Pages(self.admission, self.feed, self.metrics)
        fleet.listeners.append(self.feed.take)
        lineage.listeners.append(self.feed.take)
        self._forward = Forwarder(self.admission, upstream, self.metrics)
        self._bearer = Bearer(config.token)
        self._rest = Starlette(
            routes=self.pages.routes(),
            exception_handlers={HTTPException: _refused},
        )

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
            await self._route(scope, receive, watched)
        except AnswerCut:
            raise
        except Exception:
            # The boundary of one request: its fault is logged, and ends neither the gateway nor, silently, the answer.
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise AnswerCut("failed midway") from None
            await answers.failed()(scope, receive, send)

    def close(self) -> None:
        """Sends away all who wait and all who listen; what replicas answer already goes on."""
        self.pages.closing = True
        self.admission.waiting.close()
        self.feed.close()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path not in OPEN and not self._bearer.allows(scope["headers"]):
            await answers.unauthorized()(scope, receive, send)
        elif path not in ROUTES:
            await self._rest(scope, receive, send)
        elif scope["method"] != "POST":
            await answers.wrong_method("POST")(scope, receive, send)
        elif not self.table.complete:
            await answers.unavailable("the gateway has not read its log yet", generation_started=False)(scope, receive, send)
        else:
            await self._forward(scope, receive, send)


def create_app(config: GatewayConfig, fleet: Follower[Fleet], lineage: Follower[Lineage], upstream: Upstream) -> Gateway:
    """The application over followers and a client that the caller runs and closes."""
    return Gateway(config, fleet, lineage, upstream)


async def _refused(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, in the form of all others. What would change something and is not admitted is refused outright."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        answer = answers.wrong_method((error.headers or {}).get("Allow", "GET"))
    elif request.method not in _READING:
        answer = answers.forbidden(request.method, request.url.path)
    else:
        answer = answers.not_found(request.url.path)
    return Response(answer.body, answer.status, {name.decode(): value.decode() for name, value in answer.headers})
