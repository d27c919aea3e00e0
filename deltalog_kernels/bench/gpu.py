"""Decode steps of one layer on a GPU: checked against fp64, then timed over whole cycles of M tokens.

Every kernel is given what an engine has: projections in bf16 and raw gates. Slots are shuffled, and so
many that the L2 cache holds none from one step to the next.
"""

import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from deltalog_kernels import GDN, KDA, RWKV6, LogLayout, SlotMemory, fold_and_fill, traffic
from deltalog_kernels.bench.baselines import Baseline, baselines
from deltalog_kernels.bench.steps import deltalog_step, inputs, write_through
from deltalog_kernels.bench.timing import ceilings_gb_s, graph_ms

ROTATION_BYTES = 600_000_000
"""Bases that take turns: ten times the L2 cache of an H200."""
STEPS = 32
"""Steps of a captured graph at least, and whole cycles."""
CHECKED_ROWS = 9
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error over the largest output: a few roundings of an fp32 update, or of a bf16 base."""
BASELINE_BOUND = 2e-2
"""Theirs come out in bf16, and from a bf16 base where the state is one."""


@dataclass(frozen=True)
class Case:
    """One layer at a batch size."""

    layout: LogLayout
    batch: int

    @property
    def name(self) -> str:
        layout, dtype = self.layout, str(self.layout.state_dtype).removeprefix("torch.")
        heads = f"{layout.key_heads}/{layout.value_heads}"
        return f"{layout.family.name} {heads}x{layout.key_dim} {dtype} M={layout.merge_interval}"


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
    """Check and time every case; print a table, write JSON. Raises RuntimeError when a check fails."""
    console = Console()
    ceilings = ceilings_gb_s()
    results: list[dict[str, Any]] = []
    refused: set[str] = set()
    for case in track(cases(), description="check, then time", console=console):
        result, missing = measure(case, ceilings)
        results.append(result)
        refused |= set(missing)
    report = {
        "machine": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": commit,
        "ceilings_gb_s": ceilings,
        "not_run": sorted(refused),
        "results": results,
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    _print(report, console)


def measure(case: Case, ceilings: dict[str, float]) -> tuple[dict[str, Any], list[str]]:
    """One case's numbers, in ms a step, and what could not be run beside it."""
    error = check(case)
    times = time_case(case)
    missing: list[str] = []
    theirs: dict[str, float] = {}
    through = replace(case.layout, merge_interval=1)
    theirs["deltalog M=1"] = time_case(replace(case, layout=through))["cycle"]
    found, absent = baselines(case.layout.family, case.layout.state_dtype)
    missing += absent
    for baseline in found:
        try:
            theirs[baseline.name] = time_baseline(case, baseline)
        except (AssertionError, ValueError, TypeError, AttributeError) as problem:
            missing.append(f"{baseline.name} on {case.name}: {problem}")
    layout = case.layout
    steps = [traffic.step(layout, live) for live in range(layout.merge_interval)]
    roof_s = sum(
        (step.read_bytes - step.write_bytes) / ceilings["read"] + 2 * step.write_bytes / ceilings["copy"]
        for step in steps
    ) / (1e9 * len(steps))
    return {
        "case": case.name,
        "batch": case.batch,
        "error": error,
        "ms": times,
        "roofline_share": case.batch * roof_s * 1e3 / times["cycle"],
        "gb_s": case.batch * traffic.mean_step_bytes(layout) / times["cycle"] / 1e6,
        "baselines_ms": theirs,
    }, missing


def check(case: Case) -> float:
    """Two cycles with every phase in the batch, against the recurrence in fp64; the largest error."""
    layout, generator = case.layout, torch.Generator("cuda").manual_seed(torch.seed() % 2**31)
    memory = SlotMemory.allocate(layout, 2 * CHECKED_ROWS + 1, "cuda")
    for pool in (memory.base, memory.log_keys, memory.log_updates, memory.log_decays):
        pool.fill_(torch.nan)
    slots = (1 + torch.randperm(2 * CHECKED_ROWS, generator=generator, device="cuda")[:CHECKED_ROWS]).int()
    starts = torch.arange(CHECKED_ROWS, device="cuda").int() + 7 * layout.merge_interval
    fold_and_fill(memory, slots, torch.zeros_like(starts), starts)
    shape = (CHECKED_ROWS, *layout.base_shape)
    memory.base[slots.long()] = torch.randn(shape, generator=generator, device="cuda").to(layout.state_dtype)
    state, worst = memory.base[slots.long()].double(), 0.0
    constants = inputs(layout, 1, generator)
    for n in range(2 * layout.merge_interval + 1):
        token = replace(
            inputs(layout, CHECKED_ROWS, generator),
            a_log=constants.a_log,
            dt_bias=constants.dt_bias,
            bonus=constants.bonus,
        )
        out = torch.full((CHECKED_ROWS, layout.value_heads, layout.value_dim), torch.nan, device="cuda")
        deltalog_step(layout, token, memory, slots, out)(starts + n)
        expected, state = write_through(layout, token, state)
        error = ((out.double() - expected).abs().max() / expected.abs().max()).item()
        worst = max(worst, error)
        if not error <= BOUNDS[layout.state_dtype]:
            raise RuntimeError(
                f"{case.name}, step {n}: expected an error of {BOUNDS[layout.state_dtype]} at most, "
                f"got {error:.2e}; nothing was timed"
            )
    return worst


def time_case(case: Case) -> dict[str, float]:
    """Milliseconds a step: rows in one phase over a cycle, rows spread over all phases, appends, merges."""
    layout, batch, interval = case.layout, case.batch, case.layout.merge_interval
    generator = torch.Generator("cuda").manual_seed(1)
    turns = max(1, -(-ROTATION_BYTES // (batch * layout.base_bytes)))
    memory = SlotMemory.allocate(layout, turns * batch + 1, "cuda")
    memory.base.normal_(generator=generator)
    token = inputs(layout, batch, generator)
    out = torch.empty(batch, layout.value_heads, layout.value_dim, dtype=torch.bfloat16, device="cuda")
    shuffled = 1 + torch.randperm(turns * batch, generator=generator, device="cuda").int()
    steps = [deltalog_step(layout, token, memory, slots, out) for slots in shuffled.split(batch)]
    together = [torch.full((batch,), p, dtype=torch.int32, device="cuda") for p in range(interval)]
    spread = [torch.arange(batch, device="cuda").int() + p for p in range(interval)]

    def cycles(positions: list[Tensor]) -> float:
        length = len(positions) * -(-max(STEPS, turns) // len(positions))
        turn = count()

        def launch() -> None:
            for n in range(length):
                steps[next(turn) % turns](positions[n % len(positions)])

        return graph_ms(launch) / length

    times = {"cycle": cycles(together), "mixed": cycles(spread), "merge": cycles(together[-1:])}
    return times | ({"append": cycles(together[:-1])} if interval > 1 else {})


def time_baseline(case: Case, baseline: Baseline) -> float:
    """Milliseconds a step of a published kernel, its first output checked. Raises as it does."""
    layout, batch, generator = case.layout, case.batch, torch.Generator("cuda").manual_seed(1)
    turns = max(1, -(-ROTATION_BYTES // (batch * layout.base_bytes)))
    states = torch.randn(turns * batch + 1, *layout.base_shape, generator=generator, device="cuda")
    states = states.to(layout.state_dtype)
    token = inputs(layout, batch, generator)
    slot_ids = (1 + torch.randperm(turns * batch, generator=generator, device="cuda").int()).split(batch)
    expected, _ = write_through(layout, token, states[slot_ids[0].long()].double())
    steps = [baseline.make(token, states, slots.clone()) for slots in slot_ids]
    error = ((steps[0]().double() - expected).abs().max() / expected.abs().max()).item()
    if not error <= BASELINE_BOUND:
        raise ValueError(f"its output is off by {error:.2e} of the largest; not timed")
    length = max(STEPS, turns)

    def launch() -> None:
        for n in range(length):
            steps[n % turns]()

    return graph_ms(launch) / length


def rows_of(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The table's rows: times in microseconds, then each baseline's time and how many times ours that is."""
    for result in report["results"]:
        ms = result["ms"]
        ours = (f"{ms[key] * 1e3:.1f}" if key in ms else "" for key in ("append", "merge", "cycle", "mixed"))
        theirs = "  ".join(
            f"{name} {time * 1e3:.1f} ({time / ms['cycle']:.2f}x)"
            for name, time in result["baselines_ms"].items()
        )
        yield (
            result["case"],
            str(result["batch"]),
            *ours,
            f"{result['gb_s']:.0f}",
            f"{result['roofline_share']:.0%}",
            f"{result['error']:.0e}",
            theirs,
        )


def _print(report: dict[str, Any], console: Console) -> None:
    headings = ("layer", "B", "append", "merge", "cycle", "mixed", "GB/s", "roofline", "error")
    table = Table(*headings, "write-through kernels", title="microseconds a step")
    for row in rows_of(report):
        table.add_row(*row)
    Console(width=240).print(table)
    ceilings = ", ".join(f"{name} {value:.0f} GB/s" for name, value in report["ceilings_gb_s"].items())
    console.print(f"{report['machine']}, torch {report['torch']}, triton {report['triton']}; {ceilings}.")
    for line in report["not_run"]:
        console.print(f"not run: {line}", markup=False)
