"""Running a gateway: followers, client and server together, for as long as the caller lets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from stitch.gateway.app import create_app
from stitch.gateway.config import GatewayConfig
from stitch.http.server import GRACE_SECONDS, serve
from stitch.http.upstream import Upstream
from stitch.log.opening import open_log
from stitch.log.views import fleet_follower, lineage_follower


async def run_gateway(config: GatewayConfig, *, ready: Callable[[str], None] | None = None, grace: int = GRACE_SECONDS) -> None:
    """Serves until cancelled; `ready` is told the base URL once it listens (whether it is ready, `/readyz` tells).

    When cancelled, waiting requests are sent away and open answers get `grace` seconds. Raises InvalidRequest where the log's
    streams are missing or wrong, Unavailable where the log cannot be reached at the start, OSError where the address is taken.
    """
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(open_log(config.log))
        await log.setup(create=log.embedded)
        fleet, lineage = fleet_follower(log), lineage_follower(log)
        upstream = await stack.enter_async_context(Upstream())
        gateway = create_app(config, fleet, lineage, upstream)
        following = [asyncio.create_task(f.run(), name=f"follow {f.stream.value}") for f in (fleet, lineage)]
        stack.push_async_callback(_stop, following)
        url = await stack.enter_async_context(serve(gateway, config.host, config.port, grace=grace))
        stack.callback(gateway.close)
        if ready is not None:
            ready(url)
        await _until_broken(following)


async def _until_broken(following: list[asyncio.Task[None]]) -> None:
    """Returns never; raises what a follower failed with. One that froze has ended in order: `/readyz` says so, the rest goes on."""
    pending = set(following)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    await asyncio.Event().wait()


async def _stop(following: list[asyncio.Task[None]]) -> None:
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)  # what one failed with was raised by _until_broken
