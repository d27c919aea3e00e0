"""The metrics of the service: each declared once, with the code that feeds it.

Ray exports them on the metrics port of each node under the name `ray_<name>` and adds labels of its own
(`deployment`, `replica`, `application`, `WorkerId`, ...): aggregate with `sum by (pool, model)`.
"""

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

    @property
    def prom_name(self) -> str:
        """Name that Prometheus sees."""
        return f"ray_{self.name}"

    def bind(self, pool: PoolConfig) -> Any:
        """The Ray metric for `pool`; counters exist at zero from now on. Call it inside a Serve replica."""
        # Dashboards read the declarations without Ray.
        from ray.serve import metrics

        arguments: dict[str, Any] = {"tag_keys": ("pool", "model", *self.labels), "description": self.help}
        if self.kind == "histogram":
            arguments["boundaries"] = list(self.buckets)
        metric = getattr(metrics, self.kind.capitalize())(self.name, **arguments)
        metric.set_default_tags({"pool": pool.name, "model": pool.model_id})
        if self.kind == "counter":
            for values in product(*self.labels.values()):
                # Counter.inc refuses 0, but rate() misses the first event of a series that starts above it.
                metric._record(0, tags=dict(zip(self.labels, values, strict=True)))
        return metric


OUTCOMES = ("ok", "client_error", "rejected", "aborted", "error")

REQUESTS = MetricSpec(
    "deltalog_requests_total",
    "counter",
    "requests",
    "Requests for a model of the pool by how they ended: ok, client_error (4xx), rejected (no replica "
    "accepted it: 429, 503), aborted (the client left), error (any other 5xx, or a stream that broke).",
    labels={"outcome": OUTCOMES},
)
TTFT = MetricSpec(
    "deltalog_request_ttft_seconds",
    "histogram",
    "seconds",
    "Time to first token: the request's arrival in the replica's engine to its first token there, without "
    "the ingress hop, one sample per generated sequence (n = 3 gives three).",
    buckets=SECONDS_BUCKETS,
)
ITL = MetricSpec(
    "deltalog_request_itl_seconds",
    "histogram",
    "seconds",
    "Inter-token latency: gap in the engine between consecutive outputs of a sequence, one sample per output "
    "after the first; an output may hold several tokens.",
    buckets=SECONDS_BUCKETS,
)
TPOT = MetricSpec(
    "deltalog_request_tpot_seconds",
    "histogram",
    "seconds",
    "Time per output token: (last token - first token) / (output tokens - 1) in the engine, one sample per "
    "generated sequence that finished with two tokens or more.",
    buckets=SECONDS_BUCKETS,
)
GENERATED_TOKENS = MetricSpec(
    "deltalog_generated_tokens_total", "counter", "tokens", "Tokens that the engine generated."
)
RUNNING_REQUESTS = MetricSpec(
    "deltalog_running_requests", "gauge", "requests", "Requests that the engine holds: waiting or generating."
)

SPILLED = MetricSpec(
    "deltalog_spilled_requests_total",
    "counter",
    "requests",
    "Requests that this pool served because the pools before it had no room.",
)
UNROUTED = MetricSpec(
    "deltalog_unrouted_requests_total",
    "counter",
    "requests",
    "Requests that went to the least loaded replica, because the router had no view of the pool.",
)
PREDICTED_TPOT = MetricSpec(
    "deltalog_predicted_tpot_seconds",
    "histogram",
    "seconds",
    "TPOT that the router predicted for a request where it sent it.",
    buckets=SECONDS_BUCKETS,
)
DESIRED_REPLICAS = MetricSpec(
    "deltalog_desired_replicas", "gauge", "replicas", "Replicas that the load asks for, where a pool scales."
)

DIRECTIONS = ("read", "write")
BYTE_KINDS = ("append", "merge", "fold", "fill")

MERGES = MetricSpec(
    "deltalog_merges_total", "counter", "merges", "Merges of a layer's log into its base state."
)
STATE_BYTES = MetricSpec(
    "deltalog_state_bytes_total",
    "counter",
    "bytes",
    "Bytes of base state and log that decode read and wrote, by the operation that moved them.",
    labels={"direction": DIRECTIONS, "kind": BYTE_KINDS},
)
WRITE_THROUGH_BYTES = MetricSpec(
    "deltalog_write_through_bytes_total",
    "counter",
    "bytes",
    "Bytes that write-through would have moved for the same decode tokens.",
    labels={"direction": DIRECTIONS},
)
LIVE_ENTRIES = MetricSpec(
    "deltalog_log_live_entries",
    "gauge",
    "entries",
    "Live log entries after the last step, over its rows and all layers.",
)
MERGE_INTERVAL = MetricSpec("deltalog_merge_interval", "gauge", "steps", "Steps per merge, M.")
ASIDE = MetricSpec(
    "deltalog_aside_replicas",
    "gauge",
    "replicas",
    "Replicas that decode as stock vLLM although their pool has a merge interval; their log says why.",
)


class LatencyMetrics:
    """What the engine reports of its requests, all times in seconds."""

    def __init__(self, pool: PoolConfig) -> None:
        self.ttft = TTFT.bind(pool)
        self.itl = ITL.bind(pool)
        self.tpot = TPOT.bind(pool)
        self.generated_tokens = GENERATED_TOKENS.bind(pool)
        self.running_requests = RUNNING_REQUESTS.bind(pool)


class DeltaLogMetrics:
    """Turns the workers' totals into increments of counters. Only for pools with DeltaLog on."""

    def __init__(self, pool: PoolConfig) -> None:
        self._merges = MERGES.bind(pool)
        self._state_bytes = STATE_BYTES.bind(pool)
        self._write_through_bytes = WRITE_THROUGH_BYTES.bind(pool)
        self._live_entries = LIVE_ENTRIES.bind(pool)
        self._merge_interval = MERGE_INTERVAL.bind(pool)
        self._aside = ASIDE.bind(pool)
        self._seen: dict[tuple[str, ...], int] = {}

    def update(self, workers: list[dict[str, Any]]) -> None:
        """Export what was added since the last call. `workers` holds one dict per tensor-parallel rank.

        Each rank moves the bytes of its own heads, so bytes add up; all ranks see the same rows, so merges
        and live entries are those of the first.
        """
        first = workers[0]
        self._aside.set(int("standing_aside" in first))
        if "standing_aside" in first:
            return
        self._merge_interval.set(first["merge_interval"])
        self._live_entries.set(first["live_entries"])
        self._add(self._merges, first["merges"])
        for direction in DIRECTIONS:
            moved = sum(worker["write_through_bytes"][direction] for worker in workers)
            self._add(self._write_through_bytes, moved, direction=direction)
            for kind in BYTE_KINDS:
                moved = sum(worker["state_bytes"][direction][kind] for worker in workers)
                self._add(self._state_bytes, moved, direction=direction, kind=kind)

    def _add(self, metric: Any, total: int, **labels: str) -> None:
        series = (metric.info["name"], *labels.values())
        if total > self._seen.get(series, 0):
            metric.inc(total - self._seen.get(series, 0), tags=labels)
            self._seen[series] = total
