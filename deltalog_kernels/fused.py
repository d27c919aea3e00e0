"""The steps on what an engine has at hand: packed projections and raw gates, which the kernels work out.

On a GPU norms and gates happen inside the one launch, in fp32; on the CPU the gates are decode.py's own.
"""

from typing import Any

import torch
from torch import Tensor

from deltalog_kernels import cpu, decode
from deltalog_kernels.families import GDN, KDA, RWKV6
from deltalog_kernels.layout import LogLayout, SlotMemory


@torch.no_grad()
def gdn_fused_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    phase_offset: int = 0,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """decode.gdn_step from a layer's projections after the convolution.

    name       shape                 dtype            meaning
    qkv        [B, 2 H K + HV V]     key_dtype        query, key, value of each row, packed in this order
    a, b       [B, HV]               floating point   projections of the gate and of beta
    a_log      [HV]                  floating point   decay_ln = -exp(a_log) softplus(a + dt_bias)
    dt_bias    [HV]                  floating point   beta = sigmoid(b), never rounded

    a_log and dt_bias are contiguous. The rest, the result and the errors are gdn_step's.
    """
    layout, rows = memory.layout, decode.count_rows(slot_ids)
    q, k, v = _unpack(qkv, layout, slot_ids)
    heads = (layout.value_heads,)
    decode.check_parameters(memory, a_log=(a_log, heads), dt_bias=(dt_bias, heads))
    shape = (rows, layout.value_heads)
    projections = {"a": (a, shape), "b": (b, shape)}
    out = decode.check_step(GDN, q, k, v, projections, memory, slot_ids, positions, out)
    rest: dict[str, Any] = {
        "memory": memory,
        "slot_ids": slot_ids,
        "positions": positions,
        "phase_offset": phase_offset,
        "scale": layout.key_dim**-0.5 if scale is None else scale,
        "out": out,
    }
    if (module := decode.backend(memory)) is cpu:
        decay_ln, beta = decode.gdn_gates(a, b, a_log, dt_bias)
        cpu.delta_rule_step(q, k, v, decay_ln[..., None], beta, **rest)
    else:
        module.delta_rule_step(q, k, v, a[..., None], b, **rest, a_log=a_log, dt_bias=dt_bias)
    return out


@torch.no_grad()
def kda_fused_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    lower_bound: float | None = None,
    phase_offset: int = 0,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """decode.kda_step from a layer's projections. As gdn_fused_step, but a gate for each channel:

    name         shape          dtype            meaning
    a            [B, HV, K]     floating point   projection of the gates
    dt_bias      [HV, K]        floating point   see decode.kda_gates, also for lower_bound
    """
    layout, rows = memory.layout, decode.count_rows(slot_ids)
    q, k, v = _unpack(qkv, layout, slot_ids)
    heads, channels = (layout.value_heads,), (layout.value_heads, layout.key_dim)
    decode.check_parameters(memory, a_log=(a_log, heads), dt_bias=(dt_bias, channels))
    decode.check_lower_bound(lower_bound)
    shape = (rows, layout.value_heads)
    projections = {"a": (a, (*shape, layout.key_dim)), "b": (b, shape)}
    out = decode.check_step(KDA, q, k, v, projections, memory, slot_ids, positions, out)
    rest: dict[str, Any] = {
        "memory": memory,
        "slot_ids": slot_ids,
        "positions": positions,
        "phase_offset": phase_offset,
        "scale": layout.key_dim**-0.5 if scale is None else scale,
        "out": out,
    }
    if (module := decode.backend(memory)) is cpu:
        decay_ln, beta = decode.kda_gates(a, b, a_log, dt_bias, lower_bound)
        cpu.delta_rule_step(q, k, v, decay_ln, beta, **rest)
    else:
        raw: dict[str, Any] = {"a_log": a_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
        module.delta_rule_step(q, k, v, a, b, **rest, **raw)
    return out


@torch.no_grad()
def rwkv6_fused_step(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    bonus: Tensor,
    *,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    phase_offset: int = 0,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """decode.rwkv6_step from the layer's w [B, H, K], of which the log-decay is -exp(w)."""
    layout, rows = memory.layout, decode.count_rows(slot_ids)
    decode.check_parameters(memory, bonus=(bonus, (layout.key_heads, layout.key_dim)))
    projection = {"w": (w, (rows, layout.value_heads, layout.key_dim))}
    out = decode.check_step(RWKV6, r, k, v, projection, memory, slot_ids, positions, out)
    rest: dict[str, Any] = {
        "memory": memory,
        "slot_ids": slot_ids,
        "positions": positions,
        "phase_offset": phase_offset,
        "scale": 1.0 if scale is None else scale,
        "out": out,
    }
    if (module := decode.backend(memory)) is cpu:
        cpu.rwkv6_step(r, k, v, -w.float().exp(), bonus, **rest)
    else:
        module.rwkv6_step(r, k, v, w, bonus, **rest, raw=True)
    return out


def _unpack(qkv: Tensor, layout: LogLayout, slot_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, H, K] and v [B, HV, V] as views."""
    keys, values = layout.key_heads * layout.key_dim, layout.value_heads * layout.value_dim
    rows = decode.count_rows(slot_ids)
    decode.check_shape("slot_ids", slot_ids, (rows,))
    decode.check_shape("qkv", qkv, (rows, 2 * keys + values))
    q, k, v = qkv.split([keys, keys, values], dim=-1)
    key_shape = (layout.key_heads, layout.key_dim)
    return (
        q.unflatten(-1, key_shape),
        k.unflatten(-1, key_shape),
        v.unflatten(-1, (layout.value_heads, layout.value_dim)),
    )
