"""Counters, histograms and gauges in Prometheus' text form: few, so that a dependency would be more than they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SECONDS: Final = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of the buckets of a duration."""

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float]]


class Counter:
    """Counts by label values, which the caller keeps few."""

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:
        self.name, self.help, self.labels = name, help, labels
        self.values: dict[Labels, int] = {} if labels else {(): 0}

    def add(self, *values: str) -> None:
        """One more."""
        self.values[values] = self.values.get(values, 0) + 1

    def lines(self) -> list[str]:
        """In text form."""
        head = _head(self.name, self.help, "counter")
        return head + [f"{self.name}{_shown(self.labels, key)} {value}" for key, value in sorted(self.values.items())]


class Histogram:
    """Durations in seconds."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...] = SECONDS) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """One more duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def lines(self) -> list[str]:
        """In text form."""
        lines, below = _head(self.name, self.help, "histogram"), 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            lines.append(f'{self.name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{self.name}_sum {self.total!r}", f"{self.name}_count {below}"]


class Gauge:
    """Read when it is asked for."""

    def __init__(self, name: str, help: str, read: Callable[[], Samples], labels: Labels = ()) -> None:
        self.name, self.help, self.read, self.labels = name, help, read, labels

    def lines(self) -> list[str]:
        """In text form."""
        head = _head(self.name, self.help, "gauge")
        return head + [f"{self.name}{_shown(self.labels, key)} {value!r}" for key, value in sorted(self.read())]


def text(metrics: Iterable[Counter | Histogram | Gauge]) -> str:
    """The whole page."""
    return "\n".join(line for metric in metrics for line in metric.lines()) + "\n"


class GatewayMetrics:
    """What the request path counts."""

    def __init__(self) -> None:
        self.answers = Counter("stitch_gateway_answers_total", "Generation requests by route and status.", ("route", "status"))
        self.retries = Counter("stitch_gateway_retries_total", "Attempts that did not start, by what was said.", ("reason",))
        self.gone = Counter("stitch_gateway_clients_gone_total", "Clients that left before their answer was complete.")
        self.cut = Counter("stitch_gateway_answers_cut_total", "Answers that broke off because their replica went away.")
        self.placing = Histogram("stitch_gateway_placing_seconds", "From a request's last byte to a replica that takes it.")
        self.first_byte = Histogram("stitch_gateway_first_byte_seconds", "From a request's last byte to its answer's first.")

    def all(self) -> list[Counter | Histogram | Gauge]:
        """In the order of the page."""
        return [self.answers, self.retries, self.gone, self.cut, self.placing, self.first_byte]


def _head(name: str, help: str, kind: str) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]


def _shown(labels: Labels, values: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def counted(values: Iterable[Labels]) -> Mapping[Labels, float]:
    """How often each occurs."""
    counts: dict[Labels, float] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts
