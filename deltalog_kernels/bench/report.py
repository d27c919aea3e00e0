"""What the GPU bench prints and writes: the machine, a table, and the shapes that got slower."""

import json
import platform
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from deltalog_kernels import GDN, KDA, RWKV6, LogLayout
from deltalog_kernels.bench.gpu import Case, measure
from deltalog_kernels.bench.timing import ceilings_gb_s

Report = dict[str, Any]


def cases() -> list[Case]:
    """Qwen3.5/3.6's layer (16 key heads, 32 value heads) in both state dtypes, Kimi-Linear's, RWKV6's."""
    gdn = LogLayout(GDN, 16, 32, 128, 128, 8)
    layouts = {
        gdn: (128, 256, 64, 512, 1, 8, 32),
        replace(gdn, merge_interval=16): (128, 256),
        replace(gdn, state_dtype=torch.bfloat16): (128, 256, 32, 1),
        LogLayout(KDA, 32, 32, 128, 128, 8): (128, 256, 32, 1),
        LogLayout(KDA, 32, 32, 128, 128, 4): (128,),
        LogLayout(RWKV6, 32, 32, 128, 128, 8): (128, 256, 32, 1),
        LogLayout(RWKV6, 32, 32, 64, 64, 8): (128, 256),
        LogLayout(RWKV6, 32, 32, 64, 64, 4): (128, 256),
    }
    return [Case(layout, batch) for layout, batches in layouts.items() for batch in batches]


def run(output: Path | None, commit: str) -> None:
    """Check and time every case; print a table, write JSON. Raises BenchError when a check fails."""
    console = wide_console()
    report = measured(cases(), commit, console, two_launch=True)
    save(report, output)
    console.print(table(report["results"]))
    conclude(report, console)


def wide_console() -> Console:
    """The terminal, or where there is none a width that the tables fit into."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def machine(commit: str) -> Report:
    """What a number means nothing without."""
    return {
        "machine": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": commit,
    }


def measured(listed: Iterable[Case], commit: str, console: Console, **beside: bool) -> Report:
    """Every case checked, then timed beside what gpu.measure is told: the report that save() writes."""
    ceilings = ceilings_gb_s()
    results: list[Report] = []
    not_run: set[str] = set()
    for case in track(list(listed), description="check, then time", console=console):
        result, missing = measure(case, ceilings, **beside)
        results.append(result)
        not_run |= set(missing)
    return machine(commit) | {"ceilings_gb_s": ceilings, "not_run": sorted(not_run), "results": results}


def save(report: Report, output: Path | None) -> None:
    """Write a report as JSON where one is asked for."""
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")


def fastest_write_through(result: Report) -> tuple[str, float]:
    """Name and milliseconds of the fastest kernel beside ours; our own at M = 1 is one of them."""
    theirs: dict[str, float] = result["baselines_ms"]
    name = min(theirs, key=theirs.__getitem__)
    return name, theirs[name]


def speed_up(result: Report) -> float:
    """How many times our cycle the fastest write-through kernel takes."""
    return fastest_write_through(result)[1] / result["ms"]["cycle"]


def slower(results: Iterable[Report]) -> Iterator[str]:
    """The shapes at which a write-through kernel is faster than our cycle."""
    for result in results:
        name, ms = fastest_write_through(result)
        if ms < result["ms"]["cycle"]:
            yield (
                f"{result['case']}, batch {result['batch']}: {result['ms']['cycle']:.4f} ms, "
                f"{name} {ms:.4f} ms ({speed_up(result):.2f}x)"
            )


def table(results: Iterable[Report]) -> Table:
    """Our times, then each write-through kernel's and how many times ours that is."""
    phases = ("append", "merge", "cycle", "mixed", "two_launch")
    headings = (
        "layer",
        "B",
        *(phase.replace("_", " ") for phase in phases),
        "GB/s",
        "roofline",
        "error",
        "write-through kernels",
    )
    built = Table(*headings, title="milliseconds a step")
    for result in results:
        ms = result["ms"]
        theirs = "\n".join(
            f"{time:.4f} ({time / ms['cycle']:.2f}x) {name}" for name, time in result["baselines_ms"].items()
        )
        built.add_row(
            result["case"],
            str(result["batch"]),
            *(f"{ms[phase]:.4f}" if phase in ms else "" for phase in phases),
            f"{result['gb_s']:.0f}",
            f"{result['roofline_share']:.0%}",
            f"{result['error']:.0e}",
            theirs,
        )
    return built


def conclude(report: Report, console: Console) -> None:
    """Machine, ceilings, what got slower and what was not run."""
    ceilings = ", ".join(f"{name} {value:.0f} GB/s" for name, value in report["ceilings_gb_s"].items())
    lines = [f"{report['machine']}, torch {report['torch']}, triton {report['triton']}; {ceilings}."]
    lines += [f"slower than write-through: {line}" for line in slower(report["results"])]
    lines += [f"not run: {line}" for line in report["not_run"]]
    for line in lines:
        console.print(line, markup=False)
