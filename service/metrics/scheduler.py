"""What vLLM's scheduler has: prompts, memory, and who waits for it. A simulated engine has none of these."""

from typing import Any

from service.metrics.spec import MetricSpec, add
from service.pools import PoolConfig

SOURCES = ("computed", "cached")

PROMPT_TOKENS = MetricSpec(
    "deltalog_prompt_tokens_total",
    "counter",
    "tokens",
    "Prompt tokens of sequences that began, by whether prefill computed them or the prefix cache had them.",
    labels={"source": SOURCES},
)
CACHE_USAGE = MetricSpec(
    "deltalog_cache_usage_ratio",
    "gauge",
    "ratio",
    "Share of vLLM's blocks, of state and of key-value cache, that are taken.",
)
WAITING = MetricSpec(
    "deltalog_waiting_sequences",
    "gauge",
    "sequences",
    "Sequences in the engine that have no row or no memory yet.",
)
PREEMPTIONS = MetricSpec(
    "deltalog_preemptions_total",
    "counter",
    "preemptions",
    "Sequences that lost their memory to others and begin again with their prompt.",
)


class SchedulerMetrics:
    """Keeps what vLLM says with each step, and tells Ray once a second."""

    def __init__(self, pool: PoolConfig) -> None:
        self._prompt_tokens = PROMPT_TOKENS.bind(pool)
        self._cache_usage = CACHE_USAGE.bind(pool)
        self._waiting = WAITING.bind(pool)
        self._preemptions = PREEMPTIONS.bind(pool)
        self._usage, self._waits = 0.0, 0
        self._preempted = 0
        self._tokens = dict.fromkeys(SOURCES, 0)

    def step(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """vLLM's statistics of one step. There are none of the scheduler where only requests ended."""
        if scheduler_stats is not None:
            self._usage = scheduler_stats.kv_cache_usage
            self._waits = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self._preempted += iteration_stats.num_preempted_reqs
        prompts = iteration_stats.prompt_token_stats
        self._tokens["computed"] += prompts.computed
        self._tokens["cached"] += prompts.cached_tokens

    def publish(self) -> None:
        """Tell Ray what was added, and the gauges again, which Ray forgets otherwise."""
        self._cache_usage.set(self._usage)
        self._waiting.set(self._waits)
        add(self._preemptions, self._preempted)
        for source, tokens in self._tokens.items():
            add(self._prompt_tokens, tokens, source=source)
        self._preempted, self._tokens = 0, dict.fromkeys(SOURCES, 0)
