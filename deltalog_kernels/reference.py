"""The recurrences written through and the deferred cycle, in plain torch: the specification.

In fp64 this is what every other implementation is measured against. It favours reading over speed:
the deferred cycle handles one row and keeps its log as a tuple of entries.

Shapes: B rows, H key heads, HV value heads (a multiple of H), K key dim, V value dim. A state is
[HV, V, K], the transpose of the S in the formulas.
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


def gdn_write_through(
    q: Tensor, k: Tensor, v: Tensor, decay_ln: Tensor, beta: Tensor, *, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token of each row, the state updated in full (gated delta net, arXiv 2412.06464).

    q, k [B, H, K] as the layer has them (normalised here), v [B, HV, V], decay_ln and beta [B, HV],
    state [B, HV, V, K]. Returns out [B, HV, V] and the new state; nothing is modified.
    """
    q = _per_value_head(l2_normalise(q), v.shape[-2]) * scale
    k = _per_value_head(l2_normalise(k), v.shape[-2])
    state = state * decay_ln.exp()[..., None, None]
    update = beta[..., None] * (v - torch.einsum("bhvk,bhk->bhv", state, k))
    state = state + update[..., :, None] * k[..., None, :]
    return torch.einsum("bhvk,bhk->bhv", state, q), state


@dataclass(frozen=True, slots=True)
class Entry:
    """One logged update of one row: normalised key [HV, K], update [HV, V], own log-decay [HV]."""

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
    state = torch.zeros_like(row.base)
    later = torch.zeros_like(row.base[:, 0, 0])
    for entry in reversed(row.entries):
        state = state + later.exp()[:, None, None] * entry.update[:, :, None] * entry.key[:, None, :]
        later = later + entry.decay_ln
    return state + later.exp()[:, None, None] * row.base


def gdn_deferred(
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
    """One token of one row through base and log, without forming the current state.

    With d_i the sum of decay_ln and of the log-decays of the entries after i, and G their total:

        u = beta (v - e^G S^T k - sum_i e^{d_i} (k . k_i) u_i)
        o = e^G S^T q + sum_i e^{d_i} (q . k_i) u_i + (q . k) u

    q, k [H, K], v [HV, V], decay_ln and beta [HV]. Returns out [HV, V] and the row's next memory:
    one entry longer, or merged when the log was full.
    """
    q = _per_value_head(l2_normalise(q), v.shape[-2]) * scale
    k = _per_value_head(l2_normalise(k), v.shape[-2])
    seen_by_k, seen_by_q = torch.zeros_like(v), torch.zeros_like(v)
    later = decay_ln
    for entry in reversed(row.entries):
        seen_by_k = seen_by_k + (later.exp() * (k * entry.key).sum(-1))[:, None] * entry.update
        seen_by_q = seen_by_q + (later.exp() * (q * entry.key).sum(-1))[:, None] * entry.update
        later = later + entry.decay_ln
    total = later.exp()[:, None]
    update = beta[:, None] * (v - total * torch.einsum("hvk,hk->hv", row.base, k) - seen_by_k)
    out = total * torch.einsum("hvk,hk->hv", row.base, q) + seen_by_q + (q * k).sum(-1)[:, None] * update

    longer = DeferredRow(row.base, (*row.entries, Entry(k, update, decay_ln)))
    if merges(len(row.entries), merge_interval):
        return out, DeferredRow(replay(longer))
    return out, longer
