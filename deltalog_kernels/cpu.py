"""The decode steps on CPU tensors. Arguments are validated in decode.py.

Coefficients (the paper's ReplayPrep) are computed for all rows at once; the pass over the base states
(AppendDecode) goes row by row, so that no base is copied and a row's result does not depend on its
batch. Arithmetic is fp32, or fp64 where the state is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltalog_kernels.layout import DECAY_LN_MIN, NEUTRAL, NULL_SLOT, SlotMemory, live_length, merges
from deltalog_kernels.reference import L2_EPS


@dataclass(frozen=True, slots=True)
class _Log:
    """The live entries of some rows, gathered and widened; entries that are not live are neutral.

    keys [R, H, M-1, K], updates [R, HV, M-1, V]; decays [R, HV, M-1]: e^{d_i}, the decay from each entry
    to now; total [R, HV]: e^G, the decay of the base.
    """

    keys: Tensor
    updates: Tensor
    decays: Tensor
    total: Tensor


def _gather_log(memory: SlotMemory, slots: Tensor, live: Tensor, decay_ln: Tensor) -> _Log:
    """decay_ln [R, HV]: the clamped log-decay that comes on top of the log's own."""
    dtype = decay_ln.dtype
    dead = torch.arange(memory.layout.capacity)[None, None, :] >= live[:, None, None]
    keys = memory.log_keys[slots].to(dtype).masked_fill(dead[..., None], NEUTRAL)
    updates = memory.log_updates[slots].to(dtype).masked_fill(dead[..., None], NEUTRAL)
    own = memory.log_decays[slots].to(dtype).masked_fill(dead, NEUTRAL)
    # Newest first: the current token's decay, then each entry's, so that a sum never loses small
    # decays behind a large older one.
    sums = torch.cat([decay_ln[..., None], own.flip(-1)], dim=-1).cumsum(-1)
    return _Log(keys, updates, sums[..., :-1].flip(-1).exp(), sums[..., -1].exp())


def _merge_row(memory: SlotMemory, slot: int, total: Tensor, keys: Tensor, updates: Tensor) -> None:
    """base <- total * base + sum_i updates_i keys_i^T.

    total [HV], keys [HV, N, K], updates [HV, N, V], decays already in the updates.
    """
    base = memory.base[slot]
    decayed = base.to(total.dtype) * total[:, None, None]
    base.copy_(torch.baddbmm(decayed, updates.transpose(1, 2), keys))


def gdn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay_ln: Tensor,
    beta: Tensor,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    phase_offset: int,
    scale: float,
    out: Tensor,
) -> None:
    layout = memory.layout
    out[slot_ids <= NULL_SLOT] = 0
    rows = torch.nonzero(slot_ids > NULL_SLOT).flatten()
    if rows.numel() == 0:
        return
    dtype, slots = layout.decay_dtype, slot_ids[rows].long()
    live = live_length(positions[rows].long(), layout.merge_interval, phase_offset)
    raw_k, v, beta = k[rows].to(dtype), v[rows].to(dtype), beta[rows].to(dtype)
    decay_ln = decay_ln[rows].to(dtype).clamp(min=DECAY_LN_MIN)
    q = q[rows].to(dtype)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * scale
    inverse_norm = torch.rsqrt(raw_k.square().sum(-1, keepdim=True) + L2_EPS)
    k = raw_k * inverse_norm

    log = _gather_log(memory, slots, live, decay_ln)
    ratio = layout.heads_ratio
    by_k = log.decays * torch.einsum("rhck,rhk->rhc", log.keys, k).repeat_interleave(ratio, 1)
    by_q = log.decays * torch.einsum("rhck,rhk->rhc", log.keys, q).repeat_interleave(ratio, 1)
    q_dot_k = (q * k).sum(-1).repeat_interleave(ratio, 1)
    log_for_k = torch.einsum("rhc,rhcv->rhv", by_k, log.updates)
    log_for_q = torch.einsum("rhc,rhcv->rhv", by_q, log.updates)

    kq = torch.stack([k, q], dim=-1).repeat_interleave(ratio, 1)  # [R, HV, K, 2]
    base_kq = torch.stack([memory.base[slot].to(dtype) @ pair for slot, pair in zip(slots, kq, strict=True)])
    base_kq = base_kq * log.total[..., None, None]
    update = beta[..., None] * (v - base_kq[..., 0] - log_for_k)
    out[rows] = (base_kq[..., 1] + log_for_q + q_dot_k[..., None] * update).to(out.dtype)

    # The log stores the key as it came; its norm moves into the update (see SlotMemory).
    update = update * inverse_norm.repeat_interleave(ratio, 1)
    merging = merges(live, layout.merge_interval)
    assert isinstance(merging, Tensor)
    append = ~merging
    memory.log_keys[slots[append], :, live[append]] = raw_k[append].to(layout.key_dtype)
    memory.log_updates[slots[append], :, live[append]] = update[append].to(layout.update_dtype)
    memory.log_decays[slots[append], :, live[append]] = decay_ln[append]
    for r in torch.nonzero(merging).flatten().tolist():
        keys = torch.cat([log.keys[r], raw_k[r][:, None]], dim=1).repeat_interleave(ratio, 0)
        updates = torch.cat([log.updates[r] * log.decays[r][..., None], update[r][:, None]], dim=1)
        _merge_row(memory, int(slots[r]), log.total[r], keys, updates)


def fold(memory: SlotMemory, slots: Tensor, live: Tensor) -> None:
    """Merge ``live`` [R] > 0 entries of ``slots`` [R] into their bases. The log is left as it is."""
    layout = memory.layout
    no_decay = torch.zeros(len(slots), layout.value_heads, dtype=layout.decay_dtype)
    log = _gather_log(memory, slots, live, no_decay)
    for r, slot in enumerate(slots.tolist()):
        keys = log.keys[r].repeat_interleave(layout.heads_ratio, 0)
        _merge_row(memory, slot, log.total[r], keys, log.updates[r] * log.decays[r][..., None])


def fill(memory: SlotMemory, slots: Tensor, entries: Tensor) -> None:
    """Make the first ``entries`` [R] entries of ``slots`` [R] neutral."""
    for slot, count in zip(slots.tolist(), entries.tolist(), strict=True):
        for log in (memory.log_keys, memory.log_updates, memory.log_decays):
            log[slot, :, :count] = NEUTRAL
