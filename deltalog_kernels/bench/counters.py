"""DRAM bytes of whole cycles, read by ncu (Nsight Compute), beside what traffic.py says.

This module run as a program is the process that ncu watches. It marks a range of many steps for each layout,
and ncu counts ranges instead of kernels: a written line waits in L2 until a later step evicts it, so the
kernel that wrote it is over when it reaches the memory.
"""

import csv
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from deltalog_kernels import GDN, KDA, RWKV6, LogLayout, traffic
from deltalog_kernels.bench import BenchError, report
from deltalog_kernels.bench.gpu import DEVICE, Case, check, rotation

METRICS = {"dram__bytes_read.sum": "read_bytes", "dram__bytes_write.sum": "write_bytes"}
TOLERANCES = {"read_bytes": 0.05, "write_bytes": 0.10}
"""Of traffic.py, which counts base and log. Writes include the outputs, 3 % at M = 8."""
CYCLES = 8
OPTIONS = (
    *("--replay-mode", "app-range"),
    *("--cache-control", "none", "--clock-control", "none"),
    *("--metrics", ",".join(METRICS), "--print-units", "base", "--csv"),
)

Bytes = dict[str, float]
"""read_bytes and write_bytes."""


def cases() -> list[Case]:
    """A layer of each family at the merge interval of the other tables."""
    layouts = (LogLayout(GDN, 16, 32, 128, 128, 8), LogLayout(KDA, 32, 32, 128, 128, 8))
    return [Case(layout, 128) for layout in (*layouts, LogLayout(RWKV6, 32, 32, 128, 128, 8))]


def run(output: Path | None, commit: str) -> None:
    """Check every case, count its bytes, print a table and write JSON.

    Raises BenchError when a check fails, ncu is missing or may not count, or traffic.py is off.
    """
    if (ncu := shutil.which("ncu")) is None:
        raise BenchError(
            "expected ncu, the command line of Nsight Compute, on the PATH, found none; install the CUDA "
            "toolkit or NVIDIA's package nsight-compute, and put the folder with ncu on the PATH"
        )
    console = report.wide_console()
    for case in cases():
        check(case)
    counted = parse(_watched(ncu))
    if len(counted) != 2 * len(cases()):
        raise BenchError(f"expected {2 * len(cases())} ranges from ncu, got {len(counted)}; see OPTIONS")
    results = [
        compared(case, deferred, through)
        for case, deferred, through in zip(cases(), counted[::2], counted[1::2], strict=True)
    ]
    report.save(report.machine(commit) | {"counters": results}, output)
    console.print(_table(results))
    if off := [result["case"] for result in results if not result["within"]]:
        raise BenchError(
            f"expected traffic.py within {TOLERANCES} of the counters, it is off for {', '.join(off)}; look "
            "for bytes that the kernel moves twice, or correct traffic.py"
        )


def _watched(ncu: str) -> str:
    """What ncu writes about this module run as a program."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "ncu.csv")
        command = [ncu, *OPTIONS, "--log-file", str(log), sys.executable, "-m", __name__]
        done = subprocess.run(command, capture_output=True, text=True)
        written = log.read_text() if log.exists() else ""
    said = written + done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise BenchError(
            "expected permission to read the counters of the GPU, got ERR_NVGPUCTRPERM; run this as root, or "
            "have the driver loaded with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if done.returncode:
        raise BenchError(
            f"ncu ended with status {done.returncode}; {' '.join(command)} said:\n{said[-2000:]}"
        )
    return written


def parse(written: str) -> list[Bytes]:
    """Bytes of each range, in order, from ncu's CSV and the lines that it puts before it."""
    lines = written.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise BenchError(f"expected a CSV table from ncu, got:\n{written[-2000:]}")
    ranges: dict[str, Bytes] = {}
    for row in csv.DictReader(lines[start:]):
        if (name := METRICS.get(row["Metric Name"])) is None:
            continue
        unit, value = row["Metric Unit"], row["Metric Value"].replace(",", "")
        if unit != "byte" or not value.replace(".", "", 1).isdigit():
            raise BenchError(
                f"expected bytes in {row['Metric Name']}, ncu gave {value!r} {unit!r}; see OPTIONS"
            )
        ranges.setdefault(row["ID"], {})[name] = float(value)
    if incomplete := [key for key, counted in ranges.items() if len(counted) != len(METRICS)]:
        raise BenchError(f"expected {', '.join(METRICS)} of every range, ncu left one out of {incomplete}")
    return list(ranges.values())


def steps_of(layout: LogLayout) -> int:
    """Steps of a range: whole cycles, eight at least and as many steps whatever the interval."""
    return CYCLES * layout.merge_interval * -(-8 // layout.merge_interval)


def compared(case: Case, deferred: Bytes, through: Bytes) -> dict[str, Any]:
    """One case's bytes a step, counted and predicted, and how many times fewer are written than at M = 1."""
    layout = case.layout
    cycle = traffic.cycle(layout) * case.batch
    predicted = {name: getattr(cycle, name) / layout.merge_interval for name in TOLERANCES}
    counted = {name: deferred[name] / steps_of(layout) for name in TOLERANCES}
    off = {name: counted[name] / predicted[name] - 1 for name in TOLERANCES}
    written_through = through["write_bytes"] / steps_of(replace(layout, merge_interval=1))
    return {
        "case": case.name,
        "batch": case.batch,
        "counted": counted,
        "predicted": predicted,
        "off": off,
        "within": all(abs(off[name]) <= bound for name, bound in TOLERANCES.items()),
        "write_reduction": written_through / counted["write_bytes"],
    }


def _table(results: list[dict[str, Any]]) -> Table:
    headings = ("layer", "B", "read", "of traffic.py", "written", "of traffic.py", "times fewer than M = 1")
    table = Table(*headings, title=f"DRAM megabytes a step, mean of {CYCLES} cycles")
    for result in results:
        cells = [
            cell
            for name in TOLERANCES
            for cell in (f"{result['counted'][name] / 1e6:.1f}", f"{1 + result['off'][name]:.1%}")
        ]
        cells += [f"{result['write_reduction']:.2f}" + ("" if result["within"] else " off")]
        table.add_row(result["case"], str(result["batch"]), *cells)
    return table


def main() -> None:
    """For each case a range of deferred steps and one of write-through steps. What ncu watches."""
    for case in cases():
        for layout in (case.layout, replace(case.layout, merge_interval=1)):
            _count_range(replace(case, layout=layout))


def _count_range(case: Case) -> None:
    interval, steps = case.layout.merge_interval, rotation(case)
    at = [torch.full((case.batch,), p, dtype=torch.int32, device=DEVICE) for p in range(interval)]

    def cycles() -> None:
        for n in range(steps_of(case.layout)):
            steps[n % len(steps)](at[n % interval])
        torch.cuda.synchronize()

    # Leaves as much unwritten in L2 as the range itself will.
    cycles()
    torch.cuda.profiler.start()
    cycles()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
