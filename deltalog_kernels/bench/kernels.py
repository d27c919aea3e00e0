"""Decode steps of one layer on the CPU: deferred beside write-through, over whole cycles of M tokens."""

import platform
import statistics
import time
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from deltalog_kernels import GDN, LogLayout, SlotMemory, gdn_step, traffic
from deltalog_kernels.bench import BenchError
from deltalog_kernels.reference import delta_rule_write_through

CYCLES = 5
MODES = ("write-through", "deferred")
BOUND = 1e-5
"""Largest error of the check over the largest output, against fp64: the state and the updates are fp32."""


@dataclass(frozen=True)
class Case:
    """One layer of a model at a batch size."""

    name: str
    layout: LogLayout
    batch: int


def cases() -> list[Case]:
    """The layer of Qwen3-Next-80B and Qwen3.5-35B, and that of the demo model."""
    layouts = {
        "qwen3-next-80b": LogLayout(GDN, 16, 32, 128, 128, merge_interval=1),
        "demo": LogLayout(GDN, 4, 8, 64, 64, merge_interval=1),
    }
    return [
        Case(name, replace(layout, merge_interval=traffic.best_merge_interval(layout)), batch)
        for name, layout in layouts.items()
        for batch in (1, 16)
    ]


def run() -> None:
    """Check and time every case; print a table. Raises BenchError when a check fails."""
    console = Console()
    table = Table("layer", "batch", "M", *(f"{what} {unit}" for unit in ("ms", "KiB") for what in MODES))
    for case in track(cases(), description="check, then time", console=console):
        check(case)
        through = replace(case, layout=replace(case.layout, merge_interval=1))
        baseline, deferred = time_step(through), time_step(case)
        interval = case.layout.merge_interval
        written = traffic.cycle(case.layout).write_bytes / interval
        table.add_row(
            case.name,
            str(case.batch),
            str(interval),
            f"{baseline * 1e3:.2f}",
            f"{deferred * 1e3:.2f}",
            f"{case.batch * case.layout.base_bytes / 1024:.0f}",
            f"{case.batch * written / 1024:.0f}",
        )
    console.print(table)
    processor = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    console.print(
        f"GDN decode step of one layer ({processor}), every case checked against fp64 first. ms: median of "
        f"{CYCLES} cycles of M steps; KiB: state written a step. Both modes run this package's torch step, "
        "which is there to be right, not fast."
    )


def _inputs(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, decay_ln, beta of one step."""
    layout, rows = case.layout, case.batch

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    qk_shape = (layout.key_heads, layout.key_dim)
    return (
        normal(*qk_shape).to(layout.key_dtype),
        normal(*qk_shape).to(layout.key_dtype),
        normal(layout.value_heads, layout.value_dim),
        -normal(layout.value_heads).exp() / 10,
        normal(layout.value_heads).sigmoid(),
    )


def check(case: Case) -> None:
    """Two cycles against the recurrence written through in fp64."""
    generator, layout = torch.Generator().manual_seed(0), case.layout
    memory = SlotMemory.allocate(layout, case.batch + 1)
    state = torch.zeros(case.batch, *layout.base_shape, dtype=torch.float64)
    slot_ids = torch.arange(1, case.batch + 1)
    for position in range(2 * layout.merge_interval):
        token = _inputs(case, generator)
        positions = torch.full_like(slot_ids, position)
        out = gdn_step(*token, memory=memory, slot_ids=slot_ids, positions=positions)
        q, k, v, decay_ln, beta = (tensor.double() for tensor in token)
        expected, state = delta_rule_write_through(
            q, k, v, decay_ln[..., None], beta, state=state, scale=layout.key_dim**-0.5
        )
        error = ((out.double() - expected).abs().max() / expected.abs().max()).item()
        if not error <= BOUND:
            raise BenchError(
                f"{case.name}, batch {case.batch}, position {position}: expected the deferred step within "
                f"{BOUND} of write-through, got {error:.2e}; nothing was timed"
            )


def time_step(case: Case) -> float:
    """Median seconds of a step, each sample the mean over one cycle."""
    memory = SlotMemory.allocate(case.layout, case.batch + 1)
    token = _inputs(case, torch.Generator().manual_seed(1))
    slot_ids = torch.arange(1, case.batch + 1)
    # A sample of at least eight steps, also where a cycle is one.
    steps = case.layout.merge_interval * max(1, 8 // case.layout.merge_interval)
    samples = []
    for cycle in range(1 + CYCLES):
        start = time.perf_counter()
        for position in range(cycle * steps, (cycle + 1) * steps):
            gdn_step(*token, memory=memory, slot_ids=slot_ids, positions=torch.full_like(slot_ids, position))
        samples.append((time.perf_counter() - start) / steps)
    return statistics.median(samples[1:])
