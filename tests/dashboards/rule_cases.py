"""What each alert must say of series that are made up: one sample a minute, for promtool."""

from dataclasses import dataclass, field

from service.metrics.log import ASIDE, MERGE_INTERVAL, MERGES
from service.metrics.replicas import BUILD_INFO
from service.metrics.requests import GENERATED_TOKENS, REQUESTS, SLO_SEQUENCES, TPOT, TPOT_SUM, TTFT
from service.metrics.routing import DESIRED_REPLICAS, PREDICTED_TPOT, PREDICTED_TPOT_SUM, QUEUED, READY
from service.metrics.spec import MetricSpec
from service.metrics.steps import PREDICTED_STEP_SECONDS, STEP_SECONDS

POOL = {"pool": "chat", "model": "demo"}
REPLICA = POOL | {"replica": "a"}
Series = dict[str, str]


@dataclass(frozen=True)
class Fires:
    """`shown` is the alert's value as its texts give it."""

    severity: str
    shown: str
    labels: dict[str, str] = field(default_factory=lambda: POOL)


@dataclass(frozen=True)
class Case:
    """`name` says what happens; `expected` is what fires `at` that time, nothing if empty."""

    name: str
    at: str
    series: Series
    expected: tuple[Fires, ...] = ()


def one(spec: MetricSpec, values: str, part: str = "", replica: str = "a", **labels: str) -> Series:
    """One series as a replica or an ingress exports it, in promtool's notation."""
    tags = {**POOL, "replica": replica, "WorkerId": f"worker-{replica}", **labels}
    selector = ",".join(f'{name}="{value}"' for name, value in tags.items())
    return {f"{spec.prom_name}{part}{{{selector}}}": values}


def verdicts(promise: str, met: str, missed: str) -> Series:
    """Finished sequences, of which all keep the other promise."""
    other = {"tpot": "ttft", "ttft": "tpot"}[promise]
    return one(SLO_SEQUENCES, met, **{promise: "met", other: "met"}) | one(
        SLO_SEQUENCES, missed, **{promise: "missed", other: "met"}
    )


def burn(promise: str) -> list[Case]:
    both = (Fires("critical", "20%"), Fires("warning", "20%"))
    return [
        Case("a fifth misses", "60m", verdicts(promise, "0+16x60", "0+4x60"), both),
        Case(
            "a fifth misses, both replicas",
            "60m",
            verdicts(promise, "0+16x60", "0+0x60")
            | one(SLO_SEQUENCES, "0+4x60", replica="b", **{"tpot": "missed", "ttft": "missed"}),
            both,
        ),
        Case(
            "so it does through a restart", "60m", verdicts(promise, "0+16x29 0+16x30", "0+4x29 0+4x30"), both
        ),
        Case(
            "8 % miss: no need to get up",
            "60m",
            verdicts(promise, "0+92x60", "0+8x60"),
            (Fires("warning", "8%"),),
        ),
        Case("1 % misses, as allowed", "60m", verdicts(promise, "0+99x60", "0+1x60")),
        Case(
            "the other promise is missed",
            "60m",
            verdicts({"tpot": "ttft", "ttft": "tpot"}[promise], "0+16x60", "0+4x60"),
        ),
        Case("a few sequences, all late", "39m", verdicts(promise, "0+0x60", "0+0x30 0+1x8 8+0x30")),
        Case("nothing finishes", "60m", verdicts(promise, "7+0x60", "3+0x60")),
        Case(
            "it is over",
            "60m",
            verdicts(promise, "0+20x60", "0+0x34 40+40x9 400+0x15"),
            (Fires("warning", "25%"),),
        ),
        Case("a replica restarts", "60m", verdicts(promise, "5000+199x30 0+199x30", "5000+1x30 0+1x30")),
    ]


def outcomes(error: str, **others: str) -> Series:
    series = one(REQUESTS, error, outcome="error")
    for outcome, values in others.items():
        series |= one(REQUESTS, values, outcome=outcome)
    return series


def decoding(interval: str, merges: str, tokens: str = "0+600x30", firsts: str = "0+6x30") -> Series:
    return (
        one(MERGE_INTERVAL, interval)
        | one(MERGES, merges)
        | one(GENERATED_TOKENS, tokens)
        | one(TTFT, firsts, "_count")
    )


def stepping(seconds: str, write_through: str, interval: str = "8x60") -> Series:
    return (
        one(STEP_SECONDS, seconds, mode="decode", batch="32")
        | one(PREDICTED_STEP_SECONDS, write_through, curve="write_through")
        | one(PREDICTED_STEP_SECONDS, "0+1x60", curve="configured")
        | one(MERGE_INTERVAL, interval)
    )


def predicting(predicted: str, observed: str, count: str = "0+10x60") -> Series:
    return (
        one(PREDICTED_TPOT_SUM, predicted)
        | one(PREDICTED_TPOT, count, "_count")
        | one(TPOT_SUM, observed, replica="b")
        | one(TPOT, count, "_count", replica="b")
    )


def everything_but(*missing: MetricSpec) -> Series:
    there = [
        (REQUESTS, {"outcome": "ok"}),
        (READY, {}),
        (GENERATED_TOKENS, {}),
        (BUILD_INFO, {"version": "1", "vllm": "2"}),
    ]
    series: Series = {}
    for spec, labels in there:
        series |= {} if spec in missing else one(spec, "1x30", **labels)
    return series


def scaling(desired: str, ready: str) -> Series:
    return one(DESIRED_REPLICAS, desired, replica="controller") | one(READY, ready)


CASES: dict[str, list[Case]] = {
    "DeltaLogTpotBurnRate": burn("tpot"),
    "DeltaLogTtftBurnRate": burn("ttft"),
    "DeltaLogNoReadyReplica": [
        Case("none", "18m", one(READY, "1x3 0x20"), (Fires("critical", "0.0"),)),
        Case(
            "one that falls again and again", "40m", one(READY, "0x8 1x0 " * 5), (Fires("critical", "0.1"),)
        ),
        Case("one that is away now and then", "40m", one(READY, "1x4 0x2 " * 8)),
        Case("none from the start", "18m", one(READY, "0x20"), (Fires("critical", "0.0"),)),
        Case("the only one restarts", "10m", one(READY, "1x3 0x8 1x20")),
        Case(
            "one ingress sees none, another one", "18m", one(READY, "0x20") | one(READY, "1x20", replica="b")
        ),
        Case("two", "10m", one(READY, "2x20")),
    ],
    "DeltaLogQueueGrowing": [
        Case(
            "grows",
            "30m",
            one(QUEUED, "0+2x30") | one(QUEUED, "0+1x30", replica="b"),
            (Fires("warning", "75"),),
        ),
        Case("stays full", "40m", one(QUEUED, "64x40"), (Fires("warning", "64"),)),
        Case("drains", "25m", one(QUEUED, "200x10 180-8x20")),
        Case("a burst", "20m", one(QUEUED, "0x12 90x3 0x30")),
        Case("a few wait", "30m", one(QUEUED, "8x40")),
        Case("a dozen wait", "30m", one(QUEUED, "12x40"), (Fires("warning", "12"),)),
        Case("none waits", "30m", one(QUEUED, "0x40")),
    ],
    "DeltaLogRefusals": [
        Case(
            "nine of ten", "30m", outcomes("0x40", ok="0+1x40", rejected="0+9x40"), (Fires("warning", "90%"),)
        ),
        Case("one of ten", "30m", outcomes("0x40", ok="0+9x40", rejected="0+1x40")),
        Case(
            "others err and leave",
            "30m",
            outcomes("0x40", ok="0+3x40", rejected="0+1x40", client_error="0+30x40", aborted="0+30x40"),
            (Fires("warning", "25%"),),
        ),
        Case("it is over", "30m", outcomes("0x40", ok="0+1x40", rejected="0+9x22 198x18")),
        Case("it has just begun", "31m", outcomes("0x40", ok="0+9x40", rejected="0x24 9+9x15")),
        Case("few requests", "30m", outcomes("0x40", ok="0x40", rejected="0x20 1x2 2x2 3x2 4x2 5x20")),
        Case("no request", "30m", outcomes("0x40", ok="9x40", rejected="90x40")),
    ],
    "DeltaLogErrorRatio": [
        Case(
            "a tenth fails",
            "30m",
            outcomes("0+1x40", ok="0+9x40"),
            (Fires("critical", "10%"),),
        ),
        Case(
            "most are refused, and those that are not fail",
            "30m",
            outcomes("0+2x40", ok="0x40", rejected="0+48x40"),
            (Fires("critical", "100%"),),
        ),
        Case("7 % fail", "30m", outcomes("0+7x40", ok="0+93x40"), (Fires("critical", "7%"),)),
        Case("4 % fail", "30m", outcomes("0+4x40", ok="0+96x40")),
        Case("all fail", "40m", outcomes("0+5x40", ok="100+0x40"), (Fires("critical", "100%"),)),
        Case(
            "others' requests hide nothing",
            "30m",
            outcomes("0+1x40", ok="0+9x40", client_error="0+90x40"),
            (Fires("critical", "10%"),),
        ),
        Case(
            "clients err and leave",
            "30m",
            outcomes("0+0x40", ok="0+1x40", client_error="0+9x40", aborted="0+9x40"),
        ),
        Case("no room", "30m", outcomes("0+0x40", ok="0+1x40", rejected="0+9x40")),
        Case("a replica is lost with its streams", "34m", outcomes("0+0x30 20+0x30", ok="0+50x60")),
        Case("it is over", "30m", outcomes("0+1x20 20+0x30", ok="0+9x60")),
        Case("few requests", "30m", outcomes("0+0x25 5+0x30", ok="0+0x60")),
        Case("no request", "30m", outcomes("40+0x40", ok="9+0x40")),
        Case("the ingress restarts", "30m", outcomes("900+0x20 0+0x20", ok="900+9x20 0+9x20")),
    ],
    "DeltaLogScaleStuck": [
        Case("no node for a second one", "40m", scaling("1x5 2x60", "1x60"), (Fires("warning", "1"),)),
        Case("one that does not end", "40m", scaling("2x5 1x60", "2x60"), (Fires("warning", "2"),)),
        Case(
            "as wanted, as two ingresses see it",
            "40m",
            scaling("2x60", "2x60") | one(READY, "2x60", replica="b"),
        ),
        Case("a start of ten minutes", "40m", scaling("1x5 2x60", "1x15 2x60")),
        Case(
            "always one behind",
            "60m",
            scaling("2x10 3x10 4x10 5x10 6x10 7x10", "1x10 2x10 3x10 4x10 5x10 6x10"),
        ),
        Case("a pool that does not scale", "40m", one(READY, "1x60")),
        # As wanted for one minute in five: never still, and never apart for long.
        Case(
            "replicas fall again",
            "50m",
            scaling("4x60", "4 1 2 3 1 4 1 2 3 1 " * 6),
            (Fires("warning", "2"),),
        ),
        Case("one of many restarts now and then", "35m", scaling("8x60", "8x10 7x2 8x10 7x2 8x30")),
        Case("one of ten is missing", "40m", scaling("10x60", "9x60"), (Fires("warning", "9"),)),
    ],
    "DeltaLogMetricsAbsent": [
        Case(
            "one is gone",
            "10m",
            everything_but(REQUESTS),
            (Fires("critical", "1", {"metric": REQUESTS.prom_name}),),
        ),
        Case(
            "two are gone",
            "10m",
            everything_but(READY, REQUESTS),
            tuple(Fires("critical", "1", {"metric": spec.prom_name}) for spec in (READY, REQUESTS)),
        ),
        Case("all are there", "10m", everything_but()),
    ],
    "DeltaLogNeverMerges": [
        Case(
            "decodes without a merge", "25m", decoding("8x30", "5+0x30"), (Fires("critical", "8", REPLICA),)
        ),
        Case("merges", "25m", decoding("8x30", "0+200x30")),
        Case(
            "two replicas, one idle",
            "25m",
            decoding("8x30", "0+200x30")
            | one(MERGES, "0x30", replica="b")
            | one(MERGE_INTERVAL, "8x30", replica="b"),
        ),
        Case(
            "one of two decodes without a merge",
            "25m",
            decoding("8x30", "5+0x30")
            | one(MERGES, "0+200x30", replica="b")
            | one(MERGE_INTERVAL, "8x30", replica="b")
            | one(GENERATED_TOKENS, "0+600x30", replica="b")
            | one(TTFT, "0+6x30", "_count", "b"),
            (Fires("critical", "8", REPLICA),),
        ),
        Case("idle", "25m", decoding("8x30", "5+0x30", "70+0x30", "7+0x30")),
        Case("answers shorter than a cycle", "25m", decoding("32x30", "0x30", "0+480x30", "0+60x30")),
        Case("answers of one token", "25m", decoding("8x30", "0x30", "0+600x30", "0+600x30")),
        Case("write-through", "25m", decoding("1x30", "0x30")),
        Case(
            "a pool without a log", "25m", one(GENERATED_TOKENS, "0+600x30") | one(TTFT, "0+6x30", "_count")
        ),
    ],
    "DeltaLogStepSlowerThanWriteThrough": [
        Case("a tenth slower", "30m", stepping("0+11x60", "0+10x60"), (Fires("warning", "110%"),)),
        Case("faster", "30m", stepping("0+8x60", "0+10x60")),
        Case("slow for ten minutes", "26m", stepping("0+8x15 121+12x10 249+8x30", "0+10x60")),
        Case("a pool at write-through", "30m", stepping("0+11x60", "0+10x60", "1x60")),
        Case("a cost that does not know write-through", "30m", stepping("0+11x60", "0x60")),
        Case("idle", "30m", stepping("11+0x60", "10+0x60")),
        Case("a replica restarts", "30m", stepping("500+8x15 0+8x45", "100+10x15 0+10x45")),
    ],
    "DeltaLogPredictionOff": [
        Case("too low", "50m", predicting("0+0.15x60", "0+0.2x60"), (Fires("warning", "75%"),)),
        Case("too high", "50m", predicting("0+0.25x60", "0+0.2x60"), (Fires("warning", "125%"),)),
        Case("a tenth off", "50m", predicting("0+0.22x60", "0+0.2x60")),
        Case("few samples", "50m", predicting("0+0.1x60", "0+0.2x60", "0+0.5x60")),
        Case(
            "few predictions",
            "50m",
            predicting("0+0.01x60", "0+0.2x60") | one(PREDICTED_TPOT, "0+0.1x60", "_count"),
        ),
        Case("idle", "50m", predicting("1+0x60", "2+0x60", "50+0x60")),
        Case("no prediction", "50m", predicting("0x60", "0+0.2x60") | one(PREDICTED_TPOT, "0x60", "_count")),
        Case(
            "a replica restarts",
            "50m",
            predicting("90+0.2x30 0+0.2x30", "9+0.2x30 0+0.2x30", "99+10x30 0+10x30"),
        ),
    ],
    "DeltaLogDecodesAsStock": [
        Case(
            "both stand aside",
            "10m",
            one(ASIDE, "1x20") | one(ASIDE, "1x20", replica="b"),
            (Fires("warning", "2"),),
        ),
        Case("one stands aside", "10m", one(ASIDE, "1x20"), (Fires("warning", "1"),)),
        Case("none stands aside", "10m", one(ASIDE, "0x20")),
    ],
}

BREAKS = [
    ("DeltaLogTpotBurnRate", '{tpot="missed"}', '{ttft="missed"}'),
    ("DeltaLogTtftBurnRate", '{ttft="missed"}', ""),
    ("DeltaLogTtftBurnRate", "(rate(ray_deltalog_slo", "(delta(ray_deltalog_slo"),
    ("DeltaLogTtftBurnRate", "ratio_rate5m > 0.144", "ratio_rate5m >= 0"),
    (
        "DeltaLogNoReadyReplica",
        "max by (pool, model) (ray_deltalog_ready",
        "min by (pool, model) (ray_deltalog_ready",
    ),
    ("DeltaLogNoReadyReplica", "avg_over_time", "max_over_time"),
    ("DeltaLogRefusals", "ratio_rate5m > 0.2", "ratio_rate5m >= 0"),
    ("DeltaLogRefusals", '{outcome!~"client_error|aborted"}', ""),
    (
        "DeltaLogQueueGrowing",
        "sum by (pool, model) (ray_deltalog_queued",
        "max by (pool, model) (ray_deltalog_queued",
    ),
    ("DeltaLogQueueGrowing", "min_over_time", "max_over_time"),
    ("DeltaLogErrorRatio", '{outcome="error"}', '{outcome!="ok"}'),
    ("DeltaLogErrorRatio", '{outcome=~"ok|error"}', ""),
    ("DeltaLogErrorRatio", '{outcome=~"ok|error"}', '{outcome!~"client_error|aborted"}'),
    (
        "DeltaLogScaleStuck",
        "max by (pool, model) (ray_deltalog_ready",
        "sum by (pool, model) (ray_deltalog_ready",
    ),
    ("DeltaLogNeverMerges", "(pool_model_replica:deltalog_merge_interval:max + 1) *", "0 *"),
    ("DeltaLogScaleStuck", "!=", ">"),
    ("DeltaLogScaleStuck", " or avg_over_time", " and avg_over_time"),
    ("DeltaLogScaleStuck", ":max[15m]) == 0", ":max[15m]) >= 0"),
    ("DeltaLogMetricsAbsent", "absent(ray_deltalog_requests_total)", "absent(ray_deltalog_merges_total)"),
    ("DeltaLogNeverMerges", "unless", "and"),
    ("DeltaLogNeverMerges", "sum by (pool, model, replica) (rate", "sum by (pool, model) (rate"),
    ("DeltaLogStepSlowerThanWriteThrough", 'curve="write_through"', 'curve="configured"'),
    ("DeltaLogPredictionOff", " or pool_model:deltalog_pred", " and pool_model:deltalog_pred"),
    (
        "DeltaLogDecodesAsStock",
        "sum by (pool, model) (ray_deltalog_aside",
        "max by (pool, model) (ray_deltalog_aside",
    ),
    ("DeltaLogDecodesAsStock", "aside_replicas) > 0", "aside_replicas) >= 0"),
]
"""An alert, what is right in its rules or those that it reads, and what a case must notice in its place."""
