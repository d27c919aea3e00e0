"""How a step is cut into programs, by family, dtype and batch. One place; sweeps override it.

Measured on an H200 (`deltalog bench kernels`); an RTX 4090 and every other GPU get the same rules, which
nobody has measured there. A choice never changes the order of a sum: the rows of a tile are fixed for a
layout, and the batch only decides how many tiles a program takes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deltalog_kernels.layout import LogLayout

ROWS = 8
"""Value rows of a tile. The kernels decode heads of 16 rows and more."""

LINE_BYTES = 128
"""Consecutive bytes of a row that eight lanes load together."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """rows: value rows of a tile; tiles: tiles that one program works through, one after the other;
    max_registers: cap for each thread, so that enough programs share a multiprocessor (None: no cap)."""

    rows: int
    tiles: int
    max_registers: int | None = None


_override: LaunchConfig | None = None


@contextmanager
def override(config: LaunchConfig) -> Iterator[None]:
    """Launch with ``config`` whatever the layout, for sweeps and tests. Not for several threads."""
    global _override
    previous, _override = _override, config
    try:
        yield
    finally:
        _override = previous


def chunk(layout: LogLayout) -> int:
    """Consecutive channels that eight lanes hold: a line of the base."""
    return min(layout.key_dim, LINE_BYTES // layout.state_dtype.itemsize)


def launch_config(layout: LogLayout, batch: int, multiprocessors: int) -> LaunchConfig:
    """The configuration of one step of ``batch`` rows on a GPU with so many multiprocessors.

    Long programs read the log and work out the coefficients once for many tiles; short ones fill the GPU
    when rows are few, and keep what runs at a time close together in memory.
    """
    if _override is not None:
        return _override
    wide = layout.state_dtype.itemsize == 4
    longest = 8 if layout.family.decay_per_channel else 4 if wide else 16
    tiles = min(longest, layout.value_dim // ROWS)
    heads = batch * layout.value_heads
    while tiles > 1 and heads * (layout.value_dim // (ROWS * tiles)) < 8 * multiprocessors:
        tiles //= 2
    return LaunchConfig(ROWS, tiles, max_registers=168 if wide else 128)
