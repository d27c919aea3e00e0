"""The families of linear attention that a log can serve, and how they differ."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """What a recurrence asks of its log.

    decay_per_channel: the gate is a vector over the key channels of a value head (True) or one
    number a value head (False).
    """

    name: str
    decay_per_channel: bool


GDN = Family("gdn", decay_per_channel=False)
"""Gated delta net: S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q."""
