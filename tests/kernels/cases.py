"""Geometries, random tokens, poisoned pools and the specification, for the tests of the three families."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltalog_kernels import GDN, KDA, RWKV6, Family, LogLayout, SlotMemory, gdn_step, kda_step, rwkv6_step
from deltalog_kernels.reference import (
    DeferredRow,
    delta_rule_deferred,
    delta_rule_write_through,
    rwkv6_deferred,
    rwkv6_write_through,
)

EXACT = {"state_dtype": torch.float64, "key_dtype": torch.float64, "update_dtype": torch.float64}
STEPS: dict[Family, Callable[..., Tensor]] = {GDN: gdn_step, KDA: kda_step, RWKV6: rwkv6_step}


@dataclass(frozen=True)
class Geometry:
    family: Family
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def layout(self, merge_interval: int, **dtypes: torch.dtype) -> LogLayout:
        sizes = (self.key_heads, self.value_heads, self.key_dim, self.value_dim)
        return LogLayout(self.family, *sizes, merge_interval, **dtypes)

    @property
    def scale(self) -> float:
        return 1.0 if self.family is RWKV6 else self.key_dim**-0.5

    def __str__(self) -> str:
        heads, dims = (self.key_heads, self.value_heads), (self.key_dim, self.value_dim)
        return f"{self.family.name}-{heads[0]}.{heads[1]}-{dims[0]}x{dims[1]}"


# Every value-to-key head ratio from 1 to 4, key and value dims that differ, and sizes that no tile divides.
GEOMETRIES = [
    Geometry(GDN, 4, 8, 64, 64),
    Geometry(GDN, 2, 6, 32, 48),
    Geometry(GDN, 1, 4, 7, 13),
    Geometry(GDN, 3, 3, 16, 8),
    Geometry(KDA, 2, 2, 64, 64),
    Geometry(KDA, 1, 3, 7, 13),
    Geometry(RWKV6, 2, 2, 64, 64),
    Geometry(RWKV6, 3, 3, 7, 13),
]
SMALL = [Geometry(GDN, 1, 2, 7, 13), Geometry(KDA, 1, 2, 7, 13), Geometry(RWKV6, 2, 2, 7, 13)]


def tokens(geometry: Geometry, rows: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    """Random inputs of one step; gates from barely to entirely forgetting, 0 and -1e4 among them.

    q and k (r and k) come in ``dtype``, all else in fp64.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    key_shape = (rows, geometry.key_heads, geometry.key_dim)
    channels = (geometry.key_dim,) if geometry.family.decay_per_channel else ()
    gate_shape = (rows, geometry.value_heads, *channels)
    special = torch.tensor([0.0, -1e-3, -120.0, -1e4], dtype=torch.float64)
    picked = special[torch.randint(4, gate_shape, generator=generator)]
    ordinary = -torch.exp(2 * normal(*gate_shape) - 2)
    use_special = torch.rand(gate_shape, generator=generator) < 0.1
    common = {
        "k": normal(*key_shape).to(dtype),
        "v": normal(rows, geometry.value_heads, geometry.value_dim),
        "decay_ln": torch.where(use_special, picked, ordinary),
    }
    query = normal(*key_shape).to(dtype)
    if geometry.family is RWKV6:
        # One bonus a layer: every step of a test must see the same.
        bonus = torch.randn(key_shape[1:], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return common | {"r": query, "bonus": bonus}
    return common | {"q": query, "beta": normal(rows, geometry.value_heads).sigmoid()}


def rows_of(token: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Some rows of a step's inputs; the bonus has none."""
    return {name: value if name == "bonus" else value[rows] for name, value in token.items()}


class WriteThrough:
    """The specification for a set of slots: dense fp64 states, advanced token by token."""

    def __init__(self, geometry: Geometry, slots: int) -> None:
        shape = (slots, geometry.value_heads, geometry.value_dim, geometry.key_dim)
        self.geometry = geometry
        self.states = torch.zeros(shape, dtype=torch.float64)

    def step(self, slots: Sequence[int], token: dict[str, Any]) -> Tensor:
        wide = {name: value.double() for name, value in token.items()}
        if self.geometry.family is GDN:
            wide["decay_ln"] = wide["decay_ln"][..., None]
        recur = rwkv6_write_through if self.geometry.family is RWKV6 else delta_rule_write_through
        out, self.states[slots] = recur(**wide, state=self.states[slots], scale=self.geometry.scale)
        return out

    def randomise(self, generator: torch.Generator) -> None:
        self.states = torch.randn(self.states.shape, generator=generator, dtype=torch.float64)


def deferred_reference(
    geometry: Geometry, token: dict[str, Any], row: DeferredRow, merge_interval: int
) -> tuple[Tensor, DeferredRow]:
    """One token of a single row through the deferred reference."""
    one = {name: value if name == "bonus" else value[0] for name, value in token.items()}
    if geometry.family is GDN:
        one["decay_ln"] = one["decay_ln"][..., None]
    step = rwkv6_deferred if geometry.family is RWKV6 else delta_rule_deferred
    return step(**one, row=row, merge_interval=merge_interval, scale=geometry.scale)


def poisoned_pool(layout: LogLayout, slots: int) -> SlotMemory:
    """A pool in which whatever is read before it is written shows as NaN."""
    memory = SlotMemory.allocate(layout, slots)
    for pool in memory.pools:
        pool.fill_(torch.nan)
    return memory


def bits(memory: SlotMemory, slots: Sequence[int]) -> list[bytes]:
    """Bit patterns of some slots, NaNs included."""
    return [
        pool[slots].contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes() for pool in memory.pools
    ]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error over the largest expected value; NaN anywhere is infinite."""
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    return error.nan_to_num(nan=torch.inf).item()
