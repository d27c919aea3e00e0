"""Errors after 4,096 random tokens against fp64, RMS(error) / RMS(reference), for outputs and the last state.

Head by head the mean log-decay goes from 2e-4 to 0.3. Rows of the same tokens, in different memories: fp32
base and log; an fp32 base with a bf16 log; and a bf16 base that is rounded every M tokens, M = 1 being
write-through: our own step then rounds the whole state at every token, and its output, like that of every
other M, is computed in fp32 before the rounding. Its log is fp32, so that the base alone is compared.
"""

from dataclasses import dataclass, replace
from math import log10, sqrt

import pytest
import torch
from cases import STEPS, Geometry

from deltalog_kernels import GDN, KDA, RWKV6, LogLayout, SlotMemory
from deltalog_kernels.reference import delta_rule_write_through, rwkv6_write_through

TOKENS = 4096
INTERVALS = (4, 8, 16)
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# On the CPU half a minute a family; the sizes change the errors by a few per cent.
SMALL = [Geometry(GDN, 2, 4, 32, 32), Geometry(KDA, 4, 4, 32, 32), Geometry(RWKV6, 4, 4, 32, 32)]
WHOLE = [Geometry(GDN, 4, 8, 128, 128), Geometry(KDA, 8, 8, 128, 128), Geometry(RWKV6, 8, 8, 64, 64)]


@dataclass(frozen=True)
class Drift:
    """RMS errors over those of the reference."""

    out: float
    state: float


@pytest.mark.parametrize(
    ("device", "geometry"),
    [
        *(pytest.param("cpu", geometry, marks=pytest.mark.long) for geometry in SMALL),
        *(pytest.param("cuda", geometry, marks=[pytest.mark.gpu, CUDA]) for geometry in WHOLE),
    ],
    ids=str,
)
def test_drift_against_fp64(device, geometry):
    exact = geometry.layout(8)
    rounded = {
        interval: replace(exact, merge_interval=interval, state_dtype=torch.bfloat16)
        for interval in (1, *INTERVALS)
    }
    layouts = [exact, replace(exact, update_dtype=torch.bfloat16), *rounded.values()]
    wide, bf16_log, *bf16_base = drifts(geometry, layouts, device)
    print(f"{geometry} on {device}: fp32 {wide}, bf16 log {bf16_log}, bf16 base {bf16_base}")
    # fp32 rounds by 2^-24; the largest seen is 1.2e-6, where a state forgets 2e-4 a token.
    assert wide.out < 1e-5
    assert wide.state < 1e-5
    # Each update is rounded once, by 2^-9 at most: 1.8e-3 seen. Without any the log would not be bf16.
    assert 5e-4 < bf16_log.out < 4.5e-3
    assert 5e-4 < bf16_log.state < 4.5e-3
    # The roundings of a bf16 base are independent and one in M is left: their sum is sqrt(M) smaller. Heads
    # that forget within M tokens gain less, so the states come to 0.86 sqrt(M) at M = 16, the outputs to 1.0.
    through, *deferred = bf16_base
    for interval, drift in zip(INTERVALS, deferred, strict=True):
        assert through.out / drift.out == pytest.approx(sqrt(interval), rel=0.25)
        assert through.state / drift.state == pytest.approx(sqrt(interval), rel=0.25)


def drifts(geometry: Geometry, layouts: list[LogLayout], device: str) -> list[Drift]:
    """One row's tokens through every layout and through the recurrence in fp64."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    generator = torch.Generator(device).manual_seed(seed)
    memories = [SlotMemory.allocate(layout, 2, device) for layout in layouts]
    state = torch.zeros(1, *layouts[0].base_shape, dtype=torch.float64, device=device)
    out = torch.empty(1, *layouts[0].base_shape[:2], device=device)
    slot_ids = torch.ones(1, dtype=torch.int32, device=device)
    bonus = torch.randn(geometry.key_heads, geometry.key_dim, generator=generator, device=device)
    errors, square = torch.zeros(len(layouts), dtype=torch.float64, device=device), 0.0
    for position in range(TOKENS):
        token = draw(geometry, generator) | ({"bonus": bonus} if geometry.family is RWKV6 else {})
        expected, state = spec(geometry, token, state)
        square += expected.square().sum()
        at = {"slot_ids": slot_ids, "positions": torch.full_like(slot_ids, position), "out": out}
        for n, memory in enumerate(memories):
            actual = STEPS[geometry.family](**token, memory=memory, **at)
            errors[n] += (actual.double() - expected).square().sum()
    # The last token merged everywhere: the bases are the states.
    assert all(TOKENS % layout.merge_interval == 0 for layout in layouts)
    states = [(memory.base[1].double() - state[0]).square().sum() for memory in memories]
    return [
        Drift(sqrt(error / square), sqrt(last / state.square().sum()))
        for error, last in zip(errors, states, strict=True)
    ]


def draw(geometry: Geometry, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One token: keys in bf16, values and gates in fp32, so that a bf16 log rounds in every family."""
    heads, keys = geometry.value_heads, (1, geometry.key_heads, geometry.key_dim)
    channels = (geometry.key_dim,) if geometry.family.decay_per_channel else ()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    means = torch.logspace(log10(2e-4), log10(0.3), heads, device=generator.device)
    spread = torch.empty(1, heads, *channels, device=generator.device).exponential_(generator=generator)
    token = {
        "k": normal(*keys).bfloat16(),
        "v": normal(1, heads, geometry.value_dim),
        "decay_ln": -means.reshape(1, heads, *(1 for _ in channels)) * spread,
    }
    if geometry.family is RWKV6:
        return token | {"r": normal(*keys).bfloat16()}
    return token | {"q": normal(*keys).bfloat16(), "beta": normal(1, heads).sigmoid()}


def spec(
    geometry: Geometry, token: dict[str, torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = {name: value.double() for name, value in token.items()}
    if geometry.family is RWKV6:
        return rwkv6_write_through(**wide, state=state, scale=geometry.scale)
    if geometry.family is GDN:
        wide["decay_ln"] = wide["decay_ln"][..., None]
    return delta_rule_write_through(**wide, state=state, scale=geometry.scale)
