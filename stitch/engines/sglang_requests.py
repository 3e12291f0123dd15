"""Requests to and answers of SGLang's HTTP interface, as pure functions: what may be sent, and what an answer says about versions.

A request that SGLang does not survive is refused here: some end every process of the server, at once and without an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stitch.core.errors import InvalidRequest
from stitch.engines.port import Json, LabelSpan, RouteKind

STITCH_FIELDS: Final = frozenset({"weight_version"})
"""Read by the admission gate, meaningless to the engine."""
NOT_FORWARDED: Final = frozenset(
    {
        "bootstrap_host",
        "bootstrap_pair_key",
        "bootstrap_port",
        "bootstrap_room",
        "decode_tp_size",
        "http_worker_ipc",
        "input_embeds",
        "kv_hints",
        "lora_id",
        "multi_item_delimiter_indices",
        "positional_embed_overrides",
        "session_id",
        "session_params",
        "token_indices_to_pool",
        "token_type_ids",
    }
)
"""Addresses of SGLang's own parts, tensors that it takes unchecked, and sessions, whose cache outlives every namespace."""
NAMESPACE_SEPARATOR: Final = "|"
"""Between the cache namespace, in which it does not occur, and the client's own key."""
MAX_TOP_LOGPROBS: Final = 256
"""Alternatives per token. Beyond the vocabulary's size SGLang dies; no trainer asks for as many as this."""


def prepared(kind: RouteKind, body: Json, *, request_id: str, cache_namespace: str | None, vocabulary: int | None) -> Json:
    """The body to send. `vocabulary` is the number of tokens, None where it is unknown: then token ids are refused.

    Give every attempt a `request_id` of its own: two seconds after a stream has ended, SGLang aborts whatever has its id then.
    """
    sent = {name: value for name, value in body.items() if name not in STITCH_FIELDS}
    for name in NOT_FORWARDED & sent.keys():
        if sent[name] is not None:
            raise InvalidRequest(f"{name}: not accepted by this replica", field=name)
    _one_sequence(kind, sent)
    for name, tokens in _token_fields(kind, sent):
        _check_tokens(name, tokens, vocabulary)
    _check_logprob_fields(sent, vocabulary)
    sent["rid"] = request_id
    sent["extra_key"] = _cache_key(sent.get("extra_key"), cache_namespace)
    if sent["extra_key"] is None:
        del sent["extra_key"]
    return sent


def _one_sequence(kind: RouteKind, sent: Json) -> None:
    """One prompt and one sequence per request: an answer to several tells the versions of one of them only."""
    if kind is RouteKind.GENERATE:
        holder = sent.get("sampling_params")
        if holder is not None and not isinstance(holder, dict):
            raise InvalidRequest("sampling_params: not an object; send one prompt per request", field="sampling_params")
        if isinstance(sent.get("text"), list):
            raise InvalidRequest("text: a list; send one prompt per request", field="text")
        holder = holder or {}
    else:
        holder = sent
        if kind is RouteKind.COMPLETIONS and "prompt" in sent:
            sent["prompt"] = _single_prompt(sent["prompt"])
    for name in ("n", "beam_width", "best_of"):
        value = holder.get(name)
        if value is not None and value != 1:
            raise InvalidRequest(f"{name}: {value!r}; send one request per sequence", field=name)


def _single_prompt(prompt: object) -> object:
    """A list of one prompt is that prompt; several are refused."""
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
        return prompt
    if len(prompt) > 1:
        raise InvalidRequest("prompt: a list of prompts; send one per request", field="prompt")
    return prompt[0]


def _token_fields(kind: RouteKind, sent: Json) -> Iterator[tuple[str, object]]:
    """Every list of token ids in the body, with the name of its field."""
    prompt = sent.get("prompt") if kind is RouteKind.COMPLETIONS else sent.get("input_ids")
    if prompt is not None and not isinstance(prompt, str):
        yield ("prompt" if kind is RouteKind.COMPLETIONS else "input_ids"), prompt
    params = sent.get("sampling_params") or {} if kind is RouteKind.GENERATE else sent
    for holder, name in ((params, "stop_token_ids"), (sent, "token_ids_logprob")):
        if holder.get(name):
            yield name, holder[name]


def _check_tokens(name: str, tokens: object, vocabulary: int | None) -> None:
    if not isinstance(tokens, list) or not tokens:
        raise InvalidRequest(f"{name}: not a list of token ids", field=name)
    if vocabulary is None:
        raise InvalidRequest(f"{name}: the model's vocabulary is not known yet, so token ids cannot be checked", field=name)
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise InvalidRequest(f"{name}: {str(token)[:40]} is not a token; they go from 0 to {vocabulary - 1}", field=name)


def _check_logprob_fields(sent: Json, vocabulary: int | None) -> None:
    """More alternatives than tokens, or a start before the prompt: SGLang computes with them as they are, and dies."""
    limit = MAX_TOP_LOGPROBS if vocabulary is None else min(MAX_TOP_LOGPROBS, vocabulary)
    for name in ("top_logprobs_num", "top_logprobs", "logprobs"):
        value = sent.get(name)
        if value is None or isinstance(value, bool):
            continue
        if not isinstance(value, int) or not 0 <= value <= limit:
            raise InvalidRequest(f"{name}: {str(value)[:40]} is not a whole number from 0 to {limit}", field=name)
    start = sent.get("logprob_start_len")
    if start is not None and (type(start) is not int or start < -1):
        raise InvalidRequest(f"logprob_start_len: {str(start)[:40]} is neither -1 nor a position", field="logprob_start_len")


def _cache_key(own: object, namespace: str | None) -> str | None:
    if own is not None and not isinstance(own, str):
        raise InvalidRequest("extra_key: not a text", field="extra_key")
    if namespace is None:
        return own or None
    return f"{namespace}{NAMESPACE_SEPARATOR}{own}" if own else namespace


def versions_holder(kind: RouteKind, answer: Json) -> Mapping[str, Any]:
    """The part of an answer or event that tells versions; empty where there is none."""
    holder = answer.get("meta_info" if kind is RouteKind.GENERATE else "metadata")
    return holder if isinstance(holder, dict) else {}


def spans(kind: RouteKind, answer: Json) -> Sequence[LabelSpan] | None:
    """The spans, in order and without a gap; None where the answer tells none, or what it tells makes no sense."""
    rows = versions_holder(kind, answer).get("weight_versions")
    if not isinstance(rows, list) or not rows:
        return None
    found: list[LabelSpan] = []
    for row in rows:
        if not isinstance(row, dict):
            return None
        label, start, end = row.get("version"), row.get("start"), row.get("end")
        if not isinstance(label, str) or type(start) is not int or type(end) is not int:
            return None
        if start != (found[-1].end if found else 0) or end < start:
            return None
        found.append(LabelSpan(label=label, start=start, end=end))
    return tuple(found)


def start_label(kind: RouteKind, answer: Json) -> str | None:
    """The label of the first token.

    An event of a stream names the label of its newest token only, so it is the first one's where there is but one; an event that
    merges several, as it comes to a slow reader, tells nothing.
    """
    known = spans(kind, answer)
    if known is not None:
        return known[0].label
    holder = versions_holder(kind, answer)
    label = holder.get("weight_version")
    return label if isinstance(label, str) and holder.get("completion_tokens") == 1 else None


def aborted(kind: RouteKind, answer: Json) -> bool:
    """Whether a finish reason says so."""
    if kind is RouteKind.GENERATE:
        reason = versions_holder(kind, answer).get("finish_reason")
        return isinstance(reason, dict) and reason.get("type") == "abort"
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return False
    return any(isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices)
