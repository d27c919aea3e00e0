"""Recording rules: what several alerts and panels ask of one pool, computed once.

Counters pass through `rate` or `increase` before they are summed, so that a replica that restarts is no step
down. A quotient is one of sums, and has no value where nothing was counted: an idle pool is in no state. A
mean takes the counter of the samples' sum: Ray's exporter guesses a histogram's own from its buckets.
"""

from dashboards import promql
from service.metrics.log import MERGE_INTERVAL, MERGES
from service.metrics.requests import GENERATED_TOKENS, REQUESTS, SLO_SEQUENCES, TPOT, TPOT_SUM, TTFT
from service.metrics.routing import DESIRED_REPLICAS, PREDICTED_TPOT, PREDICTED_TPOT_SUM, QUEUED, READY
from service.metrics.spec import MetricSpec
from service.metrics.steps import PREDICTED_STEP_SECONDS, STEP_SECONDS

Rules = dict[str, str]
"""Expressions by the names under which they are recorded: level, metric, operations."""

POOL = "pool, model"
REPLICA = "pool, model, replica"
"""For what is wrong as soon as it is wrong in one replica."""

BURN_WINDOWS = ("5m", "30m", "1h", "6h")
ERROR_WINDOWS = ("5m", "30m")
STEP_WINDOW = "5m"
TPOT_WINDOW = "30m"
LOG_WINDOW = "15m"

ALWAYS_THERE = (REQUESTS, READY)
"""Metrics that every ingress exports from its start, while models load too."""


def recorded(metric: str, operations: str) -> str:
    """Name of a rule's result for each pool and model."""
    return f"pool_model:{metric}:{operations}"


def over(spec: MetricSpec, window: str, part: str = "", function: str = "rate", by: str = POOL) -> str:
    """A counter's rate or increase, added up by pool. `part` is a histogram's suffix, or a selector."""
    return f"sum by ({by}) ({function}({spec.prom_name}{part}[{window}]))"


def missed(promise: str, window: str) -> str:
    """Name of the share of sequences that missed the SLO's TPOT or TTFT."""
    return recorded(f"deltalog_slo_{promise}_missed", f"ratio_rate{window}")


def sequences(window: str) -> str:
    """Name of the number of sequences that finished, in a pool with an SLO."""
    return recorded("deltalog_slo_sequences", f"increase{window}")


def errors(window: str) -> str:
    """Name of the share of requests that ended as an error, of those that a replica accepted."""
    return recorded("deltalog_requests_error", f"ratio_rate{window}")


def refusals(window: str) -> str:
    """Name of the share of requests that found no room."""
    return recorded("deltalog_requests_rejected", f"ratio_rate{window}")


QUEUE = recorded(QUEUED.name, "sum")
READY_REPLICAS = recorded(READY.name, "max")
WANTED_REPLICAS = recorded(DESIRED_REPLICAS.name, "max")
LONGEST_CYCLE = recorded(MERGE_INTERVAL.name, "max")
STEP_TO_WRITE_THROUGH = recorded("deltalog_step_to_write_through", f"ratio_rate{STEP_WINDOW}")
OBSERVED_TPOT = recorded(TPOT.name, f"mean{TPOT_WINDOW}")
EXPECTED_TPOT = recorded(PREDICTED_TPOT.name, f"mean{TPOT_WINDOW}")
PREDICTED_TO_OBSERVED = recorded("deltalog_predicted_to_observed_tpot", f"ratio{TPOT_WINDOW}")
TPOT_SAMPLES = recorded(TPOT.name, f"increase{TPOT_WINDOW}")
PREDICTIONS = recorded(PREDICTED_TPOT.name, f"increase{TPOT_WINDOW}")
CYCLE = f"pool_model_replica:{MERGE_INTERVAL.name}:max"
BEGUN = f"pool_model_replica:deltalog_begun_sequences:increase{LOG_WINDOW}"
TOKENS = f"pool_model_replica:deltalog_generated_tokens:increase{LOG_WINDOW}"
MERGED = f"pool_model_replica:{MERGES.name.removesuffix('_total')}:rate{LOG_WINDOW}"
ANSWERABLE = recorded("deltalog_requests_answerable", f"increase{ERROR_WINDOWS[-1]}")
ASKED = recorded("deltalog_requests_asked", f"increase{ERROR_WINDOWS[-1]}")


def slo() -> Rules:
    """Sequences against the SLO of their pool."""
    rules = {
        missed(promise, window): promql.over(
            over(SLO_SEQUENCES, window, f'{{{promise}="missed"}}'), over(SLO_SEQUENCES, window)
        )
        for promise in SLO_SEQUENCES.labels
        for window in BURN_WINDOWS
    }
    # The windows that say whether there was enough to judge by.
    return rules | {
        sequences(window): over(SLO_SEQUENCES, window, function="increase") for window in ("1h", "6h")
    }


def requests() -> Rules:
    """How requests end, how many wait, and what there is to serve them."""
    answerable, asked = '{outcome=~"ok|error"}', '{outcome!~"client_error|aborted"}'

    def share(outcome: str, of: str, window: str) -> str:
        return promql.over(over(REQUESTS, window, outcome), over(REQUESTS, window, of))

    return {
        **{errors(window): share('{outcome="error"}', answerable, window) for window in ERROR_WINDOWS},
        **{refusals(window): share('{outcome="rejected"}', asked, window) for window in ERROR_WINDOWS},
        ANSWERABLE: over(REQUESTS, ERROR_WINDOWS[-1], answerable, "increase"),
        ASKED: over(REQUESTS, ERROR_WINDOWS[-1], asked, "increase"),
        # Each ingress has a queue of its own, and sees all replicas.
        QUEUE: f"sum by ({POOL}) ({QUEUED.prom_name})",
        READY_REPLICAS: f"max by ({POOL}) ({READY.prom_name})",
        WANTED_REPLICAS: f"max by ({POOL}) ({DESIRED_REPLICAS.prom_name})",
    }


def steps() -> Rules:
    """What a step and a token take, and what was expected of them."""
    seconds = over(STEP_SECONDS, STEP_WINDOW)
    write_through = over(PREDICTED_STEP_SECONDS, STEP_WINDOW, '{curve="write_through"}')
    return {
        STEP_TO_WRITE_THROUGH: promql.over(seconds, write_through),
        OBSERVED_TPOT: promql.over(over(TPOT_SUM, TPOT_WINDOW), over(TPOT, TPOT_WINDOW, "_count")),
        EXPECTED_TPOT: promql.over(
            over(PREDICTED_TPOT_SUM, TPOT_WINDOW), over(PREDICTED_TPOT, TPOT_WINDOW, "_count")
        ),
        PREDICTED_TO_OBSERVED: promql.over(EXPECTED_TPOT, OBSERVED_TPOT),
        TPOT_SAMPLES: over(TPOT, TPOT_WINDOW, "_count", "increase"),
        PREDICTIONS: over(PREDICTED_TPOT, TPOT_WINDOW, "_count", "increase"),
        BEGUN: over(TTFT, LOG_WINDOW, "_count", "increase", REPLICA),
        TOKENS: over(GENERATED_TOKENS, LOG_WINDOW, function="increase", by=REPLICA),
        MERGED: over(MERGES, LOG_WINDOW, by=REPLICA),
        CYCLE: f"max by ({REPLICA}) ({MERGE_INTERVAL.prom_name})",
        LONGEST_CYCLE: f"max by ({POOL}) ({MERGE_INTERVAL.prom_name})",
    }
