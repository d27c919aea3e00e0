"""Do requests go to the right replicas, and are these the right number?"""

from typing import Any

from dashboards.panels import Query, board, line_panel, stat_panel
from dashboards.promql import either, highest, mean, over, quantile, quantile_of_all, rate, total
from service.metrics.replicas import ACCELERATOR_SECONDS, REPLICA_START
from service.metrics.requests import GENERATED_TOKENS, REQUESTS, RUNNING_REQUESTS, TPOT, TPOT_SUM
from service.metrics.routing import (
    DECISION_SECONDS,
    DECISIONS,
    DESIRED_REPLICAS,
    PACKED,
    PREDICTED_TPOT,
    PREDICTED_TPOT_SUM,
    QUEUED,
    READY,
    SPILLED,
    UNROUTED,
)
from service.metrics.steps import MODEL_ERROR, STEP_SECONDS


def build() -> dict[str, Any]:
    """The board of routing and capacity."""
    stats = [
        stat_panel(
            "Replicas packed",
            "Replicas that hold requests. If it equals the ready ones, the next request opens none: watch "
            "the queue.",
            "none",
            Query(highest(PACKED)),
        ),
        stat_panel(
            "Replicas ready",
            "Replicas that generate. If it is 0, the pool serves nobody: read the replicas' logs.",
            "none",
            Query(highest(READY)),
            steps=[(0, "red"), (1, "green")],
        ),
        stat_panel(
            "Queued",
            "Requests that wait for room. If it grows for minutes, raise max_replicas or send load "
            "elsewhere.",
            "none",
            Query(total(QUEUED)),
            steps=[(1, "orange"), (64, "red")],
        ),
        stat_panel(
            "Rejected",
            "Share of requests that found no room (429, 503). If it is above 0, the queue is full or no "
            "replica is ready.",
            "percentunit",
            Query(over(rate(REQUESTS, outcome="rejected"), rate(REQUESTS))),
            steps=[(0.001, "orange"), (0.01, "red")],
        ),
        stat_panel(
            "Prediction error",
            "Mean TPOT that the router predicted, over that observed, minus 1. If it is beyond 20 % either "
            "way, calibrate the pool's cost: the router packs too much (below 0) or too little. A pool "
            "without a cost has only an assumed one.",
            "percentunit",
            Query(f"{mean(PREDICTED_TPOT_SUM, PREDICTED_TPOT)} / ({mean(TPOT_SUM, TPOT)}) - 1"),
            steps=[(-1, "red"), (-0.2, "green"), (0.2, "red")],
        ),
        stat_panel(
            "GPU-s per 1k tokens",
            "Seconds that replicas held their GPUs for 1,000 tokens; a replica without one counts as one. "
            "If it climbs, replicas idle: lower `replicas` or pack more.",
            "s",
            Query(f"1000 * {over(rate(ACCELERATOR_SECONDS), rate(GENERATED_TOKENS))}"),
        ),
    ]
    panels = [
        line_panel(
            "Replicas",
            "Replicas that the load asks for (a pool that does not scale asks for what it has), that are "
            "ready, and that hold requests. If desired stays above ready, replicas fail to start or the "
            "cluster is full.",
            "none",
            Query(either(highest(DESIRED_REPLICAS), highest(READY)), "{{pool}} desired"),
            Query(highest(READY), "{{pool}} ready"),
            Query(highest(PACKED), "{{pool}} packed"),
        ),
        line_panel(
            "Queue and running",
            "Requests that wait for room, and those that engines hold. If some wait while running is below "
            "what the replicas may hold, the SLO holds them back.",
            "none",
            Query(total(QUEUED), "{{pool}} queued"),
            Query(total(RUNNING_REQUESTS), "{{pool}} running"),
        ),
        line_panel(
            "Router decisions",
            "Decisions a second by reason. If empty or least_loaded is more than a trace, no replica keeps "
            "the SLO, or the router has no view of the pool; wait and refused ask for replicas.",
            "suffix:/s",
            Query(rate(DECISIONS, "reason"), "{{pool}} {{reason}}"),
            stacked=True,
        ),
        line_panel(
            "Spilled, rejected, without a view",
            "Requests a second that a later pool served, that found no room, and that were sent without a "
            "view of the pool. If spills last, the first pool is too small.",
            "reqps",
            Query(rate(SPILLED), "{{pool}} spilled"),
            Query(rate(REQUESTS, outcome="rejected"), "{{pool}} rejected"),
            Query(rate(UNROUTED), "{{pool}} without a view"),
        ),
        line_panel(
            "Time of a decision",
            "Time that the policy takes to choose a replica. If p99 passes 10 ms, the ingress lacks "
            "processor time: add ingress replicas.",
            "s",
            Query(quantile(0.5, DECISION_SECONDS), "{{pool}} p50"),
            Query(quantile(0.99, DECISION_SECONDS), "{{pool}} p99"),
        ),
        line_panel(
            "TPOT predicted and observed",
            "Mean TPOT that the router predicted where it sent a request, and mean TPOT of finished "
            "sequences. If they part by more than 20 %, calibrate the pool's cost.",
            "s",
            Query(mean(PREDICTED_TPOT_SUM, PREDICTED_TPOT), "{{pool}} predicted"),
            Query(mean(TPOT_SUM, TPOT), "{{pool}} observed"),
        ),
        line_panel(
            "Cost of a step off by",
            "How far, second by second, steps are from what their cost says, as a share of their time. If it "
            "stays above 20 %, the router places by a wrong idea: another process, or a load that the cost "
            "does not describe.",
            "percentunit",
            Query(over(rate(MODEL_ERROR), rate(STEP_SECONDS))),
        ),
        line_panel(
            "GPUs held",
            "GPUs that the pool's replicas hold, their starts included; a replica without one counts as one. "
            "If it stays above what the load needs, lower `replicas` or raise `consolidation`.",
            "none",
            Query(rate(ACCELERATOR_SECONDS)),
        ),
        line_panel(
            "Cold starts",
            "Time from a replica's constructor to its first token, over all replicas since Ray started: the "
            "median and the slowest, as their buckets say it. If it grows, look at model loading: a cold "
            "disk or page cache.",
            "s",
            Query(quantile_of_all(0.5, REPLICA_START), "{{pool}} median"),
            Query(quantile_of_all(1, REPLICA_START), "{{pool}} slowest"),
        ),
        line_panel(
            "Replicas started",
            "Replicas that Ray's agents saw start, those that ended included. If it grows without a change "
            "of load or version, replicas die and return: read their logs.",
            "none",
            Query(total(REPLICA_START, part="count")),
        ),
    ]
    return board(
        "deltalog-router",
        "DeltaLog / Router and capacity",
        "Where requests go, why, and what it costs.",
        stats,
        panels,
    )
