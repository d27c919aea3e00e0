"""What a simulation found: a row for each policy, as table, JSON and plot."""

from math import inf
from pathlib import Path

from pydantic import BaseModel
from rich.table import Table

from service.config import ConfigError
from service.sim.scenario import PolicyName, Scenario
from service.sim.world import Outcome


class Percentiles(BaseModel):
    """Milliseconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> "Percentiles":
        ordered = sorted(values) or [float("nan")]
        return cls(
            **{
                f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)]
                for share in (50, 95, 99)
            }
        )


class Row(BaseModel):
    """One policy. attainment: share of all requests whose TPOT and TTFT were as promised; rejected and lost
    ones were not. goodput: requests a second of which that is true."""

    policy: PolicyName
    requests: int
    attainment: float
    attainment_by_class: dict[str, float]
    goodput: float
    tpot: Percentiles
    ttft: Percentiles
    gpu_seconds: float
    gpu_seconds_per_1000_tokens: float
    most_replicas: int
    rejected: int
    lost: int
    spilled: int
    most_queued: int
    reasons: dict[str, int]

    @classmethod
    def of(cls, policy: PolicyName, scenario: Scenario, outcome: Outcome) -> "Row":
        done = [job for job in outcome.jobs if job.end_s < inf]
        kept = [job for job in done if job.ttft_ms <= job.slo.ttft_ms and job.tpot_ms <= job.slo.tpot_ms]
        tokens = sum(job.output_tokens for job in done)
        classes = {slo.name: [job for job in outcome.jobs if job.slo is slo] for slo in scenario.slos}
        within = {id(job) for job in kept}
        return cls(
            policy=policy,
            requests=len(outcome.jobs),
            attainment=len(kept) / max(1, len(outcome.jobs)),
            attainment_by_class={
                name: sum(id(job) in within for job in jobs) / max(1, len(jobs))
                for name, jobs in classes.items()
            },
            goodput=len(kept) / outcome.end_s if outcome.end_s else 0.0,
            # One token has no time per output token.
            tpot=Percentiles.of([job.tpot_ms for job in done if job.output_tokens > 1]),
            ttft=Percentiles.of([job.ttft_ms for job in done]),
            gpu_seconds=outcome.gpu_seconds,
            gpu_seconds_per_1000_tokens=1000 * outcome.gpu_seconds / max(1, tokens),
            most_replicas=outcome.most_replicas,
            rejected=outcome.rejected,
            lost=outcome.lost,
            spilled=sum(job.spilled for job in done),
            most_queued=outcome.most_queued,
            reasons=dict(outcome.reasons),
        )


class Report(BaseModel):
    scenario: Scenario
    rows: list[Row]


def table(report: Report) -> Table:
    """A row a policy."""
    headings = ("policy", "attained", "TPOT ms p50", "p99", "TTFT ms p50", "p99", "GPU-s", "per 1,000 tokens",
                "replicas", "rejected", "lost", "spilled", "waited at most")  # fmt: skip
    built = Table(*headings, title=f"{report.rows[0].requests if report.rows else 0} simulated requests")
    for row in report.rows:
        built.add_row(
            row.policy,
            f"{row.attainment:.2%}",
            f"{row.tpot.p50:.1f}",
            f"{row.tpot.p99:.1f}",
            f"{row.ttft.p50:.0f}",
            f"{row.ttft.p99:.0f}",
            f"{row.gpu_seconds:.0f}",
            f"{row.gpu_seconds_per_1000_tokens:.3f}",
            str(row.most_replicas),
            str(row.rejected),
            str(row.lost),
            str(row.spilled),
            str(row.most_queued),
        )
    return built


def plot(report: Report, path: Path) -> None:
    """GPU-seconds, TPOT p99 and what was attained, a bar a policy. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            f"expected matplotlib to draw {path}; got none; pip install -e '.[bench]' or drop --plot"
        ) from None
    panels = {
        "GPU-seconds per 1,000 tokens": [row.gpu_seconds_per_1000_tokens for row in report.rows],
        "TPOT p99, ms": [row.tpot.p99 for row in report.rows],
        "requests within their SLO, %": [100 * row.attainment for row in report.rows],
    }
    figure = Figure(figsize=(12, 0.6 + 0.4 * len(report.rows)), layout="constrained")
    names = [row.policy for row in report.rows]
    for axis, (title, values) in zip(
        figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True
    ):
        bars = axis.barh(names, values)
        axis.bar_label(bars, fmt="%.4g", padding=-34, color="white")
        axis.set_title(title, fontsize="medium")
        axis.invert_yaxis()
    figure.savefig(path, dpi=120)
