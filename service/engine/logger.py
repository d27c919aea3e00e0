"""What vLLM's engine says of each step, for the metrics and for the cost of a step."""

import time
from typing import Any, NamedTuple

from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats

from service.metrics.requests import LatencyMetrics
from service.metrics.scheduler import SchedulerMetrics
from service.metrics.steps import StepMetrics
from service.pools import PoolConfig
from service.routing.calibrate import Calibration
from service.routing.policy import PREFILL_WINDOW


class _Metrics(NamedTuple):
    """What is told of an engine once it serves."""

    latency: LatencyMetrics
    steps: StepMetrics
    scheduler: SchedulerMetrics


class EngineLogger(StatLoggerBase):
    """Feeds the engine's own timings to the metrics, for streamed and plain requests alike."""

    def __init__(self, pool: PoolConfig) -> None:
        self._metrics: _Metrics | None = None
        self._pool = pool
        self.prefill_per_step = 0.0
        self.calibration = Calibration(pool.step_model)
        self._stepped_at_s: float | None = None

    def start_metrics(self) -> None:
        """From now on what the engine does is somebody's."""
        self._metrics = _Metrics(
            LatencyMetrics(self._pool), StepMetrics(self._pool), SchedulerMetrics(self._pool)
        )

    def publish(self, running: int) -> None:
        """Say what is not said step by step."""
        assert self._metrics is not None
        self._metrics.latency.publish(running)
        self._metrics.steps.publish(self.calibration.learned)
        self._metrics.scheduler.publish()

    def log_engine_initialized(self) -> None:
        pass

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if iteration_stats is None:
            # No step: the last requests were aborted, and vLLM says that none is left.
            iteration_stats = IterationStats()
            self._stepped_at_s = self._stepped_at_s if _busy(scheduler_stats) else None
        else:
            self._step(scheduler_stats, iteration_stats)
        if self._metrics is None:
            return
        self._metrics.scheduler.step(scheduler_stats, iteration_stats)
        latency = self._metrics.latency
        for seconds in iteration_stats.time_to_first_tokens_iter:
            latency.ttft.observe(seconds)
        for seconds in iteration_stats.inter_token_latencies_iter:
            latency.itl.observe(seconds)
        for request in iteration_stats.finished_requests:
            # vLLM's decode time is from the first token to the last.
            ttft_s = request.e2e_latency - request.decode_time
            latency.finished(ttft_s, request.e2e_latency, request.num_generation_tokens)
        if iteration_stats.num_generation_tokens:
            latency.generated_tokens.inc(iteration_stats.num_generation_tokens)

    def _step(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """A step and the time since the one before, where the engine had work all along."""
        now_s, last_s = time.monotonic(), self._stepped_at_s
        self._stepped_at_s = now_s if _busy(scheduler_stats) else None
        prefill = iteration_stats.prompt_token_stats.computed
        self.prefill_per_step += (prefill - self.prefill_per_step) / PREFILL_WINDOW
        if last_s is not None and self._metrics is not None:
            rows, seconds = iteration_stats.num_generation_tokens, now_s - last_s
            self.calibration.step(rows, prefill, 1000 * seconds)
            self._metrics.steps.step(rows, prefill, seconds)


def _busy(scheduler_stats: Any) -> bool:
    """Whether a step follows at once."""
    return scheduler_stats is None or scheduler_stats.num_running_reqs + scheduler_stats.num_waiting_reqs > 0
