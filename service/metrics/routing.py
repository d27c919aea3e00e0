"""What the router decides, and what it sees of a pool."""

from service.metrics.spec import SECONDS_BUCKETS, MetricSpec, add
from service.pools import PoolConfig
from service.routing.policy import Reason

PLACED = {
    Reason.PACK: "pack",
    Reason.OPEN: "open",
    Reason.BALANCE: "balance",
    Reason.AFFINITY: "affinity",
    Reason.EMPTY: "empty",
    Reason.NO_VIEW: "least_loaded",
}
WAITED, REFUSED = "wait", "refused"

SPILLED = MetricSpec(
    "deltalog_spilled_requests_total",
    "counter",
    "requests",
    "Requests that this pool served because the pools before it had no room.",
)
UNROUTED = MetricSpec(
    "deltalog_unrouted_requests_total",
    "counter",
    "requests",
    "Requests that went to the least loaded replica, because the router had no view of the pool.",
)
PREDICTED_TPOT = MetricSpec(
    "deltalog_predicted_tpot_seconds",
    "histogram",
    "seconds",
    "TPOT that the router predicted for a request that generates, where it sent it.",
    buckets=SECONDS_BUCKETS,
)
PREDICTED_TPOT_SUM = MetricSpec(
    "deltalog_predicted_tpot_sum_seconds_total",
    "counter",
    "seconds",
    "Sum of the samples of deltalog_predicted_tpot_seconds; by their count, the mean.",
    from_zero=False,
)
DECISIONS = MetricSpec(
    "deltalog_router_decisions_total",
    "counter",
    "decisions",
    "Requests by why they went to their replica (pack, open, balance, affinity; empty: none keeps the SLO, "
    "and waiting would not help; least_loaded: without a view of the pool) or nowhere (refused). Those that "
    "had to wait for room first count once more, as wait.",
    labels={"reason": (*PLACED.values(), WAITED, REFUSED)},
)
DECISION_SECONDS = MetricSpec(
    "deltalog_router_decision_seconds",
    "histogram",
    "seconds",
    "Time that the policy takes to decide where a request goes, one sample a try.",
    buckets=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2),
)
QUEUED = MetricSpec(
    "deltalog_queued_requests",
    "gauge",
    "requests",
    "Requests that wait in one ingress for room in the pools of their model; given for the first of these.",
)
READY = MetricSpec(
    "deltalog_ready_replicas", "gauge", "replicas", "Replicas that generate, as one ingress sees them."
)
PACKED = MetricSpec(
    "deltalog_packed_replicas", "gauge", "replicas", "Replicas that hold requests, as one ingress sees them."
)
DESIRED_REPLICAS = MetricSpec(
    "deltalog_desired_replicas", "gauge", "replicas", "Replicas that the load asks for, where a pool scales."
)


class RoutingMetrics:
    """What one ingress says of one pool."""

    def __init__(self, pool: PoolConfig) -> None:
        self.spilled = SPILLED.bind(pool)
        self._predicted_tpot = PREDICTED_TPOT.bind(pool)
        self._predicted_tpot_sum = PREDICTED_TPOT_SUM.bind(pool)
        self.decision_seconds = DECISION_SECONDS.bind(pool)
        self.queued = QUEUED.bind(pool)
        self._decisions = DECISIONS.bind(pool)
        self._ready = READY.bind(pool)
        self._packed = PACKED.bind(pool)

    def predicted(self, tpot_s: float) -> None:
        """TPOT that a request is sent to its replica with."""
        self._predicted_tpot.observe(tpot_s)
        add(self._predicted_tpot_sum, tpot_s)

    def decided(self, reason: str) -> None:
        """One of the values of DECISIONS."""
        add(self._decisions, 1, reason=reason)

    def replicas(self, ready: int, packed: int) -> None:
        """How many generate, and how many hold requests."""
        self._ready.set(ready)
        self._packed.set(packed)
