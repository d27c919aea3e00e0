"""How a metric is declared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from service.pools import PoolConfig

SECONDS_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.012, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: what it is called, what it counts, and every value that its labels can take."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels beside `pool` and `model`, each with its closed set of values."""
    buckets: tuple[float, ...] = ()
    from_zero: bool = True
    """Whether a counter exists before it counts. The sum beside a histogram does not, as the histogram does
    not: rate() misses what a series begins with, and must miss the same of both."""

    @property
    def prom_name(self) -> str:
        """Name that Prometheus sees."""
        return f"ray_{self.name}"

    def bind(self, pool: PoolConfig) -> Any:
        """The Ray metric for `pool`; counters `from_zero` exist from now on. Call it inside a Serve replica,
        and keep it: what Ray still exports of a metric ends with the object."""
        # Dashboards read the declarations without Ray.
        from ray.serve import metrics

        arguments: dict[str, Any] = {"tag_keys": ("pool", "model", *self.labels), "description": self.help}
        if self.kind == "histogram":
            arguments["boundaries"] = list(self.buckets)
        metric = getattr(metrics, self.kind.capitalize())(self.name, **arguments)
        metric.set_default_tags({"pool": pool.name, "model": pool.model_id})
        if self.kind == "counter" and self.from_zero:
            for values in product(*self.labels.values()):
                # Counter.inc refuses 0, but rate() misses the first event of a series that starts above it.
                metric._record(0, tags=dict(zip(self.labels, values, strict=True)))
        return metric


def add(metric: Any, value: float, **labels: str) -> None:
    """Count ``value``; Ray refuses to count nothing."""
    if value > 0:
        metric.inc(value, tags=labels)
