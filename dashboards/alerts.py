"""The alerts: when each fires, what it means and what to do.

None that goes by rates fires on an idle pool: it has no value there. None fires on the first seconds of a
series or on one restarted replica: the windows, `hold_s` and the least number of samples see to that.
"""

from dataclasses import dataclass

from dashboards import recording as rec
from service.metrics.log import ASIDE

OBJECTIVE = 0.99
"""Share of sequences that keep the SLO."""
FAST_BURN, SLOW_BURN = 14.4, 6
"""How many times faster than allowed the budget goes: 2 % of a month's in an hour, 5 % in six hours."""
ENOUGH = 20
"""Sequences or requests that are evidence."""
ERROR_SHARE = 0.05
LONG_QUEUE = 10
REFUSED_SHARE = 0.2
DOWN = 0.5
"""Mean number of ready replicas below which there is none most of the time."""
MOSTLY_THERE = 0.8
"""Of the replicas that a pool wants at least, the mean share below which they come and go."""
DRAINED = 0.9
"""A queue below this share of its recent mean is on its way down."""
PREDICTION_ERROR = 0.2
SILENT_CYCLES = 100
"""Tokens without a merge, in cycles, that are no accident of short answers."""

MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. Texts are templates of Prometheus; `meaning` and `action` are its runbook."""

    name: str
    severity: str
    hold_s: float
    expr: str
    summary: str
    description: str
    meaning: str
    action: str


def _pool(text: str) -> str:
    return f"Pool {{{{ $labels.pool }}}} ({{{{ $labels.model }}}}): {text}"


PERCENT = "{{ $value | humanizePercentage }}"


def _burn(promise: str, long: str, short: str, factor: float, meaning: str, action: str) -> Alert:
    share = round(factor * (1 - OBJECTIVE), 6)
    fast = factor == FAST_BURN
    return Alert(
        f"DeltaLog{promise.capitalize()}BurnRate",
        "critical" if fast else "warning",
        (2 if fast else 15) * MINUTE,
        f"{rec.missed(promise, long)} > {share} and {rec.missed(promise, short)} > {share} and "
        f"{rec.sequences(long)} >= {ENOUGH}",
        _pool(f"{PERCENT} of its sequences miss the {promise.upper()} of the SLO"),
        _pool(
            f"{PERCENT} of the sequences that finished in the last {long} missed the {promise.upper()} of "
            f"the SLO, and more than {share:.1%} of those of the last {short}. The objective allows "
            f"{1 - OBJECTIVE:.0%}: at this pace the budget of 30 days lasts no longer than "
            f"{30 * 24 / factor:.0f} hours."
        ),
        meaning,
        action,
    )


def _burns() -> list[Alert]:
    tpot = (
        "Tokens come more slowly than promised, to so many sequences that it is no accident. Either steps "
        "take longer than the router believes, or it has to place more rows than the pool can carry.",
        "Look at the decode batch (Log board) and at predicted against observed TPOT (router board). If the "
        "prediction is right and the batch is large, add replicas or raise `max_replicas`. If steps are "
        "longer than predicted, look for another process on the accelerator, and whether the log merges.",
    )
    ttft = (
        "First tokens come later than promised: prompts wait for a step, or for one another. TTFT is "
        "measured in the engine, so time in the router's queue comes on top.",
        "Look at the queue, at the rate of prompt tokens and at mixed steps on the engine board. Add "
        "replicas, or move long prompts to a pool of their own. If only some replicas are late, look for "
        "one that restarts or stands still (step time by replica there).",
    )
    return [
        _burn(promise, long, short, factor, *runbook)
        for promise, runbook in (("tpot", tpot), ("ttft", ttft))
        for long, short, factor in (("1h", "5m", FAST_BURN), ("6h", "30m", SLOW_BURN))
    ]


def _service() -> list[Alert]:
    short, long = (rec.errors(window) for window in rec.ERROR_WINDOWS)
    rejected_short, rejected_long = (rec.refusals(window) for window in rec.ERROR_WINDOWS)
    absent = " or ".join(
        f'label_replace(absent({spec.prom_name}), "metric", "{spec.prom_name}", "", "")'
        for spec in rec.ALWAYS_THERE
    )
    return [
        Alert(
            "DeltaLogNoReadyReplica",
            "critical",
            5 * MINUTE,
            f"avg_over_time({rec.READY_REPLICAS}[10m]) < {DOWN}",
            _pool("no replica generates, or seldom one"),
            _pool(
                '{{ $value | printf "%.1f" }} replicas have generated on average in the last 10 minutes, as '
                "every ingress sees it. Requests spill, wait, or get 503."
            ),
            "No engine of the pool answers its probe, or one that starts falls again. A pool with one "
            "replica is like this for the time of one start, which this outlasts unless its model is large.",
            "Read the replicas' logs in Ray's session folder: an engine that does not start says why "
            "there. See on the engine board whether nodes with its accelerator are there and free. If the "
            "last change was a configuration, take it back and send SIGHUP.",
        ),
        Alert(
            "DeltaLogQueueGrowing",
            "warning",
            5 * MINUTE,
            f"min_over_time({rec.QUEUE}[5m]) >= {LONG_QUEUE} and avg_over_time({rec.QUEUE}[5m]) >= "
            f"{DRAINED} * avg_over_time({rec.QUEUE}[15m])",
            _pool("its queue does not drain"),
            _pool(
                "at least {{ $value }} requests have waited for room for five minutes, and hardly fewer than "
                "before."
            ),
            "More requests come than the pools of the model end. Those that wait too long get 429.",
            "Look at the replicas, desired and ready (router board), and at the decode batch (Log board). "
            "Where the pool is at `max_replicas`, raise it; where replicas are missing, see why they do not "
            "start. If one key brings the load, lower its limits in the keys file.",
        ),
        Alert(
            "DeltaLogRefusals",
            "warning",
            5 * MINUTE,
            f"{rejected_long} > {REFUSED_SHARE} and {rejected_short} > {REFUSED_SHARE} and "
            f"{rec.ASKED} >= {ENOUGH}",
            _pool(f"{PERCENT} of its requests find no room"),
            _pool(
                f"{PERCENT} of the requests of the last 30 minutes got 429 or 503 (bad ones and "
                f"those whose client left not counted), more than {REFUSED_SHARE:.0%} of the last 5 minutes."
            ),
            "The pools of the model are full, hold requests back for the SLO's sake, or have no replica.",
            "Look at the replicas, desired and ready, on the router board. If they are missing, see why they "
            "do not start. If all are there and full, raise `replicas` or `max_replicas`. If they have "
            "places free, the SLO is what refuses: compare predicted TPOT and TTFT with it.",
        ),
        Alert(
            "DeltaLogErrorRatio",
            "critical",
            2 * MINUTE,
            f"{long} > {ERROR_SHARE} and {short} > {ERROR_SHARE} and {rec.ANSWERABLE} >= {ENOUGH}",
            _pool(f"{PERCENT} of the requests that it takes end as an error"),
            _pool(
                f"{PERCENT} of the requests that were accepted in the last 30 minutes got a 5xx, or a stream "
                f"that broke; more than {ERROR_SHARE:.0%} did in the last 5 minutes too."
            ),
            "Requests fail by a fault of the service. Refusals for want of room (429, 503), bad requests "
            "and clients that leave do not count.",
            "Take a request from the ingress's log, where `outcome` is `error`, and read around its time in "
            "the log whose name ends with its `served_by`: an engine that fails on a request names its id. "
            "If all come from one replica, kill the `process` that the log names: another is "
            "started. If they began with a new version or configuration, take it back.",
        ),
        Alert(
            "DeltaLogScaleStuck",
            "warning",
            15 * MINUTE,
            f"(({rec.READY_REPLICAS} != {rec.WANTED_REPLICAS}) and changes({rec.READY_REPLICAS}[15m]) == 0) "
            f"or avg_over_time({rec.READY_REPLICAS}[15m]) < {MOSTLY_THERE} * "
            f"min_over_time({rec.WANTED_REPLICAS}[15m])",
            _pool("does not get the replicas that its load asks for"),
            _pool(
                '{{ $value | printf "%.0f" }} replicas generate, the load asks for another number, and for a '
                "quarter of an hour none has come or gone, or those that come do not stay."
            ),
            "The autoscaler has decided and nothing follows. Replicas cannot start, fall again once they "
            "have started, or cannot end because requests hold them.",
            "For too few: look for free nodes with the pool's accelerator and labels (engine board), and "
            "for a replica that fails at its start. For too many: look for streams that run for hours, and "
            "at `drain_timeout_s`. In a pool with `advisory` you are the one who scales: set `replicas`.",
        ),
        Alert(
            "DeltaLogMetricsAbsent",
            "critical",
            5 * MINUTE,
            absent,
            "Nothing exports {{ $labels.metric }}",
            "{{ $labels.metric }} has had no series in any pool for five minutes. While it is missing, "
            "other alerts are blind.",
            "Every deployment exports this metric from its start. Either the service is down, Prometheus "
            "does not reach it, or this version of the rules is not that of the service.",
            "Open the targets page of Prometheus. If the target is down, see whether the service runs and "
            "whether `metrics_port` can be reached. If it is up, ask it for the metric by hand and compare "
            "versions.",
        ),
    ]


def _log() -> list[Alert]:
    return [
        Alert(
            "DeltaLogNeverMerges",
            "critical",
            5 * MINUTE,
            # The first token of a sequence comes out of its prompt.
            f"({rec.CYCLE} > 1 and {rec.TOKENS} > {SILENT_CYCLES} * {rec.CYCLE} and "
            f"{rec.TOKENS} > ({rec.CYCLE} + 1) * {rec.BEGUN}) unless {rec.MERGED} > 0",
            _pool("its replica {{ $labels.replica }} decodes, and merges nothing"),
            _pool(
                f"the merge interval is {{{{ $value }}}} steps, its sequences are longer on average, and in "
                f"the last {rec.LOG_WINDOW} no layer has merged its log."
            ),
            "A log that is never merged loses what it drops: the answers of this replica are wrong, or its "
            "counters are. Either way it does not do what it was configured for.",
            "Take the pool out of service, or set `merge_interval: 1` and send SIGHUP, which decodes "
            "without a log. Then compare an answer at temperature 0 with that of a stock pool, and report "
            "it with the replica's log and `deltalog doctor MODEL`.",
        ),
        Alert(
            "DeltaLogStepSlowerThanWriteThrough",
            "warning",
            15 * MINUTE,
            f"{rec.STEP_TO_WRITE_THROUGH} > 1 and {rec.LONGEST_CYCLE} > 1",
            _pool("steps take longer than write-through's would"),
            _pool(
                f"steps take {PERCENT} of what the configured cost gives write-through for the same "
                "batches, for 15 minutes."
            ),
            "The log does not pay: the pool would be faster without it. Or the configured cost is of "
            "another machine.",
            "Compare the decode batch with break-even on the Log board; below it, the log cannot pay. "
            "Look for another process on the accelerator, and measure again with `deltalog bench serving`, "
            "whose last line is a `cost`. Correct it, or set `merge_interval: 1` and send SIGHUP.",
        ),
        Alert(
            "DeltaLogPredictionOff",
            "warning",
            15 * MINUTE,
            f"({rec.PREDICTED_TO_OBSERVED} > {1 + PREDICTION_ERROR} or {rec.PREDICTED_TO_OBSERVED} < "
            f"{1 - PREDICTION_ERROR}) and {rec.TPOT_SAMPLES} >= {ENOUGH} and {rec.PREDICTIONS} >= {ENOUGH}",
            _pool(f"TPOT is predicted at {PERCENT} of what is observed"),
            _pool(
                f"over {rec.TPOT_WINDOW} the mean TPOT that the router predicted is {PERCENT} of the "
                f"observed mean; more than {PREDICTION_ERROR:.0%} off."
            ),
            "The router places requests by a wrong idea of a step. Too low, and the SLO is missed; too "
            "high, and replicas stay empty while requests wait.",
            "Look whether the batch jumps after requests are placed, or whether one replica is slow (step "
            "time by replica, engine board). Steps are calibrated as they are taken, so a change of load may "
            "mend itself within the hour. If it stays, measure `cost` again with `deltalog bench serving`.",
        ),
        Alert(
            "DeltaLogDecodesAsStock",
            "warning",
            5 * MINUTE,
            f"sum by (pool, model) ({ASIDE.prom_name}) > 0",
            _pool("{{ $value }} replicas decode as stock vLLM"),
            _pool("{{ $value }} of its replicas stand aside although the pool has a merge interval."),
            "Answers are right, and nothing is gained: the plugin stands aside where a log is of no use or "
            "is not verified.",
            "The replica's log has one warning that says why: architecture, an engine argument, or a vLLM "
            "that lacks something. `deltalog doctor MODEL` says the same. Mend that, or remove "
            "`merge_interval` from the pool.",
        ),
    ]


ALERTS = [*_burns(), *_service(), *_log()]
