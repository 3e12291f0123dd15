"""`stitch gateway` and `stitch replica`: the two processes that stay."""

from __future__ import annotations

import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import click

from stitch.cli.options import (
    TOKEN_FILE,
    channel_option,
    json_option,
    log_option,
    parent_option,
    policy_option,
    read_token,
    read_token_file,
    run,
    store_option,
    token_option,
)
from stitch.cli.sizes import Size
from stitch.core.errors import InvalidRequest


def _announce(kind: str, as_json: bool) -> Any:
    """Says once where the server listens: one line, JSON for programs."""

    def ready(url: str) -> None:
        click.echo(json.dumps({"url": url}) if as_json else f"{kind} listens at {url}")

    return ready


def _end_with_parent(parent_pid: int | None) -> None:
    if parent_pid is not None:
        from stitch.pools.children import end_with_parent

        end_with_parent(parent_pid)


@click.command()
@log_option()
@policy_option(required=False)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--pool", metavar="NAME", help="Route to the replicas of this pool only.")
@click.option(
    "--deadline", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True, help="Seconds to find room."
)
@click.option("--default-max-lag", type=click.IntRange(min=0), help="Bound on staleness of requests that name none.")
@click.option("--default-wait", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Seconds to wait for a version.")
@token_option()
@json_option()
@parent_option()
def gateway(
    log_url: str,
    policy: str | None,
    host: str,
    port: int,
    pool: str | None,
    deadline: float,
    default_max_lag: int | None,
    default_wait: float,
    token_file: Path | None,
    as_json: bool,
    parent_pid: int | None,
) -> None:
    """Admit requests by the versions that they allow, and route them to replicas.

    The routing table is folded from the log alone: run as many gateways as you like.
    """
    from stitch.core.ids import policy_id, pool_name
    from stitch.gateway.config import GatewayConfig
    from stitch.gateway.serve import run_gateway

    _end_with_parent(parent_pid)
    config = GatewayConfig(
        log=log_url,
        policy=policy_id(policy) if policy else None,
        host=host,
        port=port,
        pool=pool_name(pool) if pool else None,
        deadline=deadline,
        default_max_lag=default_max_lag,
        default_wait=default_wait,
        token=read_token(token_file),
    )
    run(run_gateway(config, ready=_announce("gateway", as_json)))


@click.command(context_settings={"ignore_unknown_options": False})
@log_option()
@store_option()
@policy_option()
@channel_option()
@click.option("--id", "replica_name", metavar="NAME", help="Who the replica is; a new one with the same id replaces it.")
@click.option("--pool", default="default", show_default=True, metavar="NAME")
@click.option("--engine", type=click.Choice(["reference", "sglang"]), default="reference", show_default=True)
@click.option("--engine-url", metavar="URL", help="A running engine to stand beside.")
@click.option(
    "--workdir", type=click.Path(file_okay=False, path_type=Path), help="Where weights are staged; keep it over restarts."
)
@click.option(
    "--base", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A checkpoint at hand, used if it is one."
)
@click.option(
    "--verify",
    type=click.Choice(["full", "incremental"]),
    default="full",
    show_default=True,
    help="What is read again before the engine loads a version: every byte, or what changed (then all of it at --scrub-interval).",
)
@click.option(
    "--scrub-interval",
    type=click.FloatRange(min=0, min_open=True),
    default=900.0,
    show_default=True,
    help="Seconds between two readings of all that is staged, with --verify incremental.",
)
@click.option(
    "--single-buffer",
    is_flag=True,
    help="Keep the model once on the disk, not twice, and change it while the engine serves from its memory: going back to an "
    "older version, or a staging that fails half-way, then costs a whole download. Not for engines that map their files.",
)
@click.option(
    "--disk-budget",
    type=Size(),
    metavar="BYTES",
    help="Most bytes that the workdir may hold, such as 300GB (default: what is free).",
)
@click.option(
    "--memory-budget", type=Size(), metavar="BYTES", help="Most bytes that decoding takes beside mapped files, such as 64MiB."
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 takes a free one.")
@click.option("--advertise-url", metavar="URL", help="Where gateways reach it (default: http://$POD_IP:PORT, else host and port).")
@click.option("--capacity", type=click.IntRange(min=1), default=256, show_default=True, help="Requests answered at a time.")
@click.option("--mode", type=click.Choice(["in_place", "quiesce"]), default="in_place", show_default=True)
@click.option("--kv-scope", type=click.Choice(["session", "version", "none"]), default="session", show_default=True)
@click.option("--audit", type=click.Choice(["off", "all"]), default="off", show_default=True)
@click.option("--heartbeat", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True, help="Seconds.")
@click.option("--reconcile", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True, help="Seconds.")
@click.option("--drain-timeout", type=click.FloatRange(min=0), default=1800.0, show_default=True, help="Seconds, on SIGTERM.")
@click.option(
    "--drain-limit", type=click.FloatRange(min=0, min_open=True), default=45.0, show_default=True, help="Seconds, per swap."
)
@click.option(
    "--swap-limit", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True, help="Seconds, gate closed."
)
@click.option("--control-token-file", type=TOKEN_FILE, help="For /wake and /drain (default: the token of the rest).")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE")
@token_option()
@json_option()
@parent_option()
@click.argument("command", nargs=-1)
def replica(**given: Any) -> int:
    """Keep one engine at its channel's version, and answer through it.

    Beside a running engine (--engine-url), or with a COMMAND that starts one, in which {model} and {port} are filled in:

        stitch replica --engine sglang -- python -m sglang.launch_server --model-path {model} --port {port}
    """
    from stitch.replica.main import run_replica

    _end_with_parent(given["parent_pid"])
    config = _replica_config(given)
    # The first one drains, the second ends that, and the engine in good order.
    return run(run_replica(config, ready=_announce("replica", given["as_json"])), patience=2)


def _replica_config(given: dict[str, Any]) -> Any:
    from stitch.core.ids import channel_name, policy_id, pool_name, replica_id
    from stitch.replica.config import AuditMode, KvScope, Mode, ReplicaConfig
    from stitch.weights.verify import Verify

    name = replica_id(given["replica_name"] or _default_name())
    return ReplicaConfig(
        log=given["log_url"],
        store=given["store_url"],
        policy=policy_id(given["policy"]),
        channel=channel_name(given["channel"]),
        replica=name,
        pool=pool_name(given["pool"]),
        workdir=(given["workdir"] or Path("stitch-data") / name).resolve(),
        host=given["host"],
        port=given["port"],
        advertise_url=given["advertise_url"] or _pod_url(given["port"]),
        engine=given["engine"],
        engine_url=given["engine_url"],
        command=tuple(given["command"]),
        base=given["base"],
        single_buffer=given["single_buffer"],
        verify=Verify(given["verify"]),
        scrub_seconds=given["scrub_interval"],
        disk_budget=given["disk_budget"],
        memory_budget=given["memory_budget"],
        capacity=given["capacity"],
        mode=Mode(given["mode"]),
        kv_scope=KvScope(given["kv_scope"]),
        audit=AuditMode(given["audit"]),
        token=read_token(given["token_file"]),
        control_token=read_token_file(given["control_token_file"]) if given["control_token_file"] else None,
        labels=dict(_label(text) for text in given["labels"]),
        heartbeat_seconds=given["heartbeat"],
        reconcile_seconds=given["reconcile"],
        drain_timeout=given["drain_timeout"],
        drain_seconds=given["drain_limit"],
        swap_seconds=given["swap_limit"],
    )


def _default_name() -> str:
    """The host's name, made a name of ours, and a random part: two replicas of one machine are two."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname().lower()).strip("-")
    return f"{host[:60] or 'replica'}-{secrets.token_hex(3)}"


def _pod_url(port: int) -> str | None:
    pod = os.environ.get("POD_IP")
    if not pod:
        return None
    if port == 0:
        raise InvalidRequest("port: 0 cannot be advertised under $POD_IP; name one, or give --advertise-url", field="port")
    return f"http://{pod}:{port}"


def _label(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--label")
    return key, value
