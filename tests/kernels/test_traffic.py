from dataclasses import replace

import pytest
import torch

from deltalog_kernels import GDN, LogLayout, traffic

QWEN3_NEXT = LogLayout(GDN, 16, 32, 128, 128, merge_interval=8)
DEMO = LogLayout(GDN, 4, 8, 64, 64, merge_interval=8)


def test_write_through_is_an_interval_of_one():
    one = replace(QWEN3_NEXT, merge_interval=1)
    assert traffic.step(one, 0) == traffic.write_through(one)
    assert traffic.mean_step_bytes(one) == 2 * one.base_bytes


@pytest.mark.parametrize("layout", [QWEN3_NEXT, DEMO], ids=["qwen3-next", "demo"])
@pytest.mark.parametrize("interval", [2, 3, 8, 16])
def test_mean_step_follows_the_closed_form(layout, interval):
    # S (1 + 1/M) + e (M-1)/2 read + e (M-1)/M written
    layout = replace(layout, merge_interval=interval)
    state, entry, m = layout.base_bytes, layout.entry_bytes, interval
    expected = state * (1 + 1 / m) + entry * (m - 1) / 2 + entry * (m - 1) / m
    assert traffic.mean_step_bytes(layout) == pytest.approx(expected, rel=1e-12)


def test_appends_write_one_entry_and_merges_the_base():
    assert traffic.step(DEMO, 3).write_bytes == DEMO.entry_bytes
    assert traffic.step(DEMO, 7).write_bytes == DEMO.base_bytes
    assert traffic.step(DEMO, 3).read_bytes == DEMO.base_bytes + 3 * DEMO.entry_bytes


def test_auto_is_eight_for_gdn():
    assert traffic.best_merge_interval(QWEN3_NEXT) == 8
    assert traffic.best_merge_interval(DEMO) == 8


def test_auto_is_near_the_best_and_the_next_shorter_is_not():
    for dtype in (torch.float32, torch.bfloat16):
        layout = replace(QWEN3_NEXT, state_dtype=dtype)
        chosen = traffic.best_merge_interval(layout)
        mean = [traffic.mean_step_bytes(replace(layout, merge_interval=m)) for m in range(1, 65)]
        assert mean[chosen - 1] <= 1.03 * min(mean)
        assert mean[chosen // 2 - 1] > 1.03 * min(mean)


def test_auto_does_not_depend_on_the_interval_it_is_asked_with():
    answers = {traffic.best_merge_interval(replace(QWEN3_NEXT, merge_interval=m)) for m in (1, 2, 16)}
    assert len(answers) == 1
