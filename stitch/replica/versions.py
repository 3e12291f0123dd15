"""What an answer says about versions: from the engine's labels to numbers that a client may rely on (I3, I4).

Pure. A label is believed only where it names a version that this request may have met; an answer that would break its constraint
is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stitch.core.admission import Bounds
from stitch.core.errors import StitchError
from stitch.core.events import RunVersion, ServedSpan
from stitch.engines.port import Engine, Json, LabelSpan, RouteKind


class Untruthful(StitchError):
    """The versions of an answer are unknown, or are not those that its request allows. It must not count as a success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Which versions computed an answer; all of one run. `spans` is empty where the engine does not count tokens."""

    start: RunVersion
    end: RunVersion
    spans: tuple[ServedSpan, ...]


def attribute(
    engine: Engine, kind: RouteKind, answer: Json, *, tells: bool, lived: Sequence[RunVersion], bounds: Bounds
) -> Attribution:
    """The versions of a whole answer, or of the last event of a stream.

    `lived` are the versions that may have computed its tokens. Raises Untruthful.
    """
    told = engine.spans(kind, answer) if tells else None
    if told:
        found = [(of_label(span, lived), span.start, span.end) for span in told]
    elif len(lived) == 1:
        # No activation came into its life, so the gate knows.
        tokens = output_tokens(kind, answer)
        found = [(lived[0], 0, tokens)] if tokens is not None else []
    else:
        raise Untruthful("the engine did not tell which versions computed the answer")
    versions = [version for version, _, _ in found] or [lived[0]]
    for version in versions:
        if not within(bounds, version):
            raise Untruthful(f"{version} computed a part of the answer, but {bounds} was asked for")
    spans = tuple(ServedSpan(number=version.number, start=start, end=end) for version, start, end in found)
    return Attribution(start=versions[0], end=versions[-1], spans=spans)


def of_label(span: LabelSpan | str, lived: Sequence[RunVersion]) -> RunVersion:
    """The version of that label among those that the request met. Raises Untruthful."""
    label = span if isinstance(span, str) else span.label
    for version in lived:
        if str(version.number) == label:
            return version
    raise Untruthful(f"the engine names version {label[:40]!r}, which it does not serve to this request")


def within(bounds: Bounds, version: RunVersion) -> bool:
    """Whether the numbers hold. That the version lives was judged when the request was admitted, and at each activation."""
    if bounds.run is None:
        return True
    if version.run != bounds.run:
        return False
    above = bounds.least is None or version.number >= bounds.least
    return above and (bounds.greatest is None or version.number <= bounds.greatest)


def splice(kind: RouteKind, answer: Json, versions: Attribution) -> None:
    """Writes them into the answer: under `meta_info` for /generate, else at the top level."""
    holder = answer.setdefault("meta_info", {}) if kind is RouteKind.GENERATE else answer
    holder["weight_version_start"] = versions.start.number
    holder["weight_version_end"] = versions.end.number
    if versions.spans:
        holder["weight_versions"] = [{"version": str(span.number), "start": span.start, "end": span.end} for span in versions.spans]


def finished(kind: RouteKind, event: Json) -> bool:
    """Whether the event of a stream is the one that ends the output, or comes after it."""
    if kind is RouteKind.GENERATE:
        meta = event.get("meta_info")
        return isinstance(meta, dict) and meta.get("finish_reason") is not None
    choices = event.get("choices")
    if not isinstance(choices, list):
        return False
    return not choices or any(isinstance(choice, dict) and choice.get("finish_reason") is not None for choice in choices)


def output_tokens(kind: RouteKind, answer: Json) -> int | None:
    """How many tokens were computed, where the answer says so."""
    return _count(kind, answer, "completion_tokens")


def prompt_tokens(kind: RouteKind, answer: Json) -> int | None:
    """How many tokens were read, where the answer says so."""
    return _count(kind, answer, "prompt_tokens")


def _count(kind: RouteKind, answer: Json, name: str) -> int | None:
    holder = answer.get("meta_info" if kind is RouteKind.GENERATE else "usage")
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if type(value) is int else None
