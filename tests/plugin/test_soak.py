"""Hundreds of requests of random lengths in one engine, some aborted, some preempted; on a GPU thousands."""

import random

import engines
import pytest
import torch
from engines import TO_STOCK, Difference, engine, metric, random_texts, scheduled, teacher_forced
from vllm.platforms import current_platform

from deltalog_kernels.traffic import append, merge, write_through

REQUESTS, ROWS, A_STEP = (120, 8, 1) if current_platform.is_cpu() else (2000, 256, 8)
OPTIONS = {
    "max_num_seqs": ROWS,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "block_size": 32,
    "enable_prefix_caching": False,
    # Rows that are long at the same time do not fit.
    "num_gpu_blocks_override": 4 * ROWS + 1,
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.usefixtures("poisoned_pages")]


def test_a_soak_leaves_nothing_behind(engine_model, monkeypatch):
    rng = random.Random(1)
    sample = random_texts([3, 40, 150, 201], tokens=60, seed=2)
    with engine(engine_model, None, **OPTIONS) as llm:
        stock = teacher_forced(llm, sample)

    texts = random_texts(
        [rng.randint(1, 340) for _ in range(REQUESTS)], [rng.randint(1, 150) for _ in range(REQUESTS)], seed=3
    )
    arrivals = sorted(rng.randint(0, 8 * REQUESTS // A_STEP) for _ in range(REQUESTS))
    aborts = {
        index: arrivals[index] + rng.randint(1, 60) for index in rng.sample(range(REQUESTS), REQUESTS // 10)
    }
    with engine(engine_model, "auto", **OPTIONS) as llm:
        assert Difference.of(teacher_forced(llm, sample), stock).within(TO_STOCK)

        monkeypatch.setattr(engines, "kept", slice(0, 4))  # a NaN in a row is in each of its values
        outputs = scheduled(llm, texts, arrivals, aborts)
        assert len(outputs) == REQUESTS - len(aborts)
        assert all(len(outputs[index]) >= len(texts[index].forced) for index in outputs)
        assert not torch.cat([values.flatten() for values in outputs.values()]).isnan().any()
        assert metric(llm, "vllm:num_preemptions") > 0
        monkeypatch.setattr(engines, "kept", slice(None))

        assert Difference.of(teacher_forced(llm, sample), stock).within(TO_STOCK)
        assert llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.usage == 0
        [counters] = llm.collective_rpc("deltalog_counters")
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        layers = [layer for layer in context.values() if hasattr(layer, "layout")]
    _agrees_with_traffic(counters, layers[0].layout)
    decoded = sum(len(texts[index].forced) - 1 for index in outputs)
    assert (
        counters["write_through_bytes"]["write"]
        >= decoded * len(layers) * write_through(layers[0].layout).write_bytes
    )


def _agrees_with_traffic(counters: dict, layout) -> None:
    """Of all decoded tokens and layers each has appended or merged, an M-th merged."""
    steps, rest = divmod(counters["write_through_bytes"]["write"], write_through(layout).write_bytes)
    merges, last = counters["merges"], layout.merge_interval - 1
    assert rest == 0
    assert counters["state_bytes"]["write"]["merge"] == merges * merge(layout, last).write_bytes
    assert counters["state_bytes"]["read"]["merge"] == merges * merge(layout, last).read_bytes
    assert counters["state_bytes"]["write"]["append"] == (steps - merges) * append(layout, 0).write_bytes
    assert merges / steps == pytest.approx(1 / layout.merge_interval, rel=0.1)
