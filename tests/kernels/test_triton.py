"""The Triton kernels: against the specification, and bit for bit against themselves.

On a machine with a CUDA GPU they are compiled (`make test-gpu`), elsewhere Triton's interpreter runs them on
the CPU at small sizes (`make test` sets TRITON_INTERPRET=1). Bounds on the largest error over the largest
output: fp32 as in test_steps.py; a 16-bit state rounds its base at each of two merges, by 2^-9 in bf16 and
2^-12 in fp16 of an element that may be several times the average; a bf16 log rounds each update by 2^-9.
"""

import os
from dataclasses import replace

import pytest
import torch
from cases import Geometry, WriteThrough, bits, poisoned_pool, relative_error, rows_of, tokens

from deltalog_kernels import (
    GDN,
    KDA,
    NULL_SLOT,
    RWKV6,
    LogLayout,
    SlotMemory,
    decode,
    fold_and_fill,
    gdn_fused_step,
    gdn_gates,
    kda_fused_step,
    kda_gates,
    merge,
    rwkv6_fused_step,
    tuning,
)
from deltalog_kernels.layout import NEUTRAL, live_length, merges

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    *([pytest.mark.gpu] if CUDA else []),
    pytest.mark.skipif(
        not (CUDA or INTERPRETED), reason="needs a CUDA GPU, or TRITON_INTERPRET=1 to interpret the kernels"
    ),
]

# Every head ratio from 1 to 4, and one head a rank.
INTERPRETED_GEOMETRIES = [
    Geometry(GDN, 2, 2, 32, 16),
    Geometry(GDN, 1, 2, 64, 16),
    Geometry(GDN, 1, 3, 16, 16),
    Geometry(GDN, 1, 4, 32, 32),
    Geometry(KDA, 2, 2, 32, 16),
    Geometry(KDA, 1, 1, 16, 32),
    Geometry(RWKV6, 2, 2, 64, 16),
]
COMPILED_GEOMETRIES = [
    Geometry(GDN, 16, 32, 128, 128),
    Geometry(GDN, 4, 12, 128, 128),
    Geometry(GDN, 2, 8, 64, 256),
    Geometry(GDN, 1, 1, 256, 64),
    Geometry(KDA, 8, 8, 128, 128),
    Geometry(KDA, 1, 1, 64, 128),
    Geometry(RWKV6, 8, 8, 64, 64),
    Geometry(RWKV6, 4, 4, 128, 128),
]
GEOMETRIES = COMPILED_GEOMETRIES if CUDA else INTERPRETED_GEOMETRIES
ONE_EACH = [GEOMETRIES[0], GEOMETRIES[4], GEOMETRIES[-1]]
INTERVALS = [1, 2, 3, 8, 16] if CUDA else [1, 2, 5]
FP32 = 6e-6
# The largest seen is 6.4 roundings of one element.
ROUNDED = {torch.bfloat16: 2**-9 * 12, torch.float16: 2**-12 * 12}

each_family = pytest.mark.parametrize("geometry", ONE_EACH, ids=str)


@pytest.fixture(autouse=True, params=["portable", "bulk"] if CUDA else ["portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltalog_kernels.kernels import launch

    monkeypatch.setattr(decode, "backend", lambda memory: launch)
    if request.param == "portable":
        monkeypatch.setattr(launch, "takes_bulk", lambda memory: False)
        return
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("bulk copies: this GPU is not of compute capability 9.0")

    def takes_bulk(memory: SlotMemory, decide=launch.takes_bulk) -> bool:
        assert decide(memory), "this test would not run the kernels it is about"
        return True

    monkeypatch.setattr(launch, "takes_bulk", takes_bulk)


def ids(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def on_device(token: dict) -> dict:
    """A step's inputs as an engine has them: everything but q and k in fp32."""
    return {name: (x.float() if x.dtype == torch.float64 else x).to(DEVICE) for name, x in token.items()}


def step(geometry: Geometry, token: dict, memory: SlotMemory, slot_ids, positions, **rest) -> torch.Tensor:
    run = {GDN: decode.gdn_step, KDA: decode.kda_step, RWKV6: decode.rwkv6_step}[geometry.family]
    out = torch.full((len(slot_ids), *memory.layout.base_shape[:2]), torch.nan, device=DEVICE)
    return run(**on_device(token), memory=memory, slot_ids=slot_ids, positions=positions, out=out, **rest)


def pool(layout: LogLayout, slots: int) -> SlotMemory:
    """Poisoned, and with a gap between slots as vLLM's pages have."""
    bases = poisoned_pool(layout, slots)
    spread = []
    for tensor in bases.pools:
        wide = torch.full((slots, 2, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype, device=DEVICE)
        spread.append(wide[:, 0])
    return SlotMemory(layout, *spread)


def started(
    memory: SlotMemory, spec: WriteThrough, slots: list[int], ends: torch.Tensor, generator, offset: int = 0
) -> None:
    """Random states after a prefill to ``ends``, in the pool and in the specification alike."""
    spec.randomise(generator)
    zeros = torch.zeros_like(ends)
    fold_and_fill(memory, ids(slots), zeros.to(DEVICE), ends.to(DEVICE), phase_offset=offset)
    memory.base[slots] = spec.states[slots].to(memory.base.dtype).to(DEVICE)
    spec.states[slots] = memory.base[slots].double().cpu()


def cycle_error(geometry: Geometry, layout: LogLayout, generator, offset: int = 0) -> tuple[float, float]:
    """Largest errors of output and state over two cycles with every phase in the batch."""
    interval = layout.merge_interval
    rows = interval + 2
    memory, spec = pool(layout, rows + 3), WriteThrough(geometry, rows + 3)
    slots = (1 + torch.randperm(rows + 2, generator=generator)[:rows]).tolist()
    untouched = sorted(set(range(rows + 3)) - set(slots))
    starts = (torch.arange(rows) + 100 * interval).to(torch.int32)
    started(memory, spec, slots, starts, generator, offset)
    before = bits(memory, untouched)
    worst = 0.0
    for n in range(2 * interval + 1):
        token = tokens(geometry, rows, generator, layout.key_dtype)
        positions = (starts + n).to(DEVICE)
        out = step(geometry, token, memory, ids(slots), positions, phase_offset=offset)
        worst = max(worst, relative_error(out.cpu(), spec.step(slots, token)))
    merge(memory, ids(slots), positions + 1, phase_offset=offset)
    assert bits(memory, untouched) == before
    return worst, relative_error(memory.base[slots].cpu(), spec.states[slots])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("interval", INTERVALS)
def test_mixed_phases_equal_write_through(geometry, interval, generator):
    out, state = cycle_error(geometry, geometry.layout(interval), generator, offset=interval // 2)
    assert out < FP32
    assert state < FP32


@each_family
@pytest.mark.parametrize("offset", [-1003, 2**40 + 3])
def test_a_log_lives_as_long_as_the_layout_says(geometry, offset, generator):
    """A negative position among them, whose remainder on a GPU is negative, too."""
    assert max(cycle_error(geometry, geometry.layout(3), generator, offset)) < FP32
    for position in range(7, 10):
        memory, live = SlotMemory.allocate(geometry.layout(3), 2, DEVICE), live_length(position, 3, offset)
        token = tokens(geometry, 1, generator, torch.bfloat16)
        token["decay_ln"] = torch.full_like(token["decay_ln"], -0.5)
        step(geometry, token, memory, ids([1]), ids([position]), phase_offset=offset)
        written = memory.log_decays[1].sum((0, 2)).nonzero().flatten().tolist()
        assert written == ([] if merges(live, 3) else [live])
        assert memory.base.any().item() == merges(live, 3)


@each_family
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_states_are_off_by_their_rounding(geometry, state_dtype, generator):
    if geometry.family is RWKV6 and state_dtype is torch.float16:
        with pytest.raises(ValueError, match="expected a state_dtype of float32 or bfloat16, got float16"):
            geometry.layout(4, state_dtype=state_dtype)
        return
    out, state = cycle_error(geometry, geometry.layout(4, state_dtype=state_dtype), generator)
    assert FP32 < out < ROUNDED[state_dtype]
    assert FP32 < state < ROUNDED[state_dtype]


@each_family
def test_a_bf16_log_is_off_by_the_rounding_of_its_updates(geometry, generator):
    out, _ = cycle_error(geometry, geometry.layout(4, update_dtype=torch.bfloat16), generator)
    assert FP32 < out < 2**-7


@each_family
def test_forced_merge_at_every_length_leaves_a_neutral_log(geometry, generator):
    interval = 4
    for live in range(interval):
        memory, spec = pool(geometry.layout(interval), 3), WriteThrough(geometry, 3)
        start = torch.tensor([4 * interval], dtype=torch.int32)
        started(memory, spec, [1], start, generator)
        for position in range(4 * interval, 4 * interval + live):
            token = tokens(geometry, 1, generator, torch.bfloat16)
            step(geometry, token, memory, ids([1]), ids([position]))
            spec.step([1], token)
        merge(memory, ids([1, NULL_SLOT]), ids([4 * interval + live, 3]))
        assert relative_error(memory.base[1].cpu(), spec.states[1]) < FP32
        assert all((log[1, :, :live] == NEUTRAL).all() for log in memory.pools[1:])
        assert all(torch.isnan(log[1, :, live:]).all() for log in memory.pools[1:])


@each_family
def test_padding_rows_emit_zero_and_touch_nothing(geometry, generator):
    memory, alone = (SlotMemory.allocate(geometry.layout(3), 4, DEVICE) for _ in range(2))
    before = bits(memory, [0, 1, 3])
    token = tokens(geometry, 4, generator, torch.bfloat16)
    out = step(geometry, token, memory, ids([NULL_SLOT, 2, -1, -7]), ids([-1, 4, 5, -1]))
    assert out[[0, 2, 3]].abs().max() == 0
    expected = step(geometry, rows_of(token, slice(1, 2)), alone, ids([2]), ids([4]))
    assert torch.equal(out[1:2], expected)
    assert bits(memory, [0, 1, 3]) == before


@each_family
def test_a_row_does_not_depend_on_its_batch(geometry, generator):
    """Bit for bit: among others in other phases, and alone, where the launch is cut differently."""
    interval, rows = 4, 8
    layout = geometry.layout(interval)
    spec, slots = WriteThrough(geometry, rows + 1), list(range(1, rows + 1))
    starts = torch.tensor([4 * n + n % 4 for n in slots], dtype=torch.int32)
    together, alone = pool(layout, rows + 1), pool(layout, rows + 1)
    seed = generator.initial_seed()
    for memory in (together, alone):
        started(memory, spec, slots, starts, torch.Generator().manual_seed(seed))
    whole = tuning.LaunchConfig(rows=8, tiles=geometry.value_dim // 8, max_registers=None)
    for n in range(2 * interval):
        token = tokens(geometry, rows, generator, torch.bfloat16)
        with tuning.override(whole):
            out = step(geometry, token, together, ids(slots), (starts + n).to(DEVICE))
        for r in range(rows):
            single = rows_of(token, slice(r, r + 1))
            row = step(geometry, single, alone, ids([slots[r]]), (starts[r : r + 1] + n).to(DEVICE))
            assert torch.equal(row, out[r : r + 1])
    assert bits(together, slots) == bits(alone, slots)


@each_family
def test_a_small_decay_after_a_large_one_stays_exact(geometry, generator):
    memory, spec = pool(geometry.layout(8), 2), WriteThrough(geometry, 2)
    started(memory, spec, [1], torch.tensor([8], dtype=torch.int32), generator)
    for n, decay in enumerate([-1e4, -0.1, -0.1]):
        token = tokens(geometry, 1, generator, torch.bfloat16)
        token["decay_ln"] = torch.full_like(token["decay_ln"], decay)
        out = step(geometry, token, memory, ids([1]), ids([8 + n]))
        assert relative_error(out.cpu(), spec.step([1], token)) < FP32


@each_family
def test_a_gate_that_is_nan_shows(geometry, generator):
    """RWKV6 reads the state before its decay: one token later."""
    memory = SlotMemory.allocate(geometry.layout(4), 3, DEVICE)
    for position in (4, 5):
        token = tokens(geometry, 2, generator, torch.bfloat16)
        if position == 4:
            token["decay_ln"][0] = torch.nan
        out = step(geometry, token, memory, ids([1, 2]), ids([position] * 2))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("geometry", [*ONE_EACH, ONE_EACH[1]], ids=["gdn", "kda", "rwkv6", "kda-bounded"])
def test_fused_steps_work_out_norms_and_gates(geometry, generator, request):
    """Packed projections in the model's dtype; gates far out on both sides."""
    layout, lower_bound = geometry.layout(4), -5.0 if "bounded" in request.node.name else None
    memory, spec = pool(layout, 3), WriteThrough(geometry, 3)
    started(memory, spec, [1, 2], torch.tensor([8, 9], dtype=torch.int32), generator)
    heads, key_dim = geometry.value_heads, geometry.key_dim

    def normal(*shape: int, wide: float = 1.0) -> torch.Tensor:
        return (wide * torch.randn(*shape, generator=generator)).bfloat16()

    gate_shape = (2, heads) if geometry.family is GDN else (2, heads, key_dim)
    a_log, dt_bias = torch.randn(heads, generator=generator), torch.randn(gate_shape[1:], generator=generator)
    bonus = torch.randn(heads, key_dim, generator=generator)
    for n in range(6):
        q, k = (normal(2, geometry.key_heads, key_dim) for _ in range(2))
        v, a, b = normal(2, heads, geometry.value_dim), normal(*gate_shape, wide=8.0), normal(2, heads)
        at = {"memory": memory, "slot_ids": ids([1, 2]), "positions": ids([8 + n, 9 + n])}
        at["out"] = torch.full((2, heads, geometry.value_dim), torch.nan, device=DEVICE)
        if geometry.family is RWKV6:
            out = rwkv6_fused_step(*(x.to(DEVICE) for x in (q, k, v, a / 4, bonus)), **at)
            token = {"r": q, "k": k, "v": v, "decay_ln": -(a / 4).double().exp(), "bonus": bonus}
        else:
            qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
            raw = [x.to(DEVICE) for x in (qkv, a, b, a_log, dt_bias)]
            if geometry.family is GDN:
                out = gdn_fused_step(*raw, **at)
                decay_ln, beta = gdn_gates(a, b, a_log, dt_bias)
            else:
                out = kda_fused_step(*raw, **at, lower_bound=lower_bound)
                decay_ln, beta = kda_gates(a, b, a_log, dt_bias, lower_bound)
            token = {"q": q, "k": k, "v": v, "decay_ln": decay_ln, "beta": beta}
        assert relative_error(out.cpu(), spec.step([1, 2], token)) < FP32


def test_what_the_kernels_cannot_decode_is_refused():
    narrow = LogLayout(GDN, 1, 1, 8, 16, 2)
    with pytest.raises(NotImplementedError, match="key_dim to be a power of two from 16 to 256, got 8"):
        fold_and_fill(SlotMemory.allocate(narrow, 2, DEVICE), ids([1]), ids([0]), ids([3]))
    layout = LogLayout(GDN, 1, 1, 16, 16, 2)
    good = SlotMemory.allocate(layout, 2, DEVICE)
    turned = SlotMemory(layout, good.base.transpose(2, 3), *good.pools[1:])
    with pytest.raises(ValueError, match="base must be contiguous within a slot"):
        fold_and_fill(turned, ids([1]), ids([0]), ids([3]))
    with pytest.raises(ValueError, match="must be contiguous on a GPU"):
        fold_and_fill(good, ids([1, 0, 1])[::2], ids([0, 0]), ids([3, 3]))
    for name in ("state_dtype", "key_dtype", "update_dtype"):
        wide = SlotMemory.allocate(replace(layout, **{name: torch.float64}), 2, DEVICE)
        with pytest.raises(NotImplementedError, match=f"expected a narrower {name}, got torch.float64"):
            fold_and_fill(wide, ids([1]), ids([0]), ids([3]))
