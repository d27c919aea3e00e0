"""The Triton kernels behind decode.py: strides, sizes and a launch configuration for each call.

The functions have the signatures of cpu.py's. Arguments are validated in decode.py; what only these
kernels ask for is checked here. Triton launches on the current GPU, so the pool's is made that one.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from deltalog_kernels import tuning
from deltalog_kernels.kernels import delta_rule, replay, rwkv6
from deltalog_kernels.kernels.fold import fill_kernel, fold_kernel
from deltalog_kernels.layout import DECAY_LN_MIN, GPU_DIMS, NEUTRAL, NULL_SLOT, LogLayout, SlotMemory
from deltalog_kernels.reference import L2_EPS

MIXED, APPEND, MERGE = 0, replay.APPEND.value, replay.MERGE.value
"""What a batch holds: rows in any phase (each program branches), or, on the caller's word, one phase only."""


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    phase_offset: int,
    scale: float,
    out: Tensor,
    *,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    phase: int = MIXED,
) -> None:
    """GDN and KDA. Without ``a_log`` gate [B, HV, D] and beta [B, HV] are the log-decay and beta; with it
    they are the layer's projections a and b."""
    layout = memory.layout
    _check_rows(q=q, k=k, v=v, gate=gate, beta=beta, out=out)
    plan = _plan(memory, slot_ids, positions)
    with torch.cuda.device_of(memory.base):
        plan.kernels.delta_rule_kernel[plan.grid](
            *(q, k, v, gate, beta, a_log, dt_bias, out),
            *(plan.base, *memory.log),
            *(slot_ids, positions),
            *(tensor.stride(0) for tensor in (q, k, v, gate, beta, out)),
            *(plan.base_stride, *(pool.stride(0) for pool in memory.log)),
            *(phase_offset % layout.merge_interval, scale, 0.0 if lower_bound is None else lower_bound),
            HEADS_RATIO=layout.heads_ratio,
            HV=layout.value_heads,
            RAW_GATES=a_log is not None,
            BOUNDED=lower_bound is not None,
            PHASE=phase,
            EPS=L2_EPS,
            GATES=layout.decay_dim,
            **plan.options,
        )


def rwkv6_step(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    bonus: Tensor,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    phase_offset: int,
    scale: float,
    out: Tensor,
    *,
    raw: bool = False,
    phase: int = MIXED,
) -> None:
    """RWKV6. gate [B, H, K] is the log-decay, or where ``raw`` the layer's w, of which it is -e^w."""
    layout = memory.layout
    _check_rows(r=r, k=k, v=v, gate=gate, out=out)
    plan = _plan(memory, slot_ids, positions)
    with torch.cuda.device_of(memory.base):
        plan.kernels.rwkv6_kernel[plan.grid](
            *(r, k, v, gate, bonus, out),
            *(plan.base, *memory.log),
            *(slot_ids, positions),
            *(tensor.stride(0) for tensor in (r, k, v, gate, out)),
            *(plan.base_stride, *(pool.stride(0) for pool in memory.log)),
            *(phase_offset % layout.merge_interval, scale),
            H=layout.value_heads,
            RAW_DECAY=raw,
            PHASE=phase,
            **plan.options,
        )


def fold_and_fill(
    memory: SlotMemory, slot_ids: Tensor, starts: Tensor, ends: Tensor, phase_offset: int
) -> None:
    """Two launches: the programs of a head's value rows read the log that the fill overwrites."""
    layout = memory.layout
    _check_layout(memory, slot_ids, starts, ends)
    if layout.capacity == 0 or len(slot_ids) == 0:
        return
    heads = {"HEADS_RATIO": layout.heads_ratio, "HV": layout.value_heads, "GATES": layout.decay_dim}
    strides = [pool.stride(0) for pool in memory.pools]
    offset = phase_offset % layout.merge_interval
    with torch.cuda.device_of(memory.base):
        fold_kernel[(len(slot_ids) * layout.value_heads * (layout.value_dim // tuning.ROWS),)](
            *(*memory.pools, slot_ids, starts, *strides, offset),
            ROWS=tuning.ROWS,
            CHUNK=tuning.chunk(layout),
            **_sizes(layout),
            **heads,
            num_warps=1,
        )
        fill_kernel[(len(slot_ids) * layout.value_heads,)](
            *(*memory.log, slot_ids, ends, *strides[1:], offset),
            NEUTRAL=NEUTRAL,
            **_sizes(layout),
            **heads,
            num_warps=1,
        )


def _sizes(layout: LogLayout) -> dict[str, int]:
    return {
        "K": layout.key_dim,
        "V": layout.value_dim,
        "M": layout.merge_interval,
        "NULL_SLOT": NULL_SLOT,
    }


@dataclass(frozen=True)
class _Kernels:
    """The step kernels of one package. Both packages take the same arguments, but for the base."""

    delta_rule_kernel: Any
    rwkv6_kernel: Any


@dataclass(frozen=True)
class _Plan:
    """One step's kernels, its grid, how it hands over the base, and what it is compiled with."""

    kernels: _Kernels
    grid: tuple[int]
    base: Any
    base_stride: int
    options: dict[str, Any]


def _plan(memory: SlotMemory, slot_ids: Tensor, positions: Tensor) -> _Plan:
    _check_layout(memory, slot_ids, positions)
    layout, batch, processors = memory.layout, len(slot_ids), _multiprocessors(slot_ids.device)
    if takes_bulk(memory):
        config = tuning.bulk_config(layout, batch, processors)
        kernels, base, base_stride = _bulk(memory, config)
        own = {
            # Eight lanes share the entries of a row.
            "ENTRIES": triton.next_power_of_2(max(8, layout.capacity)),
            "STAGES": config.stages or config.tiles,
            "launch_pdl": True,
        }
    else:
        config = tuning.portable_config(layout, batch, processors)
        kernels = _Kernels(delta_rule.delta_rule_kernel, rwkv6.rwkv6_kernel)
        base, base_stride = memory.base, memory.base.stride(0)
        own = {
            "ENTRIES": triton.next_power_of_2(max(1, layout.capacity)),
            "CHUNK": tuning.chunk(layout),
        }
    # maxnreg=None would reach ptxas as a word.
    cap = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    shared = {
        "DECAY_LN_MIN": DECAY_LN_MIN,
        "ROWS": config.rows,
        "TILES": config.tiles,
        "num_warps": config.warps,
    }
    programs = batch * layout.value_heads * (layout.value_dim // (config.rows * config.tiles))
    return _Plan(kernels, (programs,), base, base_stride, _sizes(layout) | shared | own | cap)


def takes_bulk(memory: SlotMemory) -> bool:
    """Whether the kernels in hopper/ decode this pool: they want such a GPU and Triton, and a base whose rows
    and slots are whole lines. The others decode every pool, to the same result."""
    base = memory.base
    line = tuning.LINE_BYTES // base.element_size()
    return (
        _copies_in_bulk(base.device)
        and memory.layout.key_dim >= line
        and base.stride(0) % line == 0
        and base.data_ptr() % 16 == 0
    )


@cache
def _copies_in_bulk(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7)


def _bulk(memory: SlotMemory, config: tuning.LaunchConfig) -> tuple[_Kernels, Any, int]:
    """The kernels in hopper/, the pool as a descriptor of lines, and the lines from slot to slot."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from deltalog_kernels.kernels.hopper.delta_rule import delta_rule_kernel
    from deltalog_kernels.kernels.hopper.rwkv6 import rwkv6_kernel

    layout, base = memory.layout, memory.base
    line = tuning.chunk(layout)
    count = layout.key_dim // line
    slot_lines = base.stride(0) // line
    descriptor = TensorDescriptor(
        base,
        shape=[(len(base) - 1) * slot_lines + layout.value_heads * layout.value_dim * count, line],
        strides=[line, 1],
        block_shape=[config.rows * count, line],
        # The copy swizzles what it writes, so that lanes of different lines do not meet in a bank.
        layout=NVMMASharedLayout(tuning.LINE_BYTES, base.element_size() * 8, rank=2),
    )
    return _Kernels(delta_rule_kernel, rwkv6_kernel), descriptor, slot_lines


@cache
def _multiprocessors(device: torch.device) -> int:
    # The interpreter runs on the CPU, one program after the other.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check_rows(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(
                f"{name} must be contiguous within a row, got shape {list(tensor.shape)} with strides "
                f"{tensor.stride()}; only the stride between rows is free on a GPU"
            )


def _check_layout(memory: SlotMemory, *indices: Tensor) -> None:
    layout = memory.layout
    if not all(index.is_contiguous() for index in indices):
        raise ValueError("slot ids and positions must be contiguous on a GPU; call .contiguous() once a step")
    for name in ("state_dtype", "key_dtype", "update_dtype"):
        if getattr(layout, name) == torch.float64:
            raise NotImplementedError(
                f"the GPU kernels work in fp32, expected a narrower {name}, got torch.float64; "
                "keep an fp64 pool on the CPU"
            )
    for name, size in (("key_dim", layout.key_dim), ("value_dim", layout.value_dim)):
        if size not in GPU_DIMS:
            raise NotImplementedError(
                f"the GPU kernels want {name} to be a power of two from 16 to 256, got {size}; "
                "decode such a layer on the stock path"
            )
    for name, pool, shape in zip(
        ("base", "log_keys", "log_updates", "log_decays"),
        memory.pools,
        (layout.base_shape, *layout.log_shapes),
        strict=True,
    ):
        if not pool[0].is_contiguous():
            raise ValueError(
                f"{name} must be contiguous within a slot, {list(shape)}, got strides {pool.stride()}; "
                "only the stride between slots is free on a GPU"
            )
