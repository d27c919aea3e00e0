"""Does the SLO hold?"""

from typing import Any

from dashboards.panels import Query, board, line_panel, stat_panel
from dashboards.promql import either, highest, over, quantile, rate, total
from service.metrics.requests import (
    GENERATED_TOKENS,
    REQUESTS,
    RUNNING_REQUESTS,
    SLO_SEQUENCES,
    SLO_TPOT,
    SLO_TTFT,
    TPOT,
    TTFT,
)
from service.metrics.routing import QUEUED, READY
from service.metrics.spec import MetricSpec

GOOD = rate(SLO_SEQUENCES, tpot="met", ttft="met")
OK = rate(REQUESTS, outcome="ok")
FAILED = ("rejected", "error")
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def _percentiles(spec: MetricSpec, slo: MetricSpec) -> list[Query]:
    curves = [Query(quantile(share, spec), f"{{{{pool}}}} {name}") for name, share in SHARES.items()]
    return [*curves, Query(highest(slo), "{{pool}} SLO")]


def build() -> dict[str, Any]:
    """The board that a person on call opens first."""
    stats = [
        stat_panel(
            "SLO met",
            "Share of finished sequences that met TPOT and TTFT of their pool's SLO; where a pool has no "
            "SLO, share of requests that ended ok. If it falls, see which of the two percentiles below "
            "crosses its line: TPOT means batches too large, TTFT means too few replicas or long prompts.",
            "percentunit",
            Query(either(over(GOOD, rate(SLO_SEQUENCES)), over(OK, rate(REQUESTS)))),
            steps=[(0, "red"), (0.95, "orange"), (0.99, "green")],
        ),
        stat_panel(
            "TPOT p95",
            "Time per output token that 95 % of sequences stay under. If it nears the SLO, look at the "
            "decode batch on the Log board, then add replicas or lower max_concurrent_requests.",
            "s",
            Query(quantile(0.95, TPOT)),
        ),
        stat_panel(
            "TTFT p95",
            "Time to first token that 95 % of sequences stay under, without the ingress hop. If it climbs "
            "while TPOT holds, requests wait or prompts are long: see the queue on the router board.",
            "s",
            Query(quantile(0.95, TTFT)),
        ),
        stat_panel(
            "Errors",
            "Share of requests that failed through our fault (error) or found no room (rejected). If it is "
            "above 0, see which outcome below: rejected asks for replicas, error for the replicas' logs.",
            "percentunit",
            Query(over(rate(REQUESTS, outcome=FAILED), rate(REQUESTS))),
            steps=[(0.001, "orange"), (0.01, "red")],
        ),
        stat_panel(
            "Tokens generated",
            "Output tokens a second of each pool. If it drops while requests wait, a replica stalls: "
            "compare the step time on the engine board.",
            "suffix:tok/s",
            Query(rate(GENERATED_TOKENS)),
        ),
        stat_panel(
            "Replicas ready",
            "Replicas that generate. If it is 0, the pool serves nobody: read the replicas' logs for a "
            "failed start, and see cold starts on the router board.",
            "none",
            Query(highest(READY)),
            steps=[(0, "red"), (1, "green")],
        ),
    ]
    panels = [
        line_panel(
            "Time per output token",
            "TPOT percentiles of each pool, and its SLO as a line where it has one. If p95 crosses the "
            "line, batches are too large for this hardware: add replicas, or let another pool take over.",
            "s",
            *_percentiles(TPOT, SLO_TPOT),
        ),
        line_panel(
            "Time to first token",
            "TTFT percentiles of each pool, and its SLO as a line where it has one. If p95 crosses the "
            "line, look at saturation below and at the share of mixed steps on the engine board.",
            "s",
            *_percentiles(TTFT, SLO_TTFT),
        ),
        line_panel(
            "Goodput",
            "Sequences a second that met the SLO (without one: requests that ended ok), beside all that "
            "ended. If the two part, capacity is spent on answers that come too late: shed load or add "
            "replicas.",
            "suffix:/s",
            Query(either(GOOD, OK), "{{pool}} good"),
            Query(either(rate(SLO_SEQUENCES), rate(REQUESTS)), "{{pool}} all"),
        ),
        line_panel(
            "Requests by outcome",
            "Requests a second by how they ended. If rejected grows, add replicas; error, read the "
            "replicas' logs; aborted, clients give up waiting: see TTFT.",
            "reqps",
            Query(rate(REQUESTS, "outcome"), "{{pool}} {{outcome}}"),
            stacked=True,
        ),
        line_panel(
            "Saturation",
            "Requests that engines hold, and requests that wait for room. If a queue stands for minutes, "
            "the pool is too small: raise max_replicas.",
            "none",
            Query(total(RUNNING_REQUESTS), "{{pool}} running"),
            Query(total(QUEUED), "{{pool}} queued"),
        ),
        line_panel(
            "Tokens a second",
            "Output tokens a second of each pool. If it is flat while running requests grow, the pool is at "
            "its limit: more load adds only waiting.",
            "suffix:tok/s",
            Query(rate(GENERATED_TOKENS)),
        ),
    ]
    return board("deltalog-slo", "DeltaLog / SLO", "Does the SLO hold, and if not, why.", stats, panels)
