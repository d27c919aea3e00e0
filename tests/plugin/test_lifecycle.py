"""What happens to a slot in the life of a request, each against stock vLLM on the same schedule.

Pages are poisoned with NaN throughout, so that whatever is read before it is written shows.
"""

from pathlib import Path

import pytest
import torch
from engines import TO_STOCK, Difference, Text, engine, metric, random_texts, scheduled, teacher_forced

CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48, "enable_prefix_caching": False}

pytestmark = pytest.mark.usefixtures("poisoned_pages")
each_interval = pytest.mark.parametrize("interval", [2, "auto"])


def draw(low: int, high: int, count: int, seed: int) -> list[int]:
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def against_stock(model: Path, texts: list[Text], interval: int | str, **options) -> Difference:
    results = []
    for chosen in (None, interval):
        with engine(model, chosen, **options) as llm:
            results.append(teacher_forced(llm, texts))
    return Difference.of(*results)


@each_interval
def test_arrivals_and_finishes_at_random_steps(engine_model, interval):
    texts = random_texts(draw(1, 120, 14, seed=1), draw(5, 90, 14, seed=2), seed=3)
    arrivals = sorted(draw(0, 80, 14, seed=4))
    results = []
    for chosen in (None, interval):
        with engine(engine_model, chosen, max_num_seqs=6, **CHUNKED) as llm:
            results.append(list(scheduled(llm, texts, arrivals).values()))
    assert Difference.of(*results).within(TO_STOCK)


@each_interval
def test_aborts_in_mid_cycle_and_the_slots_after_them(engine_model, interval):
    """Every third request leaves after 1 to 12 steps; two slots serve all."""
    texts = random_texts(draw(1, 40, 12, seed=5), draw(10, 40, 12, seed=6), seed=7)
    arrivals = [4 * index for index in range(12)]
    leaves = draw(1, 13, 4, seed=8)
    aborts = {index: arrivals[index] + leaves[index // 3] for index in range(0, 12, 3)}
    results = []
    for chosen in (None, interval):
        with engine(engine_model, chosen, max_num_seqs=2, **CHUNKED) as llm:
            results.append(list(scheduled(llm, texts, arrivals, aborts).values()))
    assert len(results[0]) == 8
    assert Difference.of(*results).within(TO_STOCK)


@each_interval
def test_chunks_with_every_tail_length(engine_model, interval):
    """Chunks of 16: the last one has 1 to 8 tokens, and ends at every position mod 8."""
    texts = random_texts(list(range(33, 41)), tokens=24, seed=9)
    options = CHUNKED | {"max_num_batched_tokens": 16, "max_num_seqs": 1}
    assert against_stock(engine_model, texts, interval, **options).within(TO_STOCK)


@each_interval
def test_prompts_of_one_token(engine_model, interval):
    texts = random_texts([1, 1, 1, 2], tokens=40, seed=10)
    assert against_stock(engine_model, texts, interval, **CHUNKED).within(TO_STOCK)


@each_interval
def test_preemption_by_a_small_cache(engine_model, interval):
    """On a CPU four requests fit with four blocks each and outgrow the cache when each needs a fifth: some
    are thrown out and computed again. On a GPU, where blocks have 160 to 384 tokens, the same happens."""
    texts = random_texts([230, 240, 250, 260], tokens=180, seed=11)
    small = {"num_gpu_blocks_override": 18, "block_size": 32, "max_model_len": 512}
    results = []
    for chosen in (None, interval):
        with engine(engine_model, chosen, **CHUNKED | small) as llm:
            results.append(teacher_forced(llm, texts))
            assert metric(llm, "vllm:num_preemptions") > 0
    assert Difference.of(*results).within(TO_STOCK)


@each_interval
def test_several_samples_of_one_prompt(engine_model, interval):
    """n = 3: the samples share the prompt's cached block, and each goes on with a state of its own."""
    texts = random_texts([400, 7], tokens=30, seed=12)
    results = []
    for chosen in (None, interval):
        # The budget lets one prompt in at a time: the second sample finds the first one's block.
        options = {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": 400}
        with engine(engine_model, chosen, **options) as llm:
            results.append(teacher_forced(llm, texts, samples=3))
            assert metric(llm, "vllm:prefix_cache_hits") > 0
    assert Difference.of(*results).within(TO_STOCK)


@each_interval
def test_hundreds_of_tokens_over_many_cycles(engine_model, interval):
    texts = random_texts([5, 30], tokens=400, seed=13)
    assert against_stock(engine_model, texts, interval, **CHUNKED).within(TO_STOCK)
