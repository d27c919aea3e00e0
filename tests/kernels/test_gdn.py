"""The gated delta net, deferred: against the recurrence written through, in fp64 and in fp32.

fp64 leaves rounding alone: the deferred sums have another order; the largest error seen is 1e-15 of the
largest output, and the bound is ten times that. In fp32 the state is rounded once a merge and an update
once when it is logged; the largest seen over 60 tokens is 4.5e-7, and the bound is ten times that.
"""

import pytest
import torch
from gdn_cases import DEMO, EXACT, GEOMETRIES, UGLY, poisoned_pool, relative_error, snapshot, tokens

from deltalog_kernels import NULL_SLOT, SlotMemory, fold_and_fill, gdn_gates, gdn_step, merge
from deltalog_kernels.reference import DeferredRow, gdn_deferred, gdn_write_through, replay

INTERVALS = [1, 2, 3, 8]
FP64, FP32 = 1e-14, 5e-6


@pytest.fixture
def generator() -> torch.Generator:
    # A fresh seed each run; pytest prints it when a test fails.
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


class WriteThrough:
    """The specification for a set of slots: dense states, advanced token by token."""

    def __init__(self, geometry, slots: int):
        self.states = torch.zeros(
            slots, geometry.value_heads, geometry.value_dim, geometry.key_dim, dtype=torch.float64
        )
        self.scale = geometry.key_dim**-0.5

    def step(self, slots: list[int], q, k, v, decay_ln, beta) -> torch.Tensor:
        out, self.states[slots] = gdn_write_through(
            q.double(), k.double(), v.double(), decay_ln, beta, state=self.states[slots], scale=self.scale
        )
        return out

    def prefill(self, memory: SlotMemory, slot: int, state: torch.Tensor) -> None:
        """What vLLM's prefill does: it leaves a dense state in the base and ignores the log."""
        self.states[slot] = state
        memory.base[slot] = state.to(memory.base.dtype)


def ids(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("interval", INTERVALS)
def test_the_deferred_reference_is_the_recurrence(geometry, interval, generator):
    spec = WriteThrough(geometry, 1)
    spec.states.normal_(generator=generator)
    row = DeferredRow(spec.states[0].clone())
    for _ in range(3 * interval + 1):
        token = tokens(geometry, 1, generator)
        expected = spec.step([0], **token)[0]
        one = {name: value[0] for name, value in token.items()}
        out, row = gdn_deferred(**one, row=row, merge_interval=interval, scale=spec.scale)
        assert relative_error(out, expected) < FP64
        assert relative_error(replay(row), spec.states[0]) < FP64
        assert len(row.entries) < interval


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize(("dtypes", "bound"), [(EXACT, FP64), ({}, FP32)], ids=["fp64", "fp32"])
def test_mixed_phases_equal_write_through(geometry, interval, dtypes, bound, generator):
    """Every live length at once: row r starts at position r, slots in random order, pool poisoned."""
    layout = geometry.layout(interval, **dtypes)
    rows = interval + 2
    memory, spec = poisoned_pool(layout, rows + 3), WriteThrough(geometry, rows + 3)
    slots = (1 + torch.randperm(rows + 2, generator=generator)[:rows]).tolist()
    untouched = sorted(set(range(rows + 3)) - set(slots))
    before = snapshot(memory, untouched)
    starts = [int(torch.randint(1, 100, (1,), generator=generator)) * interval + r for r in range(rows)]
    for slot, start in zip(slots, starts, strict=True):
        fold_and_fill(memory, ids([slot]), ids([0]), ids([start]))
        spec.prefill(memory, slot, torch.randn(spec.states[0].shape, generator=generator).double())
    for n in range(60 if interval > 1 else 10):
        token = tokens(geometry, rows, generator, layout.key_dtype)
        out = torch.full((rows, *layout.base_shape[:2]), torch.nan, dtype=layout.decay_dtype)
        gdn_step(**token, memory=memory, slot_ids=ids(slots), positions=ids([s + n for s in starts]), out=out)
        assert relative_error(out, spec.step(slots, **token)) < bound
    merge(memory, ids(slots), ids([s + n + 1 for s in starts]))
    assert relative_error(memory.base[slots], spec.states[slots]) < bound
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(memory, untouched), strict=True))


@pytest.mark.parametrize("interval", INTERVALS)
def test_forced_merge_at_every_length_leaves_a_neutral_log(interval, generator):
    for live in range(interval):
        memory, spec = poisoned_pool(UGLY.layout(interval, **EXACT), 2), WriteThrough(UGLY, 2)
        start = 4 * interval
        spec.prefill(memory, 1, torch.randn(spec.states[1].shape, generator=generator).double())
        for position in range(start, start + live):
            token = tokens(UGLY, 1, generator)
            gdn_step(**token, memory=memory, slot_ids=ids([1]), positions=ids([position]))
            spec.step([1], **token)
        merge(memory, ids([1]), ids([start + live]))
        assert relative_error(memory.base[1], spec.states[1]) < FP64
        merged = memory.base[1].clone()
        merge(memory, ids([1]), ids([start + live]))
        assert torch.equal(memory.base[1], merged), "a second merge finds only neutral entries"
        token = tokens(UGLY, 1, generator)
        out = gdn_step(**token, memory=memory, slot_ids=ids([1]), positions=ids([start + live]))
        assert relative_error(out, spec.step([1], **token)) < FP64


@pytest.mark.parametrize("interval", [2, 3, 8])
def test_prefill_chunks_between_decodes(interval, generator):
    """Random interleaving of decodes, prefill chunks of any length, and slot reuse from position 0."""
    memory, spec = poisoned_pool(UGLY.layout(interval, **EXACT), 2), WriteThrough(UGLY, 2)
    position, live_folds = 0, 0
    for _ in range(60):
        action = (
            "prefill"
            if position == 0
            else ("decode", "prefill", "reuse")[
                int(torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 1, generator=generator))
            ]
        )
        if action == "reuse":
            position = 0
            spec.states.zero_()
            for pool in (memory.base, memory.log_keys, memory.log_updates, memory.log_decays):
                pool[1] = torch.nan
        elif action == "prefill":
            length = int(torch.randint(1, 2 * interval + 1, (1,), generator=generator))
            live_folds += position % interval > 0
            fold_and_fill(memory, ids([1]), ids([position]), ids([position + length]))
            if position == 0:
                memory.base[1] = 0
            assert relative_error(memory.base[1] + 1, spec.states[1] + 1) < FP64
            for _ in range(length):
                spec.step([1], **tokens(UGLY, 1, generator))
            memory.base[1] = spec.states[1]
            position += length
        else:
            token = tokens(UGLY, 1, generator)
            out = gdn_step(**token, memory=memory, slot_ids=ids([1]), positions=ids([position]))
            assert relative_error(out, spec.step([1], **token)) < FP64
            position += 1
    assert live_folds > 0


def test_padding_rows_emit_zero_and_touch_nothing(generator):
    memory = SlotMemory.allocate(DEMO.layout(3), 4)
    before = snapshot(memory, [0, 1, 3])
    token = tokens(DEMO, 4, generator, torch.bfloat16)
    out = torch.full((4, 8, 64), torch.nan)
    padded = {"slot_ids": ids([NULL_SLOT, 2, -1, -7]), "positions": ids([-1, 4, 5, -1])}
    gdn_step(**token, memory=memory, **padded, out=out)
    assert out[[0, 2, 3]].abs().max() == 0
    alone = SlotMemory.allocate(DEMO.layout(3), 4)
    one = {name: value[1:2] for name, value in token.items()}
    expected = gdn_step(**one, memory=alone, slot_ids=ids([2]), positions=ids([4]), out=torch.empty(1, 8, 64))
    assert torch.equal(out[1:2], expected)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(memory, [0, 1, 3]), strict=True))
    fold_and_fill(memory, ids([0, -1]), ids([1, 1]), ids([3, 3]))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(memory, [0, 1, 3]), strict=True))


def test_a_row_does_not_depend_on_its_batch(generator):
    """Bit for bit: alone, and among others in other phases."""
    together, alone = poisoned_pool(DEMO.layout(4), 9), poisoned_pool(DEMO.layout(4), 9)
    slots, positions = ids(range(1, 9)), ids([4 * n + n % 4 for n in range(1, 9)])
    for memory in (together, alone):
        fold_and_fill(memory, slots, torch.zeros_like(slots), positions)
        memory.base.normal_(generator=torch.Generator().manual_seed(1))
    for n in range(9):
        token = tokens(DEMO, 8, generator, torch.bfloat16)
        out = gdn_step(**token, memory=together, slot_ids=slots, positions=positions + n)
        for r in range(8):
            one = {name: value[r : r + 1] for name, value in token.items()}
            row = {"slot_ids": slots[r : r + 1], "positions": positions[r : r + 1] + n}
            assert torch.equal(gdn_step(**one, memory=alone, **row), out[r : r + 1])
    assert torch.equal(together.base[1:], alone.base[1:])


def test_a_small_decay_after_a_large_one_stays_exact():
    """Running totals would give -10000.1 - -10000 = -0.0996 in fp32: an error of 4e-4 in the decay."""
    geometry = UGLY
    memory, spec = SlotMemory.allocate(geometry.layout(8), 2), WriteThrough(geometry, 2)
    generator = torch.Generator().manual_seed(0)
    for position, decay in enumerate([-1e4, -0.1, -0.1]):
        token = tokens(geometry, 1, generator, torch.bfloat16)
        token["decay_ln"] = torch.full_like(token["decay_ln"], decay)
        out = torch.empty(1, 4, 13)
        gdn_step(**token, memory=memory, slot_ids=ids([1]), positions=ids([position]), out=out)
        assert relative_error(out, spec.step([1], **token)) < 1e-6


def test_phase_offset_only_moves_the_merges(generator):
    outs = []
    for offset in range(3):
        memory = SlotMemory.allocate(UGLY.layout(3, **EXACT), 2)
        fresh = torch.Generator().manual_seed(5)
        fold_and_fill(memory, ids([1]), ids([0]), ids([7]), phase_offset=offset)
        memory.base.normal_(generator=torch.Generator().manual_seed(6))
        outs.append(
            torch.cat(
                [
                    gdn_step(
                        **tokens(UGLY, 1, fresh),
                        memory=memory, slot_ids=ids([1]), positions=ids([p]), phase_offset=offset,
                    )
                    for p in range(7, 16)
                ]
            )
        )  # fmt: skip
    assert relative_error(outs[1], outs[0]) < FP64
    assert relative_error(outs[2], outs[0]) < FP64
    assert not torch.equal(outs[1], outs[0]), "another phase sums in another order"


def test_gates_are_fp32_formulas():
    a, b = torch.tensor([[0.5, 30.0]]).bfloat16(), torch.tensor([[0.3, -2.0]]).bfloat16()
    a_log, dt_bias = torch.tensor([0.1, 1.0]), torch.tensor([-1.0, 2.0]).bfloat16()
    decay_ln, beta = gdn_gates(a, b, a_log, dt_bias)
    x = a.double() + dt_bias.double()
    expected = -a_log.double().exp() * torch.log1p(x.exp())
    assert decay_ln.dtype == beta.dtype == torch.float32
    torch.testing.assert_close(decay_ln.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(beta.double(), 1 / (1 + (-b.double()).exp()), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 63).bfloat16()}, r"q must have shape \[2, 4, 64\], got \[2, 4, 63\]"),
        ({"k": torch.zeros(2, 4, 64)}, "k must be torch.bfloat16, the dtype of the log's keys"),
        ({"beta": torch.zeros(2, 4)}, r"beta must have shape \[2, 8\]"),
        ({"positions": ids([1])}, r"positions must have shape \[2\], got \[1\]"),
        ({"positions": torch.zeros(2)}, "positions must be int32 or int64, got torch.float32"),
        ({"slot_ids": ids([[1, 2]])}, r"slot_ids must have shape \[B\]"),
        ({"v": torch.zeros(2, 8, 64, device="meta")}, "decodes on the CPU, got tensors on cpu, meta"),
    ],
)
def test_bad_arguments_say_what_was_expected(change, message, generator):
    memory = SlotMemory.allocate(DEMO.layout(8), 3)
    arguments = tokens(DEMO, 2, generator, torch.bfloat16) | {
        "slot_ids": ids([1, 2]),
        "positions": ids([0, 1]),
    }
    with pytest.raises((ValueError, NotImplementedError), match=message):
        gdn_step(**(arguments | change), memory=memory)
