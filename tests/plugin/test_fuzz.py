"""Random engine schedules for a fixed time, each against stock; part of `make test-long`.

DELTALOG_FUZZ_SEED repeats a run whose seed was printed.
"""

import os
import random
import time

import pytest
from engines import TO_STOCK, Difference, Text, engine, random_texts, scheduled

BUDGET_S = 150

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("poisoned_pages"), pytest.mark.timeout(4 * BUDGET_S)]


def test_random_schedules_equal_stock(engine_model):
    seed = int(os.environ.get("DELTALOG_FUZZ_SEED", random.randrange(2**31)))
    print(f"seed {seed}")
    rng, deadline, rounds = random.Random(seed), time.monotonic() + BUDGET_S, 0
    while time.monotonic() < deadline:
        count = rng.randint(4, 9)
        texts = random_texts(
            [rng.choice([1, 2, rng.randint(1, 30), rng.randint(1, 120)]) for _ in range(count)],
            [rng.randint(1, 60) for _ in range(count)],
            seed=rng.randrange(2**31),
        )
        # Some share a prefix that fills a block, and the cache then serves it.
        (prefix,) = random_texts([350], tokens=1, seed=rng.randrange(2**31))
        texts = [Text(rng.choice([[], prefix.prompt]) + text.prompt, text.forced) for text in texts]
        arrivals = sorted(rng.randint(0, 40) for _ in range(count))
        leaving = rng.sample(range(count), k=count // 4)
        aborts = {index: arrivals[index] + rng.randint(1, 30) for index in leaving}
        options = {
            "max_num_seqs": rng.randint(1, 8),
            "max_num_batched_tokens": rng.choice([14, 64, 200]),
            "enable_prefix_caching": rng.random() < 0.5,
            "block_size": 32,
            "max_model_len": 1024,
            "num_gpu_blocks_override": rng.choice([20, 40, 400]),
        }
        interval = rng.choice([2, 3, 5, 8, 16])
        print(f"round {rounds}: interval {interval}, {options}, arrivals {arrivals}, aborts {aborts}")
        results = []
        for chosen in (None, interval):
            with engine(engine_model, chosen, **options) as llm:
                results.append(scheduled(llm, texts, arrivals, aborts))
        assert results[0].keys() == results[1].keys()
        assert Difference.of(*(list(result.values()) for result in results)).within(TO_STOCK)
        rounds += 1
    assert rounds >= 3
