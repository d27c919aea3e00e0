"""A board with every type of panel, and an exporter for it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from waiting import repeated

RATE = "[$__rate_interval]"
POOL = '{pool=~"$pool"}'


@contextmanager
def exporter(port: int) -> Iterator[None]:
    """Two pools with a histogram, a counter and a gauge that move."""
    registry = CollectorRegistry()
    seconds = Histogram(
        "sample_seconds", "", ["pool"], registry=registry, buckets=(0.01, 0.02, 0.04, 0.08, 0.16)
    )
    moved = Counter("sample_bytes", "", ["pool"], registry=registry)
    rows = Gauge("sample_rows", "", ["pool"], registry=registry)
    dice = random.Random(1)

    def move() -> None:
        for pool, mean in (("one", 0.03), ("two", 0.06)):
            seconds.labels(pool).observe(dice.expovariate(1 / mean))
            moved.labels(pool).inc(2e6)
            rows.labels(pool).set(8)

    server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    try:
        with repeated(move, 0.1):
            yield
    finally:
        server.shutdown()
        thread.join()


def panel(number: int, kind: str, title: str, *exprs: str, unit: str = "none", **more: Any) -> dict[str, Any]:
    """A panel, two in a row of the grid."""
    return {
        "id": number,
        "type": kind,
        "title": title,
        "description": f"What {title} means.",
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": name, "expr": expr, "legendFormat": "{{pool}}", "range": True}
            for name, expr in zip("ABC", exprs, strict=False)
        ],
        **more,
    }


def board() -> dict[str, Any]:
    """Every type of panel, one without data, one with a broken query and one of an unknown type."""
    quantile = f"histogram_quantile(0.5, sum by (pool, le) (rate(sample_seconds_bucket{POOL}{RATE})))"
    override = {"matcher": {"id": "byName", "options": "two"}, "properties": [{"id": "unit", "value": "ms"}]}
    lines = panel(1, "timeseries", "Lines", quantile, unit="s")
    lines["fieldConfig"]["overrides"] = [override]
    table = panel(4, "table", "Table", f"sample_rows{POOL}", f"2 * sample_rows{POOL}", unit="suffix:rows")
    heat = panel(6, "heatmap", "Heat", f"sum by (le) (rate(sample_seconds_bucket{POOL}{RATE}))", unit="s")
    text = panel(5, "text", "Words", options={"mode": "markdown", "content": "**What** to do"})
    panels = [
        lines,
        panel(2, "stat", "Figure", f"rate(sample_bytes_total{POOL}{RATE})", unit="Bps"),
        panel(3, "bargauge", "Bars", f"sample_rows{POOL}", unit="suffix:rows"),
        table,
        text,
        heat,
        panel(7, "timeseries", "Nothing", "sample_that_nobody_exports"),
        panel(8, "timeseries", "Broken", "sum by (pool"),
        panel(9, "piechart", "Unknown", "sample_rows"),
        {
            "id": 10,
            "type": "row",
            "title": "A row",
            "gridPos": {"x": 0, "y": 40, "w": 24, "h": 1},
            "panels": [],
        },
    ]
    pool = {
        "name": "pool",
        "type": "query",
        "includeAll": True,
        "allValue": ".*",
        "current": {"value": "$__all"},
    }
    link = {"type": "dashboards", "tags": ["sample"], "title": "Others"}
    return {
        "uid": "sample",
        "title": "Sample",
        "tags": ["sample"],
        "time": {"from": "now-1m", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource"}, pool]},
        "links": [link],
        "panels": panels,
    }


def sister() -> dict[str, Any]:
    """A second board, to be linked to."""
    return board() | {"uid": "sister", "title": "Sister", "panels": []}
