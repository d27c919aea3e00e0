"""What requests and the sequences that they generate go through."""

from service.metrics.spec import SECONDS_BUCKETS, MetricSpec, add
from service.pools import PoolConfig

OUTCOMES = ("ok", "client_error", "rejected", "aborted", "error")
VERDICTS = ("met", "missed")

REQUESTS = MetricSpec(
    "deltalog_requests_total",
    "counter",
    "requests",
    "Requests for a model of the pool by how they ended: ok, client_error (4xx), rejected (no replica "
    "accepted it: 429, 503), aborted (the client left), error (any other 5xx, or a stream that broke).",
    labels={"outcome": OUTCOMES},
)
TTFT = MetricSpec(
    "deltalog_request_ttft_seconds",
    "histogram",
    "seconds",
    "Time to first token: the request's arrival in the replica's engine to its first token there, without "
    "the ingress hop, one sample per generated sequence (n = 3 gives three).",
    buckets=SECONDS_BUCKETS,
)
ITL = MetricSpec(
    "deltalog_request_itl_seconds",
    "histogram",
    "seconds",
    "Inter-token latency: gap in the engine between consecutive outputs of a sequence, one sample per output "
    "after the first; an output may hold several tokens. A simulated engine gives none.",
    buckets=SECONDS_BUCKETS,
)
TPOT = MetricSpec(
    "deltalog_request_tpot_seconds",
    "histogram",
    "seconds",
    "Time per output token: (last token - first token) / (output tokens - 1) in the engine, one sample per "
    "generated sequence that finished with two tokens or more.",
    buckets=SECONDS_BUCKETS,
)
TPOT_SUM = MetricSpec(
    "deltalog_tpot_sum_seconds_total",
    "counter",
    "seconds",
    "Sum of the samples of deltalog_request_tpot_seconds; by their count, the mean.",
    from_zero=False,
)
"""Ray's exporter rebuilds a histogram's own sum from the middles of its buckets."""
DURATION = MetricSpec(
    "deltalog_request_duration_seconds",
    "histogram",
    "seconds",
    "End to end: a sequence's arrival in the engine to its last token, one sample for each that finished.",
    buckets=SECONDS_BUCKETS,
)
SLO_SEQUENCES = MetricSpec(
    "deltalog_slo_sequences_total",
    "counter",
    "sequences",
    "Sequences that finished, by whether they met the TPOT and the TTFT of the pool's SLO; none without one. "
    "A sequence of one token meets any TPOT.",
    labels={"tpot": VERDICTS, "ttft": VERDICTS},
)
SLO_TPOT = MetricSpec("deltalog_slo_tpot_seconds", "gauge", "seconds", "TPOT of the pool's SLO.")
SLO_TTFT = MetricSpec("deltalog_slo_ttft_seconds", "gauge", "seconds", "TTFT of the pool's SLO.")
GENERATED_TOKENS = MetricSpec(
    "deltalog_generated_tokens_total", "counter", "tokens", "Tokens that the engine generated."
)
RUNNING_REQUESTS = MetricSpec(
    "deltalog_running_requests", "gauge", "requests", "Requests that the engine holds: waiting or generating."
)


class LatencyMetrics:
    """What the engine reports of its requests, all times in seconds."""

    def __init__(self, pool: PoolConfig) -> None:
        self.ttft = TTFT.bind(pool)
        self.itl = ITL.bind(pool)
        self._tpot = TPOT.bind(pool)
        self._tpot_sum = TPOT_SUM.bind(pool)
        self._duration = DURATION.bind(pool)
        self.generated_tokens = GENERATED_TOKENS.bind(pool)
        self._running_requests = RUNNING_REQUESTS.bind(pool)
        self._slo = pool.slo
        if self._slo is not None:
            self._sequences = SLO_SEQUENCES.bind(pool)
            self._promised = SLO_TPOT.bind(pool), SLO_TTFT.bind(pool)

    def publish(self, running: int) -> None:
        """Say that the engine holds ``running`` requests. (Ray forgets a gauge that is not set again.)"""
        self._running_requests.set(running)
        if self._slo is not None:
            tpot, ttft = self._promised
            tpot.set(self._slo.tpot_ms / 1000)
            ttft.set(self._slo.ttft_ms / 1000)

    def finished(self, ttft_s: float, duration_s: float, tokens: int) -> None:
        """A sequence of ``tokens`` tokens ended, ``duration_s`` after it arrived."""
        tpot_s = (duration_s - ttft_s) / (tokens - 1) if tokens > 1 else 0.0
        if tokens > 1:
            self._tpot.observe(tpot_s)
            add(self._tpot_sum, tpot_s)
        self._duration.observe(duration_s)
        if self._slo is not None:
            missed = {"tpot": 1000 * tpot_s > self._slo.tpot_ms, "ttft": 1000 * ttft_s > self._slo.ttft_ms}
            add(self._sequences, 1, **{name: VERDICTS[late] for name, late in missed.items()})
