"""What the logs of a pool did, from the totals of its workers."""

from typing import Any

from service.metrics.spec import MetricSpec, add
from service.pools import PoolConfig

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
        add(metric, total - self._seen.get(series, 0), **labels)
        self._seen[series] = total
