"""Deferred decode for linear-attention models: a base state, a bounded log, and a merge every M tokens."""

from deltalog_kernels.decode import fold_and_fill, gdn_gates, gdn_step, merge
from deltalog_kernels.families import GDN, Family
from deltalog_kernels.layout import NULL_SLOT, LogLayout, SlotMemory

__all__ = [
    "GDN",
    "NULL_SLOT",
    "Family",
    "LogLayout",
    "SlotMemory",
    "fold_and_fill",
    "gdn_gates",
    "gdn_step",
    "merge",
]
