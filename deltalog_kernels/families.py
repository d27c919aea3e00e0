"""The families of linear attention that a log can serve, and how they differ.

S is the state [K, V] of one head, g the log-decay, q is already scaled. Each gate forgets first, then
the token's key is written.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """What a recurrence asks of its log.

    decay_per_channel: the gate is a vector over the key channels of a head (True) or one number a head
    (False).
    delta_rule: what is written is the value corrected by what the state already answers to the key
    (True), or the value as it came (False).
    """

    name: str
    decay_per_channel: bool
    delta_rule: bool


GDN = Family("gdn", decay_per_channel=False, delta_rule=True)
"""Gated delta net: S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q."""

KDA = Family("kda", decay_per_channel=True, delta_rule=True)
"""Kimi delta attention: S <- diag(e^g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q."""

RWKV6 = Family("rwkv6", decay_per_channel=True, delta_rule=False)
"""RWKV6: o = (S + diag(bonus) k v^T)^T r; S <- diag(e^g) S + k v^T."""
