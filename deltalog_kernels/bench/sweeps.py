"""Sweeps of the GPU bench: over the merge interval, over sizes of the state, over the batch.

Each prints a table and, where an output is asked for, writes JSON there and a PNG beside it.
"""

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deltalog_kernels import GDN, KDA, RWKV6, LogLayout, traffic
from deltalog_kernels.bench import BenchError, plots, report
from deltalog_kernels.bench.gpu import Case
from deltalog_kernels.bench.plots import Curve

LAYERS = tuple(
    LogLayout(family, key_heads, 32, 128, 128, 1) for family, key_heads in ((GDN, 16), (KDA, 32), (RWKV6, 32))
)
BATCH = 128
MERGE_INTERVALS = (1, 2, 4, 8, 16, 32)
HEAD_DIMS, HEADS = (64, 128, 256), (16, 32, 64)
BATCHES = tuple(2**n for n in range(11))

Pair = tuple[Case, dict[str, Any]]
"""A case and what gpu.measure says of it."""


class Sweep(Enum):
    """What is varied."""

    MERGE_INTERVAL = "merge interval"
    STATE = "state"
    BATCH = "batch"


def run(sweep: Sweep, output: Path | None, commit: str) -> None:
    """Check and time a sweep's cases. Raises BenchError when a check fails, or, the numbers written, when
    there is nothing to draw with."""
    console = report.wide_console()
    cases = _cases(sweep)
    measured = report.measured(cases, commit, console, published=sweep is Sweep.BATCH)
    measured["sweep"] = sweep.value
    pairs = list(zip(cases, measured["results"], strict=True))
    if sweep is Sweep.MERGE_INTERVAL:
        measured["merge_interval"] = choices(pairs)
        _print_intervals(pairs, measured["merge_interval"], console)
    else:
        _print_times(sweep, pairs, console)
    report.conclude(measured, console)
    report.save(measured, output)
    if output is not None:
        draw(measured, output.with_suffix(".png"))


def _cases(sweep: Sweep) -> list[Case]:
    return {Sweep.MERGE_INTERVAL: _intervals, Sweep.STATE: _states, Sweep.BATCH: _batches}[sweep]()


def _intervals() -> list[Case]:
    return [
        Case(replace(layer, merge_interval=interval), BATCH)
        for layer in LAYERS
        for interval in MERGE_INTERVALS
    ]


def _best(layout: LogLayout) -> LogLayout:
    """The layout with the merge interval that `auto` gives it."""
    return replace(layout, merge_interval=traffic.best_merge_interval(layout))


def _states() -> list[Case]:
    layouts = [
        LogLayout(layer.family, heads // layer.heads_ratio, heads, dim, dim, 1)
        for layer in LAYERS
        for heads in HEADS
        for dim in HEAD_DIMS
    ]
    return [Case(_best(layout), BATCH) for layout in layouts]


def _batches() -> list[Case]:
    return [Case(_best(layer), batch) for layer in LAYERS for batch in BATCHES]


def choices(pairs: list[Pair]) -> dict[str, dict[str, int]]:
    """By family: the merge interval that traffic.py recommends from bytes, and the one measured fastest."""
    chosen = {}
    for family, own in _by_family(pairs).items():
        fastest, _ = min(own, key=lambda pair: pair[1]["ms"]["cycle"])
        chosen[family] = {
            "recommended": traffic.best_merge_interval(fastest.layout),
            "measured_best": fastest.layout.merge_interval,
        }
    return chosen


def _by_family(pairs: list[Pair]) -> dict[str, list[Pair]]:
    families = dict.fromkeys(case.layout.family.name for case, _ in pairs)
    return {name: [pair for pair in pairs if pair[0].layout.family.name == name] for name in families}


def _print_intervals(pairs: list[Pair], chosen: dict[str, dict[str, int]], console: Console) -> None:
    table = Table(
        *("layer", "M", "append", "merge", "cycle", "of M = 1", "bytes, of M = 1", "roofline", ""),
        title=f"milliseconds a step, batch {BATCH}",
    )
    for family, own in _by_family(pairs).items():
        one = next(result["ms"]["cycle"] for case, result in own if case.layout.merge_interval == 1)
        for case, result in own:
            interval, ms = case.layout.merge_interval, result["ms"]
            through = traffic.write_through(case.layout).total_bytes
            marks = [mark.replace("_", " ") for mark, m in chosen[family].items() if m == interval]
            table.add_row(
                case.name,
                str(interval),
                f"{ms['append']:.4f}" if "append" in ms else "",
                f"{ms['merge']:.4f}",
                f"{ms['cycle']:.4f}",
                f"{ms['cycle'] / one:.2f}",
                f"{traffic.mean_step_bytes(case.layout) / through:.2f}",
                f"{result['roofline_share']:.0%}",
                ", ".join(marks),
                end_section=(case, result) == own[-1],
            )
    console.print(table)


def _print_times(sweep: Sweep, pairs: list[Pair], console: Console) -> None:
    table = Table(
        *("layer", "B", "cycle", "GB/s", "roofline", "fastest write-through", "", "speed-up"),
        title=f"milliseconds a step, over the {sweep.value}",
    )
    for case, result in pairs:
        name, ms = report.fastest_write_through(result)
        ratio = report.speed_up(result)
        table.add_row(
            case.name,
            str(case.batch),
            f"{result['ms']['cycle']:.4f}",
            f"{result['gb_s']:.0f}",
            f"{result['roofline_share']:.0%}",
            name,
            f"{ms:.4f}",
            f"{ratio:.2f}x" + ("" if ratio >= 1 else " slower"),
            style="" if ratio >= 1 else "red",
        )
    console.print(table)


def draw(measured: report.Report, path: Path) -> None:
    """A sweep's curves, from what run() wrote. Raises BenchError when that is no sweep of this version."""
    sweep = next((sweep for sweep in Sweep if sweep.value == measured.get("sweep")), None)
    cases, results = _cases(sweep) if sweep else [], measured.get("results", [])
    if sweep is None or [case.name for case in cases] != [result["case"] for result in results]:
        raise BenchError(
            "expected the JSON of a sweep with the cases of this version, got another; "
            "run the sweep again: deltalog bench kernels --sweep-m, --sweep-state or --sweep-batch"
        )
    pairs = list(zip(cases, results, strict=True))
    curves_of, x_label = {
        Sweep.MERGE_INTERVAL: (_interval_curves, "merge interval"),
        Sweep.STATE: (_state_curves, "key and value dim of a head"),
        Sweep.BATCH: (_batch_curves, "batch"),
    }[sweep]
    panels = {family: curves_of(own) for family, own in _by_family(pairs).items()}
    title = f"{measured['machine']}, fp32 state, commit {measured['commit']}"
    plots.draw(path, title, (x_label, "ms a step"), panels, log_y=sweep is not Sweep.MERGE_INTERVAL)


def _interval_curves(own: list[Pair]) -> list[Curve]:
    """The U: mean of a cycle, between its appends and its merge."""
    return [
        Curve.through(
            phase,
            {case.layout.merge_interval: r["ms"][phase] for case, r in own if phase in r["ms"]},
            ours=phase == "cycle",
        )
        for phase in ("cycle", "append", "merge")
    ]


def _state_curves(own: list[Pair]) -> list[Curve]:
    """Our cycle and write-through, a pair of curves for each number of heads."""
    curves = []
    for heads in HEADS:
        some = [(case.layout.key_dim, r) for case, r in own if case.layout.value_heads == heads]
        ours = {dim: r["ms"]["cycle"] for dim, r in some}
        theirs = {dim: report.fastest_write_through(r)[1] for dim, r in some}
        curves += [
            Curve.through(f"{heads} heads", ours),
            Curve.through(f"{heads} heads, write-through", theirs, ours=False),
        ]
    return curves


def _batch_curves(own: list[Pair]) -> list[Curve]:
    """Our cycle beside every kernel that ran."""
    names = dict.fromkeys(name for _, r in own for name in r["baselines_ms"])
    theirs = [
        Curve.through(
            name,
            {case.batch: r["baselines_ms"][name] for case, r in own if name in r["baselines_ms"]},
            ours=False,
        )
        for name in names
    ]
    return [Curve.through("DeltaLog", {case.batch: r["ms"]["cycle"] for case, r in own}), *theirs]
