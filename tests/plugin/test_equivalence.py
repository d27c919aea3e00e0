"""Deferred decoding against vLLM's own, in the real engine, every position of every text compared.

engines.py says what bounds the difference. Two merge intervals differ by less (0.15 at most, 0.011 on
average), because only the rounding of bf16 activations separates them. The tests with a fault in them show
that a real one is far outside.
"""

from pathlib import Path

import pytest
import seeded
import torch
from engines import TO_STOCK, Difference, Text, engine, metric, random_texts, teacher_forced
from vllm.platforms import current_platform

PROMPT_LENGTHS = [3, 17, 40, 64, 65, 100, 150, 201]
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "enable_prefix_caching": False}


# On a GPU two intervals differ as either does from stock: by 0.24 at most and 0.030 on average (measured on
# an H200 with the demo model; the Kimi-Linear of these tests by 0.13 and 0.009).
BETWEEN_INTERVALS = Difference(largest=0.3, mean=0.025) if current_platform.is_cpu() else TO_STOCK


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return random_texts(PROMPT_LENGTHS, tokens=96, seed=1)


@pytest.fixture(scope="module")
def stock(engine_model: Path, texts: list[Text]) -> list[torch.Tensor]:
    with engine(engine_model, None, **CHUNKED) as llm:
        return teacher_forced(llm, texts)


def decode(model: Path, texts: list[Text], merge_interval: int | None, **options) -> list[torch.Tensor]:
    with engine(model, merge_interval, **options) as llm:
        return teacher_forced(llm, texts)


def test_an_interval_of_one_is_stock_bit_for_bit(engine_model, texts, stock):
    assert Difference.of(decode(engine_model, texts, 1, **CHUNKED), stock) == Difference(0.0, 0.0)


def test_deferred_equals_stock(engine_model, texts, stock, poisoned_pages):
    eight = decode(engine_model, texts, 8, **CHUNKED)
    assert len(poisoned_pages) == 3, "one bind for each recurrent layer"
    assert Difference.of(eight, stock).within(TO_STOCK)
    three = decode(engine_model, texts, 3, **CHUNKED)
    assert Difference.of(three, stock).within(TO_STOCK)
    assert Difference.of(three, eight).within(BETWEEN_INTERVALS)


def test_a_live_log_is_folded_before_a_chunk(engine_model, poisoned_pages, monkeypatch):
    """While the first prompt takes 13 of 14 tokens a step, seven times, the second gets one: those run as
    decodes and leave a live log, which the chunk of its last five tokens must fold."""
    texts = random_texts([91, 12], tokens=32, seed=5)
    chunks = CHUNKED | {"max_num_batched_tokens": 14, "long_prefill_token_threshold": 13}
    stock = decode(engine_model, texts, None, **chunks)
    assert Difference.of(decode(engine_model, texts, 8, **chunks), stock).within(TO_STOCK)
    # The control: without the fold six of twelve tokens are lost, and the comparison notices.
    seeded.without_fold(monkeypatch)
    assert not Difference.of(decode(engine_model, texts, 8, **chunks), stock).within(TO_STOCK)


def test_a_missing_fill_shows(engine_model, texts, stock, poisoned_pages, monkeypatch):
    """The control for the poison: entries that a prefill does not make neutral are garbage."""
    seeded.without_fill(monkeypatch)
    assert not Difference.of(decode(engine_model, texts, 8, **CHUNKED), stock).within(TO_STOCK)


def test_a_missing_merge_shows(engine_model, texts, stock, monkeypatch):
    seeded.without_merge(monkeypatch)
    assert not Difference.of(decode(engine_model, texts, 8, **CHUNKED), stock).within(TO_STOCK)


def test_prefix_cache_hits_copy_the_log(engine_model, poisoned_pages):
    """M = 7 does not divide the block, so its page moves on with live entries: those of a decode here, which
    later prompts hit in the cache and must fold."""
    caching = {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": 512}
    results, hits = {}, {}
    for interval in (7, None):
        with engine(engine_model, interval, **caching) as llm:
            if interval:
                block = llm.llm_engine.vllm_config.cache_config.block_size
                [first] = random_texts([block - 20], tokens=60, seed=2)
                suffixes = random_texts([5, 6, 7, 40], tokens=60, seed=3)
                texts = [Text(first.prompt + first.forced + text.prompt, text.forced) for text in suffixes]
            results[interval] = teacher_forced(llm, [first]) + teacher_forced(llm, texts)
            hits[interval] = metric(llm, "vllm:prefix_cache_hits")
    assert block % 7
    assert hits[7] >= block
    assert Difference.of(results[7], results[None]).within(TO_STOCK)


def test_a_reused_slot_gives_the_same_text(engine_model, texts, stock, poisoned_pages):
    """Two requests at a time: six of the eight texts run in slots that others left behind."""
    assert Difference.of(decode(engine_model, texts, 8, max_num_seqs=2, **CHUNKED), stock).within(TO_STOCK)
