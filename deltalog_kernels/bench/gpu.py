"""Decode steps of one layer on a GPU: checked against fp64, then timed over whole cycles of M tokens.

Every kernel is given what an engine has: projections in bf16 and raw gates. Slots are shuffled, and so
many that the L2 cache holds none from one step to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from deltalog_kernels import LogLayout, SlotMemory, fold_and_fill, traffic
from deltalog_kernels.bench import BenchError
from deltalog_kernels.bench.baselines import Baseline, Inputs, baselines
from deltalog_kernels.bench.steps import deltalog_step, inputs, rows_of, write_through
from deltalog_kernels.bench.timing import graph_ms

DEVICE = "cuda"
Make = Callable[[LogLayout, Inputs, SlotMemory, Tensor, Tensor], Callable[[Tensor], Tensor]]
"""How a step of ours is made; see steps.deltalog_step."""
ROTATION_BYTES = 800_000_000
"""Bases that take turns: ten times the L2 cache of an H200 or of an RTX 4090, and more."""
STEPS = 32
"""Steps of a captured graph at least, and whole cycles."""
CHECKED_ROWS = 9
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error over the largest output: a few roundings of an fp32 update, or of a bf16 base."""
BASELINE_BOUND = 2e-2
"""Theirs come out in bf16, and from a bf16 base where the state is one."""
_NOT_RUN = (
    *(AssertionError, ValueError, TypeError, AttributeError, NotImplementedError),
    torch.OutOfMemoryError,
)
"""What published kernels raise on shapes that they do not take, and their checks on a wrong result."""


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


def measure(
    case: Case, ceilings: dict[str, float], *, published: bool = True, two_launch: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """One case's numbers, in ms a step, and what could not be run beside it.

    Without ``published`` the write-through kernel beside ours is our own at M = 1 alone. ``two_launch``
    times the paper's form of the step, too, where the family has one here.
    """
    layout = case.layout
    error = check(case)
    times = time_case(case)
    if two_launch and layout.family.delta_rule:
        # Triton is not there without a GPU.
        from deltalog_kernels.bench.two_launch import two_launch_step

        check(case, two_launch_step)
        times["two_launch"] = time_case(case, two_launch_step)["cycle"]
    through = replace(case, layout=replace(layout, merge_interval=1))
    check(through)
    theirs = {"deltalog M=1": time_case(through)["cycle"]}
    found, missing = baselines(layout.family, layout.state_dtype) if published else ([], [])
    for baseline in found:
        try:
            theirs[baseline.name] = time_baseline(case, baseline)
        except _NOT_RUN as problem:
            missing.append(f"{baseline.name} on {case.name}: {problem}")
    roof_s = traffic.mean_step_s(layout, ceilings["read"] * 1e9, ceilings["copy"] * 1e9)
    return {
        "case": case.name,
        "batch": case.batch,
        "error": error,
        "ms": times,
        "roofline_share": case.batch * roof_s * 1e3 / times["cycle"],
        "gb_s": case.batch * traffic.mean_step_bytes(layout) / times["cycle"] / 1e6,
        "baselines_ms": theirs,
    }, missing


def check(case: Case, make: Make = deltalog_step) -> float:
    """Two cycles against the recurrence in fp64; the largest error. Raises BenchError where it is too large.

    The batch is the one that is timed, so that the launch is, too; all but some rows of it are padding. The
    others are in all phases.
    """
    layout, batch, rows = case.layout, case.batch, min(case.batch, CHECKED_ROWS)
    generator = torch.Generator(DEVICE).manual_seed(torch.seed() % 2**31)
    memory = SlotMemory.allocate(layout, 2 * rows + 1, DEVICE)
    for pool in memory.pools:
        pool.fill_(torch.nan)
    slots = (1 + torch.randperm(2 * rows, generator=generator, device=DEVICE)[:rows]).int()
    starts = torch.arange(rows, device=DEVICE).int() + 7 * layout.merge_interval
    fold_and_fill(memory, slots, torch.zeros_like(starts), starts)
    states = torch.randn(rows, *layout.base_shape, generator=generator, device=DEVICE)
    memory.base[slots.long()] = states.to(layout.state_dtype)
    state = memory.base[slots.long()].double()
    where = torch.randperm(batch, generator=generator, device=DEVICE)[:rows]
    slot_ids, positions = torch.zeros(2, batch, dtype=torch.int32, device=DEVICE)
    slot_ids[where], positions[where] = slots, starts

    constants, worst = inputs(layout, 1, generator), 0.0
    for n in range(2 * layout.merge_interval + 1):
        token = replace(
            inputs(layout, batch, generator),
            a_log=constants.a_log,
            dt_bias=constants.dt_bias,
            bonus=constants.bonus,
        )
        out = torch.full((batch, layout.value_heads, layout.value_dim), torch.nan, device=DEVICE)
        expected = torch.zeros_like(out, dtype=torch.float64)
        make(layout, token, memory, slot_ids, out)(positions + n)
        expected[where], state = write_through(layout, rows_of(token, where), state)
        error = _largest_error(out, expected)
        worst = max(worst, error)
        if not error <= BOUNDS[layout.state_dtype]:
            raise BenchError(
                f"{make.__name__} of {case.name}, batch {batch}, step {n}: expected an error of "
                f"{BOUNDS[layout.state_dtype]} at most, got {error:.2e}; nothing was timed. "
                "Mend the kernel first"
            )
    return worst


def turns(case: Case) -> int:
    """Sets of slots that take turns."""
    return max(1, -(-ROTATION_BYTES // (case.batch * case.layout.base_bytes)))


def rotation(case: Case, make: Make = deltalog_step) -> list[Callable[[Tensor], Tensor]]:
    """Our step on each set of slots that takes turns, as functions of the positions."""
    layout, batch, slots = case.layout, case.batch, turns(case) * case.batch
    generator = torch.Generator(DEVICE).manual_seed(1)
    memory = SlotMemory.allocate(layout, slots + 1, DEVICE)
    memory.base.normal_(generator=generator)
    token = inputs(layout, batch, generator)
    shuffled = 1 + torch.randperm(slots, generator=generator, device=DEVICE).int()
    return [
        make(layout, token, memory, slot_ids, torch.empty_like(token.v)) for slot_ids in shuffled.split(batch)
    ]


def time_case(case: Case, make: Make = deltalog_step) -> dict[str, float]:
    """Milliseconds a step: rows in one phase over a cycle, rows spread over all phases, appends, merges."""
    batch, interval = case.batch, case.layout.merge_interval
    steps = rotation(case, make)
    together = [torch.full((batch,), p, dtype=torch.int32, device=DEVICE) for p in range(interval)]
    spread = [torch.arange(batch, device=DEVICE).int() + p for p in range(interval)]

    def cycles(positions: list[Tensor]) -> float:
        length = len(positions) * -(-max(STEPS, len(steps)) // len(positions))
        turn = count()

        def launch() -> None:
            for n in range(length):
                steps[next(turn) % len(steps)](positions[n % len(positions)])

        return graph_ms(launch) / length

    times = {"cycle": cycles(together), "mixed": cycles(spread), "merge": cycles(together[-1:])}
    return times | ({"append": cycles(together[:-1])} if interval > 1 else {})


def time_baseline(case: Case, baseline: Baseline) -> float:
    """Milliseconds a step of a published kernel, its first output checked. Raises as it does."""
    layout, batch, slots = case.layout, case.batch, turns(case) * case.batch
    generator = torch.Generator(DEVICE).manual_seed(1)
    states = torch.randn(slots + 1, *layout.base_shape, generator=generator, device=DEVICE)
    states = states.to(layout.state_dtype)
    token = inputs(layout, batch, generator)
    slot_ids = (1 + torch.randperm(slots, generator=generator, device=DEVICE).int()).split(batch)
    # Some rows at a time: in fp64 a large batch would fill a small GPU.
    expected = [
        write_through(layout, rows_of(token, rows), states[slot_ids[0][rows].long()].double())[0]
        for rows in torch.arange(batch, device=DEVICE).split(64)
    ]
    steps = [baseline.make(token, states, ids.clone()) for ids in slot_ids]
    error = _largest_error(steps[0](), torch.cat(expected))
    if not error <= BASELINE_BOUND:
        raise ValueError(f"its output is off by {error:.2e} of the largest; not timed")
    length = max(STEPS, len(steps))

    def launch() -> None:
        for n in range(length):
            steps[n % len(steps)]()

    return graph_ms(launch) / length


def _largest_error(actual: Tensor, expected: Tensor) -> float:
    """Over the largest expected value; NaN anywhere is NaN."""
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()
