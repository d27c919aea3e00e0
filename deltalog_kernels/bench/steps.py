"""One decode step as the GPU bench sees it: random projections, our fused step on them, the specification."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltalog_kernels import (
    GDN,
    RWKV6,
    LogLayout,
    SlotMemory,
    gdn_fused_step,
    gdn_gates,
    kda_fused_step,
    kda_gates,
    rwkv6_fused_step,
)
from deltalog_kernels.bench.baselines import Inputs
from deltalog_kernels.reference import delta_rule_write_through, rwkv6_write_through


def inputs(layout: LogLayout, rows: int, generator: torch.Generator) -> Inputs:
    """Random projections of one step, on the generator's device; gates forget from little to much."""
    heads, keys = layout.value_heads, (layout.key_heads, layout.key_dim)
    channels = (layout.key_dim,) if layout.family.decay_per_channel else ()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    rwkv6 = layout.family is RWKV6
    return Inputs(
        q=normal(rows, *keys).bfloat16(),
        k=normal(rows, *keys).bfloat16(),
        v=normal(rows, heads, layout.value_dim).bfloat16(),
        a=(normal(rows, heads, *channels) - (3 if rwkv6 else 0)).bfloat16(),
        b=normal(rows, heads).bfloat16(),
        a_log=normal(heads) - 2,
        dt_bias=normal(heads, *channels),
        bonus=normal(*keys),
    )


def rows_of(token: Inputs, rows: Tensor) -> Inputs:
    """Some rows of a step's inputs."""
    return replace(token, **{name: getattr(token, name)[rows.long()] for name in ("q", "k", "v", "a", "b")})


def deltalog_step(
    layout: LogLayout, token: Inputs, memory: SlotMemory, slot_ids: Tensor, out: Tensor
) -> Callable[[Tensor], Tensor]:
    """Our step on these inputs, as a function of the positions."""
    at: dict[str, Any] = {"memory": memory, "slot_ids": slot_ids.contiguous(), "out": out}
    if layout.family is RWKV6:
        arguments = (token.q, token.k, token.v, token.a, token.bonus)
        return lambda positions: rwkv6_fused_step(*arguments, positions=positions, **at)
    qkv = torch.cat([token.q.flatten(1), token.k.flatten(1), token.v.flatten(1)], dim=1)
    fused = gdn_fused_step if layout.family is GDN else kda_fused_step
    gates = (token.a, token.b, token.a_log, token.dt_bias)
    return lambda positions: fused(qkv, *gates, positions=positions, **at)


def write_through(layout: LogLayout, token: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The specification in fp64: out and the new states."""
    q, k, v = (x.double() for x in (token.q, token.k, token.v))
    if layout.family is RWKV6:
        decay_ln = -token.a.double().exp()
        return rwkv6_write_through(q, k, v, decay_ln, token.bonus.double(), state=state, scale=1.0)
    gates = gdn_gates if layout.family is GDN else kda_gates
    decay_ln, beta = (x.double() for x in gates(token.a, token.b, token.a_log, token.dt_bias))
    decay_ln = decay_ln[..., None] if layout.family is GDN else decay_ln
    scale = layout.key_dim**-0.5
    return delta_rule_write_through(q, k, v, decay_ln, beta, state=state, scale=scale)
