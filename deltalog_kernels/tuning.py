"""How a step is cut into programs, by family, dtype and batch. One place; sweeps override it.

Measured on an H200 (`deltalog bench kernels`). Another GPU, an RTX 4090 among them, runs the portable kernels
by the same rules, which nobody has measured there. A choice never changes the order of a sum: the lanes that
share a row are fixed for a layout, and the batch only decides how many rows a program takes, with how many
warps and stages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deltalog_kernels.layout import LogLayout

ROWS = 8
"""Value rows of a portable kernel's tile. The kernels decode heads of 16 rows and more."""

LINE_BYTES = 128
"""Consecutive bytes of a row that eight lanes load together."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """rows: value rows of a tile; tiles: tiles that one program works through, one after the other;
    max_registers: cap for each thread, so that enough programs share a multiprocessor (None: no cap);
    stages: tiles that a bulk program has in buffers or on the way (None: all; the portable kernels have
    none); warps: of a bulk program."""

    rows: int
    tiles: int
    max_registers: int | None = None
    stages: int | None = None
    warps: int = 1


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


def portable_config(layout: LogLayout, batch: int, multiprocessors: int) -> LaunchConfig:
    """The configuration of one step of ``batch`` rows on a GPU with so many multiprocessors.

    Long programs read the log and work out the coefficients once for many tiles; short ones fill the GPU
    when rows are few, and keep what runs at a time close together in memory.
    """
    if _override is not None:
        return _override
    wide = layout.state_dtype.itemsize == 4
    longest = 8 if layout.family.decay_per_channel else 4 if wide else 16
    tiles = _tiles(layout, ROWS, longest, batch, 8 * multiprocessors)
    return LaunchConfig(ROWS, tiles, max_registers=168 if wide else 128)


def bulk_config(layout: LogLayout, batch: int, multiprocessors: int) -> LaunchConfig:
    """The same for the kernels in hopper/.

    Programs of two tiles balance rows that append and rows that merge; four cost less where there are many
    programs all the same. Where every channel of a key has its own decay, that is worked out once for a whole
    head if heads are many, and for two tiles at least. A second warp shares the work on the log where that
    is what a tile waits for.
    """
    if _override is not None:
        return _override
    wide = layout.state_dtype.itemsize == 4
    per_channel = layout.family.decay_per_channel
    long = per_channel and layout.family.delta_rule
    few, many = 6 * multiprocessors, 16 * multiprocessors
    heads = batch * layout.value_heads
    if long and heads >= many:
        rows = 8 if wide or layout.key_dim > 128 else 16
        tiles = min(128, layout.value_dim) // rows
    else:
        rows = 8 if layout.key_dim > 128 else 16
        tiles = max(
            _tiles(layout, rows, 64 // rows, batch, many),
            _tiles(layout, rows, 2, batch, 0 if long else few),
        )
    programs = heads * layout.value_dim // (rows * tiles)
    warps = 2 if programs < few or (wide and not per_channel) else 1
    return LaunchConfig(rows, tiles, stages=min(tiles, 32 // rows), warps=warps)


def _tiles(layout: LogLayout, rows: int, longest: int, batch: int, enough: int) -> int:
    """Tiles a program: the most that leave enough programs."""
    tiles = min(longest, layout.value_dim // rows)
    heads = batch * layout.value_heads
    while tiles > 1 and heads * (layout.value_dim // (rows * tiles)) < enough:
        tiles //= 2
    return tiles
