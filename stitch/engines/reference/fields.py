"""Reading request bodies: what is malformed is refused with the field's name, as SGLang does, always with status 400."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request

from stitch.core.errors import InvalidRequest
from stitch.engines.port import Json
from stitch.engines.reference.model import VOCABULARY, encode
from stitch.engines.reference.sequence import DEFAULT_MAX_NEW_TOKENS, TOP_K_ALL, Sampling, Sequence

MAX_CONTEXT: Final = 32_768
"""Tokens of prompt and output together."""
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
MAX_STOPS: Final = 32

_SAMPLING_KEYS: Final = frozenset(
    {"max_new_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "sampling_seed", "n"}
)


class BadBody(InvalidRequest):
    """The body does not have the form that the route takes."""


async def read_object(request: Request) -> Json:
    """The body as a JSON object."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise BadBody(f"body: more than {MAX_BODY_BYTES} bytes", field="body")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"body: not JSON: {error}", field="body") from error
    if not isinstance(body, dict):
        raise BadBody("body: not a JSON object", field="body")
    return body


def text(body: Mapping[str, Any], name: str, default: str | None = None) -> str | None:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise BadBody(f"{name}: not a text", field=name)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadBody(f"{name}: neither true nor false", field=name)
    return value


def whole(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadBody(f"{name}: not a whole number", field=name)
    return value


def number(body: Mapping[str, Any], name: str, default: float, allowed: Callable[[float], bool], range_text: str) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not allowed(value):
        raise InvalidRequest(f"{name} must be {range_text}, got {value!r}.", field=name)
    return float(value)


def token_ids(value: object, name: str) -> list[int]:
    """A flat list of tokens of the vocabulary."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{name} must be a list of token ids, one prompt per request, and cannot be empty.", field=name)
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < VOCABULARY:
            raise InvalidRequest(f"{name}: {token!r} is not a token; valid range is [0, {VOCABULARY}).", field=name)
    return value


def stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOPS or not all(isinstance(each, str) for each in items):
        raise InvalidRequest(f"stop must be a text or a list of up to {MAX_STOPS} texts.", field="stop")
    return tuple(each for each in items if each)


def sampling(params: Mapping[str, Any]) -> Sampling:
    """SGLang's `sampling_params`, as far as this engine implements them; an unknown key is refused there too."""
    unknown = sorted(params.keys() - _SAMPLING_KEYS)
    if unknown:
        raise InvalidRequest(
            f"unknown field `{unknown[0]}`, expected one of {', '.join(sorted(_SAMPLING_KEYS))}", field="sampling_params"
        )
    max_new_tokens = whole(params, "max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    top_k = whole(params, "top_k", TOP_K_ALL)
    if max_new_tokens is None or max_new_tokens < 0:
        raise InvalidRequest(f"max_new_tokens must be at least 0, got {max_new_tokens}.", field="max_new_tokens")
    if top_k is None or (top_k != TOP_K_ALL and top_k < 1):
        raise InvalidRequest(f"top_k must be -1 (disable) or at least 1, got {top_k}.", field="top_k")
    if whole(params, "n", 1) != 1:
        raise InvalidRequest("n must be 1: this engine answers one sequence per request.", field="n")
    stop_ids = params.get("stop_token_ids")
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=number(params, "temperature", 1.0, lambda v: v >= 0, "a non-negative finite number"),
        top_p=number(params, "top_p", 1.0, lambda v: 0 < v <= 1, "in (0, 1]"),
        top_k=top_k,
        stop=stops(params.get("stop")),
        stop_token_ids=frozenset(token_ids(stop_ids, "stop_token_ids")) if stop_ids else frozenset(),
        ignore_eos=flag(params, "ignore_eos", False),
        seed=whole(params, "sampling_seed", None),
    )


def openai_sampling(body: Mapping[str, Any], max_tokens: int | None) -> Sampling:
    """The same from an OpenAI body, whose fields lie at the top level and have other names."""
    return sampling(
        {
            "max_new_tokens": max_tokens,
            "sampling_seed": body.get("seed"),
            **{name: body.get(name) for name in ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "n")},
        }
    )


def generate_prompt(body: Mapping[str, Any]) -> list[int]:
    """The prompt of /generate: `text` or `input_ids`."""
    words, ids = body.get("text"), body.get("input_ids")
    if words is None and ids is None:
        raise InvalidRequest("Either text, input_ids or input_embeds should be provided.", field="text")
    if words is None:
        return token_ids(ids, "input_ids")
    if not isinstance(words, str):
        raise BadBody("text: not a text; this engine takes one prompt per request", field="text")
    return encode(words)


def completion_prompt(body: Mapping[str, Any]) -> list[int]:
    """`prompt` of /v1/completions: a text or a list of tokens."""
    prompt = body.get("prompt")
    if prompt is None:
        raise BadBody("prompt: Field required", field="prompt")
    if isinstance(prompt, str):
        return encode(prompt)
    return token_ids(prompt, "prompt")


def chat_prompt(body: Mapping[str, Any]) -> list[int]:
    """`messages` of /v1/chat/completions through the one template of this engine: `role: content`, a line each."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadBody("messages: not a list", field="messages")
    if not messages:
        raise InvalidRequest("Messages cannot be empty.", field="messages")
    lines = [_chat_line(message) for message in messages]
    return encode("".join((*lines, "assistant: ")))


def _chat_line(message: object) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadBody("messages: an entry has no role", field="messages")
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    if not isinstance(content, str):
        raise BadBody("messages: content is no text", field="messages")
    return f"{message['role']}: {content}\n"


def _part(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise BadBody("messages: this engine reads parts of type text only", field="messages")
    return str(part["text"])


def sequence(body: Mapping[str, Any], prompt: list[int], how: Sampling) -> Sequence:
    """The request, its output clipped to the context as SGLang clips it."""
    room = MAX_CONTEXT - len(prompt)
    if room < 1:
        raise InvalidRequest(f"The prompt has {len(prompt)} tokens, the context holds {MAX_CONTEXT}.", field="prompt")
    text(body, "extra_key")
    text(body, "cache_salt")
    clipped = replace(how, max_new_tokens=min(how.max_new_tokens, room))
    return Sequence(rid=text(body, "rid") or uuid.uuid4().hex, prompt=prompt, sampling=clipped)
