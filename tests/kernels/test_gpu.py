"""What only a GPU shows: graph replay, and slots that 32-bit offsets do not reach. `make test-gpu`"""

from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from cases import Geometry, bits
from test_triton import FP32, ROUNDED, cycle_error, ids

from deltalog_kernels import GDN, KDA, RWKV6, LogLayout, SlotMemory, fold_and_fill, merge
from deltalog_kernels.bench.baselines import Inputs
from deltalog_kernels.bench.steps import deltalog_step, inputs
from deltalog_kernels.bench.timing import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DEVICE = "cuda"
FP16, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
QWEN, KIMI, RWKV = (
    Geometry(GDN, 16, 32, 128, 128),
    Geometry(KDA, 8, 8, 128, 128),
    Geometry(RWKV6, 8, 8, 64, 64),
)
# Head ratios 1 to 4, and one head a rank.
RATIOS = [Geometry(GDN, 1, 1, 128, 128), Geometry(GDN, 4, 12, 128, 128), Geometry(GDN, 2, 8, 64, 128)]


def dtypes(state: torch.dtype, update: torch.dtype, key: torch.dtype = BF16) -> dict[str, torch.dtype]:
    return {"state_dtype": state, "update_dtype": update, "key_dtype": key}


def copy_into(static: Inputs, fresh: Inputs) -> None:
    """What changes from step to step; the layer's constants stay."""
    for field in fields(Inputs):
        if field.name not in ("a_log", "dt_bias", "bonus"):
            getattr(static, field.name).copy_(getattr(fresh, field.name))


def copied(memory: SlotMemory) -> SlotMemory:
    return SlotMemory(memory.layout, *(pool.clone() for pool in memory.pools))


def device_bits(memory: SlotMemory, slots: list[int]) -> list[bytes]:
    return bits(SlotMemory(memory.layout, *(pool.cpu() for pool in memory.pools)), slots)


@pytest.mark.parametrize(
    ("geometry", "chosen"),
    [
        *product([QWEN, KIMI, RWKV], [dtypes(WIDE, WIDE), dtypes(WIDE, BF16), dtypes(BF16, WIDE)]),
        *product([QWEN, KIMI], [dtypes(FP16, BF16)]),
        *product(RATIOS, [dtypes(WIDE, WIDE)]),
    ],
    ids=str,
)
def test_graph_replay_is_bit_equal_to_eager_launches(geometry, chosen):
    """Two cycles and more, rows in all phases and one of padding; the slots beside them keep their bits."""
    layout = geometry.layout(8, **chosen)
    generator = torch.Generator(DEVICE).manual_seed(torch.seed() % 2**31)
    rows, untouched = 10, [0, 3, 12]
    slot_ids = ids([7, 1, 2, 11, 0, 4, 5, 6, 8, 10])
    start = SlotMemory.allocate(layout, 13, DEVICE)
    for pool in start.pools:
        pool.fill_(torch.nan)
    positions = torch.arange(rows, dtype=torch.int32, device=DEVICE) + 800
    fold_and_fill(start, slot_ids, torch.zeros_like(positions), positions)
    real = slot_ids[slot_ids > 0].long()
    random = torch.randn(len(real), *layout.base_shape, generator=generator, device=DEVICE)
    start.base[real] = random.to(layout.state_dtype)
    before = device_bits(start, untouched)

    token = inputs(layout, rows, generator)
    eager, replayed = copied(start), copied(start)
    eager_out, out = torch.full((2, rows, layout.value_heads, layout.value_dim), torch.nan, device=DEVICE)
    eager_at, at = positions.clone(), positions.clone()

    def launch(memory: SlotMemory, into: torch.Tensor, where: torch.Tensor) -> None:
        deltalog_step(layout, token, memory, slot_ids, into)(where)
        where += 1

    graph = captured(lambda: launch(replayed, out, at))
    for pool, first in zip(replayed.pools, start.pools, strict=True):
        pool.copy_(first)
    at.copy_(positions)
    for _ in range(2 * layout.merge_interval + 3):
        copy_into(token, inputs(layout, rows, generator))
        launch(eager, eager_out, eager_at)
        graph.replay()
        torch.cuda.synchronize()
        assert not eager_out.isnan().any()
        assert torch.equal(out, eager_out)
    every = list(range(13))
    assert device_bits(replayed, every) == device_bits(eager, every)
    assert device_bits(eager, untouched) == before


def paged(layout: LogLayout, slots: int) -> SlotMemory:
    """Base and log of a slot side by side in one page, as vLLM lays them out; nothing is initialised."""
    shapes, kinds = (layout.base_shape, *layout.log_shapes), (layout.state_dtype, *layout.log_dtypes)
    sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    pages = torch.empty(slots, sum(sizes), dtype=torch.uint8, device=DEVICE)
    parts = zip(pages.split(sizes, dim=1), shapes, kinds, strict=True)
    return SlotMemory(layout, *(part.view(kind).unflatten(1, shape) for part, shape, kind in parts))


@pytest.mark.parametrize("family", [GDN, KDA, RWKV6], ids=lambda family: family.name)
def test_slots_beyond_4096_are_those_below(family):
    """32 value heads of 128 x 128 in fp32: slot 4,096 begins at element 2^31 of the base."""
    layout = LogLayout(family, 16 if family is GDN else 32, 32, 128, 128, 4)
    slots = 4208
    needed = slots * (layout.base_bytes + layout.log_bytes) + 2**30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free GPU memory")
    far, near = paged(layout, slots), paged(layout, 8)
    # The last page, the first whose base begins past 2^31 elements, and one below.
    far_ids, near_ids = ids([slots - 1, 4096, 4095]), ids([1, 2, 3])
    beside_far = [4094, 4097, slots - 2]
    generator = torch.Generator(DEVICE).manual_seed(torch.seed() % 2**31)
    positions = torch.tensor([40, 41, 43], dtype=torch.int32, device=DEVICE)
    base = torch.randn(3, *layout.base_shape, generator=generator, device=DEVICE)
    for memory, slot_ids in ((far, far_ids), (near, near_ids)):
        fold_and_fill(memory, slot_ids, torch.zeros_like(positions), positions)
        memory.base[slot_ids.long()] = base
    around = [pool[beside_far].clone() for pool in far.pools]
    for n in range(2 * layout.merge_interval + 1):
        token = inputs(layout, 3, generator)
        outs = [
            deltalog_step(layout, token, memory, slot_ids, torch.empty_like(token.v))(positions + n)
            for memory, slot_ids in ((far, far_ids), (near, near_ids))
        ]
        assert torch.equal(*outs)
    assert torch.equal(far.base[far_ids.long()], near.base[near_ids.long()])
    for pool, was in zip(far.pools, around, strict=True):
        assert torch.equal(pool[beside_far].view(torch.uint8), was.view(torch.uint8))


EVERY_DTYPE = [
    *product([WIDE, BF16, FP16], [WIDE], [BF16, FP16, WIDE]),
    *product([WIDE, BF16, FP16], [BF16], [BF16]),
]
"""Of the state, the updates, and the keys."""


@pytest.mark.parametrize(
    ("geometry", "chosen"),
    [
        (geometry, dtypes(*kinds))
        for geometry, kinds in product([replace(QWEN, key_heads=2, value_heads=4), KIMI, RWKV], EVERY_DTYPE)
        if not (geometry.family is RWKV6 and kinds[0] is FP16)
    ],
    ids=str,
)
def test_every_dtype_is_off_by_its_rounding_at_most(geometry, chosen, generator):
    """As in test_triton.py, which has the bounds: a 16-bit state, and updates of 2^-9 in a bf16 log."""
    out, state = cycle_error(geometry, geometry.layout(4, **chosen), generator)
    bound = max(FP32, ROUNDED.get(chosen["state_dtype"], 0), 2**-7 * (chosen["update_dtype"] is BF16))
    assert out < bound
    assert state < bound


@pytest.mark.parametrize("family", [GDN, KDA, RWKV6], ids=lambda family: family.name)
def test_kernels_run_on_the_gpu_of_the_pool(family):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layout, results = LogLayout(family, 2, 2, 128, 128, 4), []
    for device in ("cuda:0", "cuda:1"):
        generator = torch.Generator(device).manual_seed(1)
        memory = SlotMemory.allocate(layout, 3, device)
        memory.base.normal_(generator=generator)
        slot_ids, positions = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([1, 2], [4, 7]))
        token = inputs(layout, 2, generator)
        out = deltalog_step(layout, token, memory, slot_ids, torch.empty_like(token.v))(positions)
        merge(memory, slot_ids, positions + 1)
        results.append((out.cpu(), memory.base.cpu()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
