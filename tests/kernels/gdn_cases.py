"""Geometries, random tokens and poisoned pools for the tests of the gated delta net."""

from dataclasses import dataclass

import torch

from deltalog_kernels import GDN, LogLayout, SlotMemory

EXACT = {"state_dtype": torch.float64, "key_dtype": torch.float64, "update_dtype": torch.float64}


@dataclass(frozen=True)
class Geometry:
    name: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def layout(self, merge_interval: int, **dtypes: torch.dtype) -> LogLayout:
        return LogLayout(
            GDN, self.key_heads, self.value_heads, self.key_dim, self.value_dim, merge_interval, **dtypes
        )

    def __str__(self) -> str:
        return self.name


DEMO = Geometry("demo", 4, 8, 64, 64)
RATIO_THREE = Geometry("ratio-3", 2, 6, 32, 48)
UGLY = Geometry("ugly", 1, 4, 7, 13)
GEOMETRIES = [DEMO, RATIO_THREE, UGLY]


def tokens(geometry: Geometry, rows: int, generator: torch.Generator, dtype=torch.float64) -> dict:
    """Random inputs of one step; gates from barely to entirely forgetting, 0 and -1e4 among them."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, dims = geometry.value_heads, (geometry.key_dim, geometry.value_dim)
    decay_ln = -torch.exp(2 * normal(rows, heads) - 2)
    special = torch.tensor([0.0, -1e-3, -120.0, -1e4], dtype=torch.float64)
    picked = special[torch.randint(4, (rows, heads), generator=generator)]
    use_special = torch.rand(rows, heads, generator=generator) < 0.1
    return {
        "q": normal(rows, geometry.key_heads, dims[0]).to(dtype),
        "k": normal(rows, geometry.key_heads, dims[0]).to(dtype),
        "v": normal(rows, heads, dims[1]).to(dtype),
        "decay_ln": torch.where(use_special, picked, decay_ln),
        "beta": normal(rows, heads).sigmoid(),
    }


def poisoned_pool(layout: LogLayout, slots: int) -> SlotMemory:
    """A pool in which whatever is read before it is written shows as NaN."""
    memory = SlotMemory.allocate(layout, slots)
    for pool in (memory.base, memory.log_keys, memory.log_updates, memory.log_decays):
        pool.fill_(torch.nan)
    return memory


def snapshot(memory: SlotMemory, slots: list[int]) -> list[torch.Tensor]:
    """Bit patterns of some slots, NaNs included."""
    pools = (memory.base, memory.log_keys, memory.log_updates, memory.log_decays)
    return [pool[slots].contiguous().view(torch.uint8).clone() for pool in pools]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error over the largest expected value; NaN anywhere is infinite."""
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    return error.nan_to_num(nan=torch.inf).item()
