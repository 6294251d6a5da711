"""PromQL from metric declarations, which contain a metric's name, type and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from rlsrl.runtime.metrics import Declaration
from rlsrl_operator.metrics import OperatorMetrics

INTERVAL = "$__rate_interval"
"""Grafana's window for rates: a few scrapes, at any interval."""
EXPERIMENT = ("namespace", "experiment")
_UNITS = ("seconds", "bytes")
_KINDS: dict[str, Literal["counter", "gauge", "histogram"]] = {
    "counter": "counter",
    "gauge": "gauge",
    "histogram": "histogram",
}


@dataclass(frozen=True)
class Expression:
    """A query and the metrics that it uses."""

    text: str
    metrics: tuple[Declaration, ...]

    def __truediv__(self, other: Expression) -> Expression:
        return self._with("/", other)

    def __sub__(self, other: Expression) -> Expression:
        return self._with("-", other)

    def or_else(self, other: Expression) -> Expression:
        """Return this query; series that it lacks come from the other."""
        return Expression(f"{self.text} or on ({', '.join(EXPERIMENT)}) {other.text}", (*self.metrics, *other.metrics))

    def where_present(self, other: Expression) -> Expression:
        """Return this query for the experiments of which the other has a series."""
        return Expression(
            f"({self.text}) and on ({', '.join(EXPERIMENT)}) ({other.text})", (*self.metrics, *other.metrics)
        )

    def _with(self, operator: str, other: Expression) -> Expression:
        return Expression(f"({self.text}) {operator} ({other.text})", (*self.metrics, *other.metrics))


@dataclass(frozen=True)
class Targets:
    """The targets that label matchers select; builds queries for them."""

    matchers: str

    def where(self, matchers: str) -> Targets:
        """Return a narrower selection."""
        return Targets(f"{self.matchers}, {matchers}")

    def series(self, metric: Declaration, suffix: str = "") -> str:
        """Return the selector of the metric's series."""
        return f"{metric.name}{suffix}{{{self.matchers}}}"

    def level(self, aggregate: str, metric: Declaration, *by: str) -> Expression:
        """Return a gauge, aggregated by these labels."""
        _expect(metric, "gauge")
        return Expression(f"{aggregate} by ({', '.join(by)}) ({self.series(metric)})", (metric,))

    def rate(self, metric: Declaration, *by: str, aggregate: str = "sum") -> Expression:
        """Return a counter's increase a second."""
        _expect(metric, "counter")
        return Expression(f"{aggregate} by ({', '.join(by)}) (rate({self.series(metric)}[{INTERVAL}]))", (metric,))

    def rate_of_processes(self, metric: Declaration, label: str, *by: str) -> Expression:
        """Return a counter's increase a second, summed over a label's values and averaged over the processes."""
        _expect(metric, "counter")
        of_each = f"sum without ({label}) (rate({self.series(metric)}[{INTERVAL}]))"
        return Expression(f"avg by ({', '.join(by)}) ({of_each})", (metric,))

    def growth(self, metric: Declaration, window: str, *by: str) -> Expression:
        """Return a counter's increase in a window."""
        _expect(metric, "counter")
        return Expression(f"sum by ({', '.join(by)}) (increase({self.series(metric)}[{window}]))", (metric,))

    def quantile(self, share: float, metric: Declaration, *by: str) -> Expression:
        """Return a quantile of a histogram."""
        _expect(metric, "histogram")
        buckets = f"sum by ({', '.join(('le', *by))}) (rate({self.series(metric, '_bucket')}[{INTERVAL}]))"
        return Expression(f"histogram_quantile({share}, {buckets})", (metric,))

    def mean(self, metric: Declaration, *by: str) -> Expression:
        """Return the mean observation of a histogram."""
        return self._histogram(metric, "_sum", "sum", by) / self._histogram(metric, "_count", "sum", by)

    def share_of_time(self, metric: Declaration, *by: str) -> Expression:
        """Return the share of time in a histogram of durations, averaged over the processes."""
        return self._histogram(metric, "_sum", "avg", by)

    def open_files(self, *by: str) -> Expression:
        """Return the largest share of open files in a process's limit."""
        used, allowed = (operator_metrics()[f"process_{name}_fds"] for name in ("open", "max"))
        share = f"max by ({', '.join(by)}) ({self.series(used)} / {self.series(allowed)})"
        return Expression(share, (used, allowed))

    def _histogram(self, metric: Declaration, suffix: str, aggregate: str, by: tuple[str, ...]) -> Expression:
        _expect(metric, "histogram")
        rate = f"rate({self.series(metric, suffix)}[{INTERVAL}])"
        return Expression(f"{aggregate} by ({', '.join(by)}) ({rate})", (metric,))


def age(moment: Expression) -> Expression:
    """Return the seconds since a time."""
    return Expression(f"time() - {moment.text}", moment.metrics)


def rest_of_one(*shares: Expression) -> Expression:
    """Return one minus the sum of some shares."""
    text = " - ".join(f"({share.text})" for share in shares)
    return Expression(f"1 - {text}", tuple(metric for share in shares for metric in share.metrics))


def zero(expression: Expression) -> Expression:
    """Return zero for each series of the expression."""
    return Expression(f"0 * {expression.text}", expression.metrics)


def operator_metrics() -> dict[str, Declaration]:
    """Return the metric declarations of the operator and of every process, by name."""
    registry = CollectorRegistry()
    OperatorMetrics(registry)
    return {each.name: each for each in map(_declaration, registry.collect())}


def _declaration(family: Metric) -> Declaration:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Declaration(
        name=name,
        kind=_KINDS[family.type],
        help=family.documentation,
        unit=next((unit for unit in _UNITS if f"_{unit}" in name), ""),
        labels=(),
        roles=(),
    )


def _expect(metric: Declaration, kind: str) -> None:
    if metric.kind != kind:
        raise ValueError(f"{metric.name} is a {metric.kind}, not a {kind}")
