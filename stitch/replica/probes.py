"""Probes of a publication: prompts with the answer that the version gives to them, by which a load is held to what it claims.

An engine may name the right version and compute with the wrong weights; only its answers tell. A probe is
`{"input_ids": [...], "output_ids": [...], "logprobs": [...], "tolerance": 0.05}`: the greedy continuation and the log probability
of each of its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stitch.core.errors import InvalidRequest
from stitch.engines.port import Engine, Json, RouteKind
from stitch.http.upstream import Upstream, UpstreamError
from stitch.replica.activate import ReplicaFailed

DEFAULT_TOLERANCE: Final = 0.05
"""Of a log probability: above what kernels differ by in bf16, below what another version's weights give."""
PROBE_SECONDS: Final = 30.0

_HTTP_OK: Final = 200


async def run_probes(engine: Engine, upstream: Upstream, probes: Sequence[Mapping[str, Any]], *, life: str) -> None:
    """Asks the engine each probe. Raises ReplicaFailed at the first whose answer is not the expected one."""
    path = next(path for path, kind in engine.generation_routes.items() if kind is RouteKind.GENERATE)
    for number, probe in enumerate(probes):
        try:
            await _run(engine, upstream, path, probe, f"probe-{life[:12]}-{number}")
        except (UpstreamError, InvalidRequest, KeyError, TypeError, ValueError, IndexError) as error:
            raise ReplicaFailed(f"probe {number} could not be asked: {error!r}") from error


async def _run(engine: Engine, upstream: Upstream, path: str, probe: Mapping[str, Any], request_id: str) -> None:
    expected, logprobs = list(probe["output_ids"]), [float(value) for value in probe["logprobs"]]
    body: Json = {
        "input_ids": list(probe["input_ids"]),
        "sampling_params": {"temperature": 0, "max_new_tokens": len(expected), "ignore_eos": True},
        "return_logprob": True,
    }
    sent = engine.prepare(RouteKind.GENERATE, body, request_id=request_id, cache_namespace=request_id)
    response = await upstream.open(
        "POST",
        engine.url + path,
        [(b"content-type", b"application/json")],
        json.dumps(sent).encode(),
        first_byte_timeout=PROBE_SECONDS,
    )
    answer = json.loads(await response.read())
    if response.status != _HTTP_OK:
        raise ReplicaFailed(f"a probe was answered with status {response.status}")
    found = [(float(row[0]), int(row[1])) for row in answer["meta_info"]["output_token_logprobs"]]
    tolerance = float(probe.get("tolerance", DEFAULT_TOLERANCE))
    for at, (token, logprob) in enumerate(zip(expected, logprobs, strict=True)):
        if found[at][1] != token or abs(found[at][0] - logprob) > tolerance:
            raise ReplicaFailed(
                f"a probe's token {at} is {found[at][1]} with log probability {found[at][0]:.4f}; "
                f"the version gives {token} with {logprob:.4f}: the engine computes with other weights"
            )
