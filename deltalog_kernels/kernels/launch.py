"""The Triton kernels behind decode.py: strides, sizes and a launch configuration for each call.

The functions have the signatures of cpu.py's. Arguments are validated in decode.py; what only these
kernels ask for is checked here.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from deltalog_kernels import tuning
from deltalog_kernels.kernels.delta_rule import delta_rule_kernel
from deltalog_kernels.kernels.fold import fill_kernel, fold_kernel
from deltalog_kernels.kernels.rwkv6 import rwkv6_kernel
from deltalog_kernels.layout import DECAY_LN_MIN, NEUTRAL, NULL_SLOT, LogLayout, SlotMemory
from deltalog_kernels.reference import L2_EPS

MIXED, APPEND, MERGE = 0, 1, 2
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
    config, grid = _plan(memory, slot_ids, positions)
    delta_rule_kernel[grid](
        *(q, k, v, gate, beta, a_log, dt_bias, out),
        *_pools(memory),
        *(slot_ids, positions),
        *(tensor.stride(0) for tensor in (q, k, v, gate, beta, out)),
        *(pool.stride(0) for pool in _pools(memory)),
        *(phase_offset, scale, 0.0 if lower_bound is None else lower_bound),
        HEADS_RATIO=layout.heads_ratio,
        HV=layout.value_heads,
        RAW_GATES=a_log is not None,
        BOUNDED=lower_bound is not None,
        PHASE=phase,
        EPS=L2_EPS,
        GATES=layout.decay_dim,
        **_step_options(layout, config),
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
    config, grid = _plan(memory, slot_ids, positions)
    rwkv6_kernel[grid](
        *(r, k, v, gate, bonus, out),
        *_pools(memory),
        *(slot_ids, positions),
        *(tensor.stride(0) for tensor in (r, k, v, gate, out)),
        *(pool.stride(0) for pool in _pools(memory)),
        *(phase_offset, scale),
        H=layout.value_heads,
        RAW_DECAY=raw,
        PHASE=phase,
        **_step_options(layout, config),
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
    strides = [pool.stride(0) for pool in _pools(memory)]
    fold_kernel[(len(slot_ids) * layout.value_heads * (layout.value_dim // tuning.ROWS),)](
        *(*_pools(memory), slot_ids, starts, *strides, phase_offset),
        ROWS=tuning.ROWS,
        CHUNK=tuning.chunk(layout),
        **_sizes(layout),
        **heads,
        num_warps=1,
    )
    fill_kernel[(len(slot_ids) * layout.value_heads,)](
        *(*_pools(memory)[1:], slot_ids, ends, *strides[1:], phase_offset),
        NEUTRAL=NEUTRAL,
        **_sizes(layout),
        **heads,
        num_warps=1,
    )


def _pools(memory: SlotMemory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return memory.base, memory.log_keys, memory.log_updates, memory.log_decays


def _sizes(layout: LogLayout) -> dict[str, int]:
    return {
        "K": layout.key_dim,
        "V": layout.value_dim,
        "M": layout.merge_interval,
        "NULL_SLOT": NULL_SLOT,
    }


def _step_options(layout: LogLayout, config: tuning.LaunchConfig) -> dict[str, Any]:
    """What both step kernels are compiled with."""
    # maxnreg=None would reach ptxas as a word.
    cap = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    return {
        **_sizes(layout),
        "DECAY_LN_MIN": DECAY_LN_MIN,
        "CHUNK": tuning.chunk(layout),
        "ENTRIES": triton.next_power_of_2(max(1, layout.capacity)),
        "ROWS": config.rows,
        "TILES": config.tiles,
        "num_warps": 1,
        **cap,
    }


def _plan(memory: SlotMemory, slot_ids: Tensor, positions: Tensor) -> tuple[tuning.LaunchConfig, tuple[int]]:
    """The configuration and the grid of a step."""
    _check_layout(memory, slot_ids, positions)
    layout, batch = memory.layout, len(slot_ids)
    config = tuning.launch_config(layout, batch, _multiprocessors(slot_ids.device))
    return config, (batch * layout.value_heads * (layout.value_dim // (config.rows * config.tiles)),)


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
    for name, size in (("key_dim", layout.key_dim), ("value_dim", layout.value_dim)):
        if size & (size - 1) or not 16 <= size <= 256:
            raise NotImplementedError(
                f"the GPU kernels want {name} to be a power of two from 16 to 256, got {size}; "
                "decode such a layer on the stock path"
            )
    for name, pool, shape in zip(
        ("base", "log_keys", "log_updates", "log_decays"),
        _pools(memory),
        (layout.base_shape, *layout.log_shapes),
        strict=True,
    ):
        if not pool[0].is_contiguous():
            raise ValueError(
                f"{name} must be contiguous within a slot, {list(shape)}, got strides {pool.stride()}; "
                "only the stride between slots is free on a GPU"
            )
