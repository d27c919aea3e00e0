"""The decode steps on CPU tensors. Arguments are validated in decode.py.

Coefficients (the paper's ReplayPrep) are computed for all rows at once; the pass over the base states
(AppendDecode) goes row by row, so that no base is copied and a row's result does not depend on its
batch. Arithmetic is fp32, or fp64 where the state is.

Shapes: R real rows, H key heads, HV value heads, K and V dims, N = M-1 entries a log holds, D log-decays
a head and entry (K or 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltalog_kernels.layout import DECAY_LN_MIN, NEUTRAL, NULL_SLOT, SlotMemory, live_length, merges
from deltalog_kernels.reference import L2_EPS


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step that are not padding: their index in the batch, slots and live lengths [R]."""

    index: Tensor
    slots: Tensor
    live: Tensor


@dataclass(frozen=True, slots=True)
class _Log:
    """The live entries of some rows, widened and spread over value heads; the others are neutral.

    keys [R, HV, N, K] as they came, decays [R, HV, N, D]: e^{d_i}, the decay from each entry to now;
    updates [R, HV, N, V]; total [R, HV, D]: e^G, the decay of the base.
    """

    keys: Tensor
    decays: Tensor
    updates: Tensor
    total: Tensor

    def seen_by(self, vector: Tensor) -> Tensor:
        """What the entries answer to a vector [R, HV, K]: sum_i (vector . e^{d_i} k_i) u_i, [R, HV, V]."""
        coefficients = (self.keys * self.decays * vector[:, :, None]).sum(-1)
        return torch.einsum("rhn,rhnv->rhv", coefficients, self.updates)


def _real_rows(memory: SlotMemory, slot_ids: Tensor, positions: Tensor, phase_offset: int) -> _Rows:
    index = torch.nonzero(slot_ids > NULL_SLOT).flatten()
    live = live_length(positions[index].long(), memory.layout.merge_interval, phase_offset)
    return _Rows(index, slot_ids[index].long(), live)


def _gather_log(memory: SlotMemory, rows: _Rows, decay_ln: Tensor) -> _Log:
    """decay_ln [R, HV, D]: the log-decay that comes on top of the log's own."""
    layout, dtype = memory.layout, decay_ln.dtype
    dead = (torch.arange(layout.capacity) >= rows.live[:, None])[:, None, :, None]
    keys = memory.log_keys[rows.slots].to(dtype).masked_fill(dead, NEUTRAL)
    updates = memory.log_updates[rows.slots].to(dtype).masked_fill(dead, NEUTRAL)
    own = memory.log_decays[rows.slots].to(dtype).masked_fill(dead, NEUTRAL)
    # Newest first: the current token's decay, then each entry's, so that a sum never loses small
    # decays behind a large older one.
    sums = torch.cat([decay_ln[:, :, None], own.flip(2)], dim=2).cumsum(2)
    decays, total = sums[:, :, :-1].flip(2).exp(), sums[:, :, -1].exp()
    return _Log(keys.repeat_interleave(layout.heads_ratio, 1), decays, updates, total)


def _seen_by_base(memory: SlotMemory, slots: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """What the bases answer to vectors [R, HV, K], each [R, HV, V]: one pass over every base."""
    columns = torch.stack(vectors, dim=-1)
    seen = [memory.base[slot].to(columns.dtype) @ pair for slot, pair in zip(slots, columns, strict=True)]
    return torch.stack(seen).unbind(-1)


def _append_or_merge(
    memory: SlotMemory, rows: _Rows, log: _Log, key: Tensor, update: Tensor, decay_ln: Tensor
) -> None:
    """Log the token, or fold the full log and the token into the base.

    key [R, H, K] as it came, update [R, HV, V], decay_ln [R, HV, D] the token's own. In a merge the
    log's decays and total must include the token's decay.
    """
    layout = memory.layout
    merging = torch.as_tensor(merges(rows.live, layout.merge_interval))
    appending = ~merging
    slots, live = rows.slots[appending], rows.live[appending]
    memory.log_keys[slots, :, live] = key[appending].to(layout.key_dtype)
    memory.log_updates[slots, :, live] = update[appending].to(layout.update_dtype)
    memory.log_decays[slots, :, live] = decay_ln[appending].to(layout.decay_dtype)
    for r in torch.nonzero(merging).flatten().tolist():
        token_key = key[r].repeat_interleave(layout.heads_ratio, 0)[:, None]
        keys = torch.cat([log.keys[r] * log.decays[r], token_key], dim=1)
        updates = torch.cat([log.updates[r], update[r][:, None]], dim=1)
        _merge_row(memory, int(rows.slots[r]), log.total[r], keys, updates)


def _merge_row(memory: SlotMemory, slot: int, total: Tensor, keys: Tensor, updates: Tensor) -> None:
    """base <- base total + sum_i updates_i keys_i^T; total [HV, D], keys [HV, N, K], updates [HV, N, V]."""
    base = memory.base[slot]
    base.copy_(torch.baddbmm(base.to(total.dtype) * total[:, None], updates.transpose(1, 2), keys))


def delta_rule_step(
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
    """GDN and KDA: decay_ln [B, HV, D], the rest as in decode.py."""
    layout, dtype = memory.layout, memory.layout.decay_dtype
    out[slot_ids <= NULL_SLOT] = 0
    rows = _real_rows(memory, slot_ids, positions, phase_offset)
    if not len(rows.index):
        return
    q, raw_k, v, beta = (x[rows.index].to(dtype) for x in (q, k, v, beta))
    decay_ln = decay_ln[rows.index].to(dtype).clamp(min=DECAY_LN_MIN)
    inverse_norm = torch.rsqrt(raw_k.square().sum(-1, keepdim=True) + L2_EPS)
    k = (raw_k * inverse_norm).repeat_interleave(layout.heads_ratio, 1)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * scale
    q = q.repeat_interleave(layout.heads_ratio, 1)

    log = _gather_log(memory, rows, decay_ln)
    base_k, base_q = _seen_by_base(memory, rows.slots, k * log.total, q * log.total)
    update = beta[..., None] * (v - base_k - log.seen_by(k))
    out[rows.index] = (base_q + log.seen_by(q) + (q * k).sum(-1, keepdim=True) * update).to(out.dtype)

    # The log stores the key as it came; its norm moves into the update (see SlotMemory).
    update = update * inverse_norm.repeat_interleave(layout.heads_ratio, 1)
    _append_or_merge(memory, rows, log, raw_k, update, decay_ln)


def rwkv6_step(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    decay_ln: Tensor,
    bonus: Tensor,
    memory: SlotMemory,
    slot_ids: Tensor,
    positions: Tensor,
    phase_offset: int,
    scale: float,
    out: Tensor,
) -> None:
    """RWKV6, arguments as in decode.py."""
    dtype = memory.layout.decay_dtype
    out[slot_ids <= NULL_SLOT] = 0
    rows = _real_rows(memory, slot_ids, positions, phase_offset)
    if not len(rows.index):
        return
    r, k, v = (x[rows.index].to(dtype) for x in (r, k, v))
    r, bonus = r * scale, bonus.to(dtype)
    decay_ln = decay_ln[rows.index].to(dtype).clamp(min=DECAY_LN_MIN)

    # The output reads the state before this token's decay.
    log = _gather_log(memory, rows, torch.zeros_like(decay_ln))
    (base_r,) = _seen_by_base(memory, rows.slots, r * log.total)
    out[rows.index] = (base_r + log.seen_by(r) + (r * bonus * k).sum(-1, keepdim=True) * v).to(out.dtype)

    decay = decay_ln.exp()
    decayed = _Log(log.keys, log.decays * decay[:, :, None], log.updates, log.total * decay)
    _append_or_merge(memory, rows, decayed, k, v, decay_ln)


def fold_and_fill(
    memory: SlotMemory, slot_ids: Tensor, starts: Tensor, ends: Tensor, phase_offset: int
) -> None:
    """Arguments as in decode.py."""
    real = slot_ids > NULL_SLOT
    slots, starts, ends = slot_ids[real].long(), starts[real].long(), ends[real].long()
    interval = memory.layout.merge_interval
    live = torch.where(starts > 0, live_length(starts, interval, phase_offset), 0)
    if (live > 0).any():
        fold(memory, slots[live > 0], live[live > 0])
    fill(memory, slots, live_length(ends, interval, phase_offset))


def fold(memory: SlotMemory, slots: Tensor, live: Tensor) -> None:
    """Merge ``live`` [R] > 0 entries of ``slots`` [R] into their bases. The log is left as it is."""
    layout = memory.layout
    no_decay = torch.zeros(len(slots), layout.value_heads, layout.decay_dim, dtype=layout.decay_dtype)
    log = _gather_log(memory, _Rows(torch.arange(len(slots)), slots, live), no_decay)
    for r, slot in enumerate(slots.tolist()):
        _merge_row(memory, slot, log.total[r], log.keys[r] * log.decays[r], log.updates[r])


def fill(memory: SlotMemory, slots: Tensor, entries: Tensor) -> None:
    """Make the first ``entries`` [R] entries of ``slots`` [R] neutral."""
    for slot, count in zip(slots.tolist(), entries.tolist(), strict=True):
        for log in memory.log:
            log[slot, :, :count] = NEUTRAL
