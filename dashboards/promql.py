"""PromQL of the boards, from the declarations of the metrics."""

from service.metrics.spec import MetricSpec

WINDOW = "$__rate_interval"
EACH = ("pool", "model")
"""What a series of a board stands for. Every other label splits it when a replica comes or goes."""

HISTOGRAM_PARTS = ("bucket", "count")
"""Ray's exporter rebuilds a histogram's sum from the middles of its buckets: no mean comes from it."""


def series(spec: MetricSpec, part: str = "", **labels: str | tuple[str, ...]) -> str:
    """The chosen pools' series of ``spec``; of a histogram its ``part``: bucket or count."""
    if (spec.kind == "histogram") != (part in HISTOGRAM_PARTS):
        raise ValueError(f"{spec.name} is a {spec.kind}, got part {part!r}; name a part of histograms alone")
    matchers = [f'{name}=~"${name}"' for name in EACH]
    for name, wanted in labels.items():
        values = (wanted,) if isinstance(wanted, str) else wanted
        if not set(values) <= set(spec.labels[name]):
            raise ValueError(f"{spec.name} has {name} {spec.labels[name]}, got {values}; correct the board")
        matchers.append(f'{name}=~"{"|".join(values)}"' if len(values) > 1 else f'{name}="{values[0]}"')
    return f"{spec.prom_name}{f'_{part}' if part else ''}{{{', '.join(matchers)}}}"


def _by(*more: str) -> str:
    return f"by ({', '.join((*EACH, *more))})"


def rate(spec: MetricSpec, *by: str, part: str = "", **labels: str | tuple[str, ...]) -> str:
    """Events a second of each pool, and of each value of the labels ``by``."""
    return f"sum {_by(*by)} (rate({series(spec, part, **labels)}[{WINDOW}]))"


def total(spec: MetricSpec, *by: str, part: str = "") -> str:
    """Sum over the replicas or ingresses of each pool."""
    return f"sum {_by(*by)} ({series(spec, part)})"


def highest(spec: MetricSpec) -> str:
    """The largest value in each pool: for gauges that all replicas or ingresses repeat."""
    return f"max {_by()} ({series(spec)})"


def lowest(spec: MetricSpec) -> str:
    """The smallest value in each pool."""
    return f"min {_by()} ({series(spec)})"


def over(dividend: str, divisor: str) -> str:
    """A ratio of two sums; nothing where the divisor is 0, for there is nothing to say."""
    return f"{dividend} / ({divisor} > 0)"


def mean(sums: MetricSpec, samples: MetricSpec) -> str:
    """Mean of a histogram's samples, from the counter that adds them up."""
    return over(rate(sums), rate(samples, part="count"))


def quantile(share: float, spec: MetricSpec) -> str:
    """Percentile of a histogram over all replicas of each pool."""
    return f"histogram_quantile({share:g}, {rate(spec, 'le', part='bucket')})"


def quantile_of_all(share: float, spec: MetricSpec) -> str:
    """Percentile of all samples there are: for what a replica gives once."""
    return f"histogram_quantile({share:g}, {total(spec, 'le', part='bucket')})"


def either(*expressions: str) -> str:
    """For each pool the first expression that has a value."""
    return " or ".join(expressions)
