"""The recurrences written through and the deferred cycle, in plain torch: the specification.

In fp64 this is what every other implementation is measured against. It favours reading over speed:
the deferred cycle handles one row and keeps its log as a tuple of entries.

Shapes: B rows, H key heads, HV value heads (a multiple of H), K key dim, V value dim. A state is
[HV, V, K], the transpose of the S in the formulas. A log-decay is [.., HV, K], or [.., HV, 1] where a
head has one gate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltalog_kernels.layout import merges

L2_EPS = 1e-6
"""Added to the squared norm inside the root, as the models were trained."""


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + L2_EPS) over the last dimension, in x's dtype."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _per_value_head(x: Tensor, value_heads: int) -> Tensor:
    """[..., H, K] -> [..., HV, K]: value heads h*r ... h*r + r-1 share key head h."""
    return x.repeat_interleave(value_heads // x.shape[-2], dim=-2)


def _seen_by(state: Tensor, vector: Tensor) -> Tensor:
    """S^T x: [..., HV, V, K], [..., HV, K] -> [..., HV, V]"""
    return torch.einsum("...vk,...k->...v", state, vector)


def _outer(value: Tensor, key: Tensor) -> Tensor:
    """[..., V], [..., K] -> [..., V, K]"""
    return value[..., :, None] * key[..., None, :]


def delta_rule_write_through(
    q: Tensor, k: Tensor, v: Tensor, decay_ln: Tensor, beta: Tensor, *, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token of each row of a GDN (arXiv 2412.06464) or KDA (arXiv 2510.26692) layer.

    q, k [B, H, K] as the layer has them (normalised here), v [B, HV, V], decay_ln [B, HV, 1 or K],
    beta [B, HV], state [B, HV, V, K]. Returns out [B, HV, V] and the new state; nothing is modified.
    """
    q = _per_value_head(l2_normalise(q), v.shape[-2]) * scale
    k = _per_value_head(l2_normalise(k), v.shape[-2])
    state = state * decay_ln.exp()[..., None, :]
    update = beta[..., None] * (v - _seen_by(state, k))
    state = state + _outer(update, k)
    return _seen_by(state, q), state


def rwkv6_write_through(
    r: Tensor, k: Tensor, v: Tensor, decay_ln: Tensor, bonus: Tensor, *, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token of each row of an RWKV6 layer (arXiv 2404.05892).

    r, k, decay_ln [B, H, K], v [B, H, V], bonus [H, K], state [B, H, V, K]. The output reads the state
    before this token's decay. Returns out [B, H, V] and the new state; nothing is modified.
    """
    out = _seen_by(state + _outer(v, bonus * k), r * scale)
    return out, state * decay_ln.exp()[..., None, :] + _outer(v, k)


@dataclass(frozen=True, slots=True)
class Entry:
    """One logged update of one row: key [HV, K], update [HV, V], own log-decay [HV, 1 or K]."""

    key: Tensor
    update: Tensor
    decay_ln: Tensor


@dataclass(frozen=True, slots=True)
class DeferredRow:
    """A row's memory: base state [HV, V, K] and its live entries, oldest first."""

    base: Tensor
    entries: tuple[Entry, ...] = ()


def replay(row: DeferredRow) -> Tensor:
    """The current state S_n: every entry decayed by those after it, the base by all of them.

    The sums of log-decays run newest first. A difference of running totals would lose the small
    decays that follow a large one.
    """
    state, later = torch.zeros_like(row.base), torch.zeros(())
    for entry in reversed(row.entries):
        state = state + _outer(entry.update, later.exp() * entry.key)
        later = later + entry.decay_ln
    return state + row.base * later.exp()[..., None, :] if row.entries else row.base


def _seen_through_log(row: DeferredRow, decay_ln: Tensor, vector: Tensor) -> Tensor:
    """What base and log answer to ``vector`` [HV, K] after a further ``decay_ln`` [HV, 1 or K]; [HV, V].

    With d_i the sum of decay_ln and of the log-decays of the entries after i, and G their total:
    S^T diag(e^G) x + sum_i (x . e^{d_i} k_i) u_i. The current state is never formed.
    """
    seen, later = torch.zeros_like(row.base[..., 0]), decay_ln
    for entry in reversed(row.entries):
        seen = seen + (vector * later.exp() * entry.key).sum(-1, keepdim=True) * entry.update
        later = later + entry.decay_ln
    return seen + _seen_by(row.base, later.exp() * vector)


def _append_or_merge(row: DeferredRow, entry: Entry, merge_interval: int) -> DeferredRow:
    longer = DeferredRow(row.base, (*row.entries, entry))
    return DeferredRow(replay(longer)) if merges(len(row.entries), merge_interval) else longer


def delta_rule_deferred(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay_ln: Tensor,
    beta: Tensor,
    *,
    row: DeferredRow,
    merge_interval: int,
    scale: float,
) -> tuple[Tensor, DeferredRow]:
    """One token of one row of a GDN or KDA layer: u = beta (v - S_n^T k), o = S_n^T q + (q . k) u.

    q, k [H, K], v [HV, V], decay_ln [HV, 1 or K], beta [HV]. Returns out [HV, V] and the row's next
    memory: one entry longer, or merged when the log was full.
    """
    q = _per_value_head(l2_normalise(q), v.shape[-2]) * scale
    k = _per_value_head(l2_normalise(k), v.shape[-2])
    update = beta[:, None] * (v - _seen_through_log(row, decay_ln, k))
    out = _seen_through_log(row, decay_ln, q) + (q * k).sum(-1, keepdim=True) * update
    return out, _append_or_merge(row, Entry(k, update, decay_ln), merge_interval)


def rwkv6_deferred(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    decay_ln: Tensor,
    bonus: Tensor,
    *,
    row: DeferredRow,
    merge_interval: int,
    scale: float,
) -> tuple[Tensor, DeferredRow]:
    """One token of one row of an RWKV6 layer: o = S_n^T r + (r . bonus k) v, before this token's decay.

    r, k, decay_ln [H, K], v [H, V], bonus [H, K]. Returns as delta_rule_deferred.
    """
    r = r * scale
    out = _seen_through_log(row, torch.zeros_like(decay_ln), r) + (r * bonus * k).sum(-1, keepdim=True) * v
    return out, _append_or_merge(row, Entry(k, v, decay_ln), merge_interval)
