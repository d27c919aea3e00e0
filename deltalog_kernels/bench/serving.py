"""`deltalog bench serving`: stock vLLM and DeltaLog on one model, in turn, each as it would serve."""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deltalog_kernels.bench import BenchError, plots
from deltalog_kernels.bench.plots import Curve

RUNNER = "deltalog_kernels.vllm_plugin.decode_times"
SIDES = ("stock", "deltalog")


class Job(BaseModel):
    """What one engine is to do. merge_interval None: stock vLLM."""

    model: str
    merge_interval: int | str | None
    batches: list[int]
    prompt_tokens: int
    steps: int
    spread: int = 0
    token_budget: int = 8192
    gpu_memory_utilization: float = 0.9
    real_weights: bool = False
    profile: bool = True
    engine_args: dict[str, Any] = {}

    def tokens(self, batch: int, steps: int) -> int:
        """Tokens of each request: the first ones decode while the last prompts are still being read."""
        reading = math.ceil(batch * self.prompt_tokens / max(1, self.token_budget - batch))
        return math.ceil(1.3 * reading) + steps + 16

    def most_tokens(self) -> int:
        return self.tokens(max(self.batches), self.steps) + 128


class Point(BaseModel):
    """Decode at one batch: the time of each step, and what a profile of some more of them says."""

    batch: int
    step_ms: list[float]
    merges: int
    state_write_bytes: int
    merge_interval: int | None
    gpu_ms: float | None = None
    recurrent_ms: float | None = None
    kernels_ms: dict[str, float] = {}

    @property
    def tpot_ms(self) -> float:
        return statistics.fmean(self.step_ms)

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.step_ms)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


Runs = dict[str, dict[int, list[Point]]]
"""Points by side and batch, one for each pair."""


def nothing_measured(job: Job) -> Runs:
    return {side: {batch: [] for batch in job.batches} for side in SIDES}


def run(job: Job, pairs: int, console: Console, runs: Runs) -> None:
    """Each pair starts a stock engine, then one with DeltaLog; both measure every batch. What an engine
    measured is printed and put into ``runs`` as it comes: it may take minutes to start, and a later batch may
    not fit. Raises BenchError when an engine ends before its last batch."""
    with Progress(console=console) as progress:
        task = progress.add_task("batches", total=2 * pairs * len(job.batches))
        for _ in range(pairs):
            for side in SIDES:
                own = job if side == "deltalog" else job.model_copy(update={"merge_interval": None})
                for point in _engine(own):
                    runs[side][point.batch].append(point)
                    progress.console.print(f"{side}, {point.batch} requests: TPOT {point.tpot_ms:.3f} ms")
                    progress.advance(task)


def _engine(job: Job) -> Iterator[Point]:
    """The points of one engine in a process of its own. Raises BenchError when it ends before the last."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "points.jsonl", Path(folder) / "log"
        result.touch()
        with log.open("w") as sink, result.open() as lines:
            command = [sys.executable, "-m", RUNNER, str(result)]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=sink, stderr=sink, text=True
            ) as process:
                assert process.stdin is not None
                process.stdin.write(job.model_dump_json())
                process.stdin.close()
                running = True
                while running:
                    running = process.poll() is None
                    for line in lines:
                        yield Point.model_validate_json(line)
                    time.sleep(0.5)
        if process.returncode:
            side = "stock" if job.merge_interval is None else "deltalog"
            raise BenchError(
                f"expected the {side} engine to measure batches {job.batches}, it ended with status "
                f"{process.returncode}:\n{log.read_text()[-3000:]}"
            )


def rows(runs: Runs) -> list[dict[str, Any]]:
    """One row a batch that both sides measured: medians over the pairs, speed-up, share and the ceiling that
    follows from it."""
    built = []
    for batch, stock in runs["stock"].items():
        ours = runs["deltalog"][batch]
        if not stock or not ours:
            continue
        ratios = [one.tpot_ms / other.tpot_ms for one, other in zip(stock, ours, strict=False)]
        row: dict[str, Any] = {"batch": batch, "speed_up": statistics.median(ratios), "speed_ups": ratios}
        for side, points in (("stock", stock), ("deltalog", ours)):
            row[side] = {
                "tpot_ms": statistics.median(point.tpot_ms for point in points),
                "p50_ms": statistics.median(point.percentile_ms(0.5) for point in points),
                "p99_ms": statistics.median(point.percentile_ms(0.99) for point in points),
                "tokens_s": batch / statistics.median(point.tpot_ms for point in points) * 1e3,
                "gpu_ms": points[-1].gpu_ms,
                "recurrent_ms": points[-1].recurrent_ms,
                "kernels_ms": points[-1].kernels_ms,
            }
        row |= {name: getattr(ours[-1], name) for name in ("merge_interval", "merges", "state_write_bytes")}
        before, after = row["stock"]["recurrent_ms"], row["deltalog"]["recurrent_ms"]
        if before and after:
            row["recurrent_share"] = before / row["stock"]["tpot_ms"]
            row["ceiling"] = row["stock"]["tpot_ms"] / (row["stock"]["tpot_ms"] - before + after)
        built.append(row)
    return built


def table(listed: list[dict[str, Any]]) -> Table:
    headings = (
        "B", "M", "stock TPOT ms", "DeltaLog TPOT ms", "speed-up", "ceiling", "share", "stock p50/p99",
        "DeltaLog p50/p99", "stock tok/s", "DeltaLog tok/s", "recurrent ms", "merges", "state MB written",
    )  # fmt: skip
    built = Table(*headings, title="a decode step, stock vLLM and DeltaLog")
    for row in listed:
        stock, ours = row["stock"], row["deltalog"]
        profiled = "ceiling" in row
        built.add_row(
            str(row["batch"]),
            str(row["merge_interval"]),
            f"{stock['tpot_ms']:.3f}",
            f"{ours['tpot_ms']:.3f}",
            f"{row['speed_up']:.3f}x",
            f"{row['ceiling']:.3f}x" if profiled else "",
            f"{row['recurrent_share']:.1%}" if profiled else "",
            f"{stock['p50_ms']:.2f}/{stock['p99_ms']:.2f}",
            f"{ours['p50_ms']:.2f}/{ours['p99_ms']:.2f}",
            f"{stock['tokens_s']:.0f}",
            f"{ours['tokens_s']:.0f}",
            f"{stock['recurrent_ms']:.3f} -> {ours['recurrent_ms']:.3f}" if profiled else "",
            str(row["merges"]),
            f"{row['state_write_bytes'] / 1e6:.0f}",
        )
    return built


def cost(listed: list[dict[str, Any]]) -> dict[str, float] | None:
    """Milliseconds for a pool's `cost`: a line through our TPOT over the batch, of whose slope the recurrent
    kernel has its part. None without two batches that were profiled. A prompt token's part is not in it."""
    profiled = [row for row in listed if "ceiling" in row]
    if len(profiled) < 2:
        return None
    batches = [row["batch"] for row in profiled]
    slope, fixed = statistics.linear_regression(batches, [row["deltalog"]["tpot_ms"] for row in profiled])
    state, through = (
        sum(row[side]["recurrent_ms"] for row in profiled) / sum(batches) for side in ("deltalog", "stock")
    )
    return {
        "fixed_ms": round(max(0.0, fixed), 3),
        "row_ms": round(max(0.0, slope - state), 5),
        "state_ms": round(state, 5),
        "write_through_state_ms": round(through, 5),
    }


def draw(measured: dict[str, Any], path: Path) -> None:
    """TPOT of both sides over the batch, from what save() wrote. Raises BenchError without results."""
    listed = measured.get("results") or []
    if not listed:
        raise BenchError("expected the JSON of `deltalog bench serving` with results, got none")
    sides = (("DeltaLog", "deltalog", True), ("stock vLLM", "stock", False))
    curves = [
        Curve.through(label, {row["batch"]: row[side]["tpot_ms"] for row in listed}, ours=ours)
        for label, side, ours in sides
    ]
    name = Path(measured["job"]["model"]).name
    title = f"{measured['machine']}, vLLM {measured['vllm']}, commit {measured['commit']}"
    plots.draw(path, title, ("requests that decode", "TPOT, ms"), {name: curves}, log_y=False)


def save(output: Path, machine: dict[str, Any], job: Job, listed: list[dict[str, Any]]) -> None:
    output.write_text(json.dumps(machine | {"job": job.model_dump(), "results": listed}, indent=1) + "\n")
