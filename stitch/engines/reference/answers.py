"""Answers in SGLang's forms: what /generate and the two OpenAI routes say about a sequence, whole or in pieces."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from stitch.engines.port import Json, RouteKind
from stitch.engines.reference.engine import ReferenceEngine, uptime
from stitch.engines.reference.sequence import Sequence, Span, token_text

_OBJECTS = {RouteKind.COMPLETIONS: "text_completion", RouteKind.CHAT: "chat.completion"}


def weight_versions(sequence: Sequence, engine: ReferenceEngine) -> Json:
    """The spans by label, and by the digest of what was in memory: the truth that tests compare the labels with."""
    labels = sequence.labels or [Span(engine.label, 0, 0)]
    digests = sequence.digests or [Span(engine.weights.digest, 0, 0)]
    return {
        "weight_version": labels[-1].name,
        "weight_versions": [{"version": each.name, "start": each.start, "end": each.end} for each in labels],
        "weights_digests": [[each.name, each.start, each.end] for each in digests],
    }


def generate(sequence: Sequence, engine: ReferenceEngine, *, return_logprob: bool) -> Json:
    """The whole answer of /generate so far; a stream repeats it with every piece, as SGLang does."""
    meta: Json = {
        "id": sequence.rid,
        "finish_reason": sequence.finish,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": len(sequence.output),
        "cached_tokens": 0,
        "num_retractions": sequence.retractions,
        "weight_version": sequence.labels[-1].name if sequence.labels else engine.label,
    }
    if return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(sequence.logprobs, sequence.output, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(sequence.output)
    if sequence.finish is not None:
        meta |= weight_versions(sequence, engine)
        meta["e2e_latency"] = uptime(sequence)
    return {"text": sequence.text, "output_ids": list(sequence.output), "meta_info": meta}


@dataclass(slots=True, kw_only=True)
class OpenAi:
    """Renders one sequence for an OpenAI route. A stream gives what is new since the piece before."""

    kind: RouteKind
    sequence: Sequence
    engine: ReferenceEngine
    model: str
    logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    _text_sent: int = 0
    _tokens_sent: int = 0
    _role_sent: bool = False

    def whole(self) -> Json:
        choice: Json = {"index": 0, "logprobs": self._logprobs(0), **self._end()}
        if self.kind is RouteKind.CHAT:
            choice["message"] = {"role": "assistant", "content": self.sequence.text}
        else:
            choice["text"] = self.sequence.text
        metadata = weight_versions(self.sequence, self.engine)
        return {**self._frame(_OBJECTS[self.kind]), "choices": [choice], "usage": self._usage(), "metadata": metadata}

    def piece(self) -> Json:
        """What came since the last piece. The last one, which has the finish reason, carries the versions under `metadata`."""
        sequence = self.sequence
        choice: Json = {"index": 0, "logprobs": self._logprobs(self._tokens_sent), **self._end()}
        new = sequence.text[self._text_sent :]
        if self.kind is RouteKind.CHAT:
            choice["delta"] = {"content": new} if self._role_sent else {"role": "assistant", "content": new}
            self._role_sent = True
        else:
            choice["text"] = new
        self._text_sent = max(self._text_sent, len(sequence.text))
        self._tokens_sent = len(sequence.output)
        suffix = ".chunk" if self.kind is RouteKind.CHAT else ""
        event = {**self._frame(_OBJECTS[self.kind] + suffix), "choices": [choice]}
        if sequence.finish is not None:
            event["metadata"] = weight_versions(sequence, self.engine)
        return event

    def usage_piece(self) -> Json:
        """The event that a client asks for with `stream_options.include_usage`; it repeats the versions, being the last one."""
        suffix = ".chunk" if self.kind is RouteKind.CHAT else ""
        frame = self._frame(_OBJECTS[self.kind] + suffix)
        return {**frame, "choices": [], "usage": self._usage(), "metadata": weight_versions(self.sequence, self.engine)}

    def _frame(self, name: str) -> Json:
        return {"id": self.sequence.rid, "object": name, "created": self.created, "model": self.model}

    def _end(self) -> Json:
        finish = self.sequence.finish
        if finish is None:
            return {"finish_reason": None, "matched_stop": None}
        return {"finish_reason": finish["type"], "matched_stop": finish.get("matched")}

    def _usage(self) -> Json:
        prompt, output = len(self.sequence.prompt), len(self.sequence.output)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _logprobs(self, start: int) -> Json | None:
        if not self.logprobs:
            return None
        tokens: Items[int] = self.sequence.output[start:]
        values = self.sequence.logprobs[start:]
        texts = [token_text(token) for token in tokens]
        if self.kind is RouteKind.COMPLETIONS:
            top = [{each: value} for each, value in zip(texts, values, strict=True)]
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": [-1] * len(texts)}
        rows = zip(texts, tokens, values, strict=True)
        return {
            "content": [
                {"token": each, "bytes": [token] if token < 256 else [], "logprob": value, "top_logprobs": []}
                for each, token, value in rows
            ]
        }
