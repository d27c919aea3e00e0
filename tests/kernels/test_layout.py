import pytest
import torch

from deltalog_kernels import GDN, LogLayout, SlotMemory
from deltalog_kernels.layout import live_length, merges


def layout(**changes) -> LogLayout:
    sizes = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "merge_interval": 8}
    return LogLayout(GDN, **(sizes | changes))


def test_bytes_of_qwen3_next():
    # 32 heads of 128 x 128 fp32; an entry is 16 bf16 keys, 32 fp32 updates and 32 fp32 log-decays.
    assert layout().base_bytes == 32 * 128 * 128 * 4
    assert layout().entry_bytes == 16 * 128 * 2 + 32 * 128 * 4 + 32 * 4
    assert layout().log_bytes == 7 * layout().entry_bytes


def test_pool_bytes_equal_the_layouts():
    memory = SlotMemory.allocate(layout(), slots=3)
    logs = memory.log
    assert memory.base.nbytes == 3 * layout().base_bytes
    assert sum(log.nbytes for log in logs) == 3 * layout().log_bytes


@pytest.mark.parametrize("interval", [1, 2, 3, 8])
def test_a_cycle_counts_up_and_merges_once(interval):
    lives = [live_length(position, interval) for position in range(100, 100 + interval)]
    assert sorted(lives) == list(range(interval))
    assert [merges(live, interval) for live in lives].count(True) == 1
    after_merge = live_length(100 + lives.index(interval - 1) + 1, interval)
    assert after_merge == 0


def test_phase_offset_shifts_the_merge():
    assert live_length(5, 8, phase_offset=3) == 0
    assert live_length(1, 8, phase_offset=-3) == 6
    assert live_length(torch.tensor([5, 6]), 8, phase_offset=3).tolist() == [0, 1]


def test_logs_have_a_longest_interval():
    assert layout(merge_interval=64).capacity == 63
    with pytest.raises(
        ValueError, match="merge_interval must be 64 at most, got 65; a longer log costs more"
    ):
        layout(merge_interval=65)


@pytest.mark.parametrize("name", ["state_dtype", "key_dtype", "update_dtype"])
def test_dtypes_that_no_kernel_has_are_refused(name):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layout(**{name: dtype})
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(
            ValueError, match=f"{name} must be one of float64, float32, .*, got {dtype}; choose"
        ):
            layout(**{name: dtype})


def test_fp16_holds_no_updates():
    """One that is divided by a small norm of its key would be infinite."""
    layout(state_dtype=torch.float16, key_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"update_dtype must be one of .*, got torch\.float16"):
        layout(update_dtype=torch.float16)


def test_pools_share_a_device():
    here, there = (SlotMemory.allocate(layout(), 3, device) for device in ("cpu", "meta"))
    with pytest.raises(ValueError, match="must be on one device, got cpu, cpu, meta, cpu; move them to one"):
        SlotMemory(layout(), here.base, here.log_keys, there.log_updates, here.log_decays)


@pytest.mark.parametrize("size", ["key_heads", "value_heads", "key_dim", "value_dim", "merge_interval"])
@pytest.mark.parametrize("value", [0, -1, 3.5, True])
def test_sizes_must_be_positive_integers(size, value):
    with pytest.raises(ValueError, match=f"{size} must be a positive integer, got"):
        layout(**{size: value})


def test_value_heads_must_share_key_heads_evenly():
    with pytest.raises(ValueError, match="multiple of key_heads"):
        layout(key_heads=3)


def test_views_must_match_the_layout():
    memory = SlotMemory.allocate(layout(), slots=3)
    with pytest.raises(
        ValueError, match=r"log_keys must be torch.bfloat16 \[3, 16, 7, 128\], got torch.float32"
    ):
        SlotMemory(layout(), memory.base, memory.log_keys.float(), memory.log_updates, memory.log_decays)
    with pytest.raises(ValueError, match="log_updates must be"):
        SlotMemory(layout(), memory.base, memory.log_keys, memory.log_updates[:, :, :5], memory.log_decays)
