"""Bytes that one slot of one layer moves: the one home of this arithmetic.

Counts base state and log only; inputs, outputs and weights move alike in every mode. The plugin's
counters, the bench and the choice of the merge interval all read from here.
"""

from dataclasses import dataclass, replace

from deltalog_kernels.layout import MAX_MERGE_INTERVAL, LogLayout, merges

AUTO_TOLERANCE = 1.03
"""A shorter log is preferred while its mean step is within 3 % of the best one's."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read and written."""

    read_bytes: int = 0
    write_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.read_bytes * times, self.write_bytes * times)

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


def write_through(layout: LogLayout) -> Traffic:
    """A step of the baseline: the whole state in and out."""
    return Traffic(layout.base_bytes, layout.base_bytes)


def append(layout: LogLayout, live: int) -> Traffic:
    """A step that reads base and log and adds one entry."""
    return Traffic(layout.base_bytes + live * layout.entry_bytes, layout.entry_bytes)


def merge(layout: LogLayout, live: int) -> Traffic:
    """A step, or a fold, that reads base and log and rewrites the base."""
    return Traffic(layout.base_bytes + live * layout.entry_bytes, layout.base_bytes)


def fill(layout: LogLayout, entries: int) -> Traffic:
    """Writing neutral entries."""
    return Traffic(0, entries * layout.entry_bytes)


def step(layout: LogLayout, live: int) -> Traffic:
    """A decode step that finds ``live`` entries: append, or merge when the log is full."""
    return merge(layout, live) if merges(live, layout.merge_interval) else append(layout, live)


def cycle(layout: LogLayout) -> Traffic:
    """One whole cycle of merge_interval steps."""
    return sum((step(layout, live) for live in range(layout.merge_interval)), Traffic())


def mean_step_bytes(layout: LogLayout) -> float:
    """Mean bytes of a step over one whole cycle."""
    return cycle(layout).total_bytes / layout.merge_interval


def mean_step_s(layout: LogLayout, read_bytes_per_s: float, copy_bytes_per_s: float) -> float:
    """Seconds of a mean step on a memory that does no better than these rates.

    What is written moves as a copy does, with as many bytes read; what else is read moves as a read does.
    """
    moved = cycle(layout)
    read_s = (moved.read_bytes - moved.write_bytes) / read_bytes_per_s
    return (read_s + 2 * moved.write_bytes / copy_bytes_per_s) / layout.merge_interval


def best_merge_interval(layout: LogLayout) -> int:
    """The smallest power of two whose mean step is within AUTO_TOLERANCE of the best interval's.

    Depends on family, shape and dtypes alone and never on the device: every process that shares a
    page must come to the same answer. The layout's own merge interval does not matter.
    """
    mean = {m: mean_step_bytes(replace(layout, merge_interval=m)) for m in range(1, MAX_MERGE_INTERVAL + 1)}
    limit = min(mean.values()) * AUTO_TOLERANCE
    return next(m for m in (2**n for n in range(MAX_MERGE_INTERVAL.bit_length())) if mean[m] <= limit)
