"""The steps on what an engine has at hand: packed projections and raw gates, which the kernels work out.

On a GPU norms and gates happen inside the one launch, in fp32; on the CPU they are decode.py's own.
"""

from typing import Any

from torch import Tensor

from deltalog_kernels import cpu, decode
from deltalog_kernels.families import GDN, KDA, RWKV6
from deltalog_kernels.layout import LogLayout, SlotMemory


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
    layout = memory.layout
    q, k, v = _unpack(qkv, layout)
    heads = (layout.value_heads,)
    decode.check_parameters(memory, a_log=(a_log, heads), dt_bias=(dt_bias, heads))
    rest: dict[str, Any] = {
        "memory": memory,
        "slot_ids": slot_ids,
        "positions": positions,
        "phase_offset": phase_offset,
    }
    if (module := decode.backend(memory)) is cpu:
        decay_ln, beta = decode.gdn_gates(a, b, a_log, dt_bias)
        return decode.gdn_step(q, k, v, decay_ln, beta, scale=scale, out=out, **rest)
    shape = (len(slot_ids), layout.value_heads)
    out = decode.check_step(
        GDN, q, k, v, {"a": (a, shape), "b": (b, shape)}, memory, slot_ids, positions, out
    )
    scale = layout.key_dim**-0.5 if scale is None else scale
    gates = {"a_log": a_log, "dt_bias": dt_bias}
    module.delta_rule_step(q, k, v, a[..., None], b, **rest, scale=scale, out=out, **gates)
    return out


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
    layout = memory.layout
    q, k, v = _unpack(qkv, layout)
    heads, channels = (layout.value_heads,), (layout.value_heads, layout.key_dim)
    decode.check_parameters(memory, a_log=(a_log, heads), dt_bias=(dt_bias, channels))
    rest: dict[str, Any] = {
        "memory": memory,
        "slot_ids": slot_ids,
        "positions": positions,
        "phase_offset": phase_offset,
    }
    if (module := decode.backend(memory)) is cpu:
        decay_ln, beta = decode.kda_gates(a, b, a_log, dt_bias, lower_bound)
        return decode.kda_step(q, k, v, decay_ln, beta, scale=scale, out=out, **rest)
    decode.check_lower_bound(lower_bound)
    shape = (len(slot_ids), layout.value_heads)
    gates = {"a": (a, (*shape, layout.key_dim)), "b": (b, shape)}
    out = decode.check_step(KDA, q, k, v, gates, memory, slot_ids, positions, out)
    scale = layout.key_dim**-0.5 if scale is None else scale
    raw: dict[str, Any] = {"a_log": a_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    module.delta_rule_step(q, k, v, a, b, **rest, scale=scale, out=out, **raw)
    return out


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
    layout = memory.layout
    rest: dict[str, Any] = {
        "memory": memory,
        "slot_ids": slot_ids,
        "positions": positions,
        "phase_offset": phase_offset,
    }
    if (module := decode.backend(memory)) is cpu:
        return decode.rwkv6_step(r, k, v, -w.float().exp(), bonus, scale=scale, out=out, **rest)
    decode.check_parameters(memory, bonus=(bonus, (layout.key_heads, layout.key_dim)))
    gates = {"w": (w, (len(slot_ids), layout.value_heads, layout.key_dim))}
    out = decode.check_step(RWKV6, r, k, v, gates, memory, slot_ids, positions, out)
    module.rwkv6_step(r, k, v, w, bonus, **rest, scale=1.0 if scale is None else scale, out=out, raw=True)
    return out


def _unpack(qkv: Tensor, layout: LogLayout) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, H, K] and v [B, HV, V] as views."""
    keys, values = layout.key_heads * layout.key_dim, layout.value_heads * layout.value_dim
    decode.check_shape("qkv", qkv, (qkv.shape[0], 2 * keys + values))
    q, k, v = qkv.split([keys, keys, values], dim=-1)
    key_shape = (layout.key_heads, layout.key_dim)
    return (
        q.unflatten(-1, key_shape),
        k.unflatten(-1, key_shape),
        v.unflatten(-1, (layout.value_heads, layout.value_dim)),
    )
