"""Deferred decode for linear-attention models: a base state, a bounded log, and a merge every M tokens."""

from deltalog_kernels.decode import (
    fold_and_fill,
    gdn_gates,
    gdn_step,
    kda_gates,
    kda_step,
    merge,
    rwkv6_step,
)
from deltalog_kernels.families import GDN, KDA, RWKV6, Family
from deltalog_kernels.fused import gdn_fused_step, kda_fused_step, rwkv6_fused_step
from deltalog_kernels.layout import NULL_SLOT, LogLayout, SlotMemory

__all__ = [
    "GDN",
    "KDA",
    "NULL_SLOT",
    "RWKV6",
    "Family",
    "LogLayout",
    "SlotMemory",
    "fold_and_fill",
    "gdn_fused_step",
    "gdn_gates",
    "gdn_step",
    "kda_fused_step",
    "kda_gates",
    "kda_step",
    "merge",
    "rwkv6_fused_step",
    "rwkv6_step",
]
