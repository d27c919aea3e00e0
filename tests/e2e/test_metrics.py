"""The metrics as Prometheus reads them, against a count by hand of what the answers say was done."""

from collections import Counter
from itertools import product
from typing import Any

import openai
import pytest
from running_service import RunningService
from waiting import until

from service.metrics import SPECS
from service.metrics.log import LIVE_ENTRIES, MERGE_INTERVAL, MERGES, STATE_BYTES, WRITE_THROUGH_BYTES
from service.metrics.requests import (
    DURATION,
    GENERATED_TOKENS,
    ITL,
    REQUESTS,
    SLO_SEQUENCES,
    SLO_TPOT,
    SLO_TTFT,
    TPOT,
    TPOT_SUM,
    TTFT,
)
from service.metrics.routing import DESIRED_REPLICAS
from service.metrics.spec import MetricSpec
from service.metrics.steps import (
    BREAK_EVEN,
    DECODE_BATCH,
    PREDICTED_STEP_SECONDS,
    RECURRENT_SHARE,
    STEP_SECONDS,
    STEPS,
)
from service.scrape import Scrape

# The demo model: three recurrent layers of 4 key heads and 8 value heads of 64, base and update in fp32,
# key in bf16, one fp32 log-decay a value head.
LAYERS, M = 3, 8
BASE_BYTES = 8 * 64 * 64 * 4
ENTRY_BYTES = 4 * 64 * 2 + 8 * 64 * 4 + 8 * 4
TOKENS = 97

CONDITIONAL = (
    *(DESIRED_REPLICAS, SLO_SEQUENCES, SLO_TPOT, SLO_TTFT),
    *(PREDICTED_STEP_SECONDS, RECURRENT_SHARE, BREAK_EVEN),
)
"""This pool does not scale, promises nothing and does not say what its steps cost."""


@pytest.fixture(scope="module")
def readings(service: RunningService) -> tuple[Scrape, Scrape, Any]:
    """The metrics before and after one plain request and what it answered.

    What the log did comes by a poll of its own, which a busy machine may delay: wait until all decode steps
    are there.
    """
    before = service.settled()
    baseline = before.total(WRITE_THROUGH_BYTES, direction="write")
    answer = service.client().completions.create(
        model="demo",
        prompt="Count the merges of this one.",
        max_tokens=TOKENS,
        extra_body={"ignore_eos": True},
    )
    decoded = baseline + LAYERS * (TOKENS - 1) * BASE_BYTES
    until(
        lambda: service.scrape().total(WRITE_THROUGH_BYTES, direction="write") >= decoded,
        60,
        "the counters of the log",
    )
    return before, service.settled(), answer.usage


def test_every_metric_is_exported_with_all_its_series(readings: tuple[Scrape, Scrape, Any]) -> None:
    _, scrape, _ = readings
    for spec in SPECS:
        suffix = "_count" if spec.kind == "histogram" else ""
        series = [labels for labels, _ in scrape.samples[spec.prom_name + suffix]]
        assert all(labels["pool"] == "test" and labels["model"] == "demo" for labels in series)
        found = {tuple(labels[name] for name in spec.labels) for labels in series}
        expected = set() if spec in CONDITIONAL else set(product(*spec.labels.values()))
        assert found == expected, spec.name


def test_histograms_have_the_declared_buckets(readings: tuple[Scrape, Scrape, Any]) -> None:
    _, scrape, _ = readings
    for spec in (TTFT, ITL, TPOT):
        edges = {float(labels["le"]) for labels, _ in scrape.samples[f"{spec.prom_name}_bucket"]}
        assert edges == {*spec.buckets, float("inf")}


def test_latencies_have_one_sample_each(readings: tuple[Scrape, Scrape, Any]) -> None:
    before, after, _ = readings
    specs = (TTFT, ITL, TPOT, DURATION)
    samples = [after.total(spec, "_count") - before.total(spec, "_count") for spec in specs]
    assert samples == [1, TOKENS - 1, 1, 1]
    # The exporter knows a histogram's samples by their buckets alone, which are up to 20 % wide here.
    decoding = (TOKENS - 1) * (after.total(TPOT_SUM) - before.total(TPOT_SUM))
    assert decoding == pytest.approx(after.total(ITL, "_sum") - before.total(ITL, "_sum"), rel=0.2)
    steps = after.total(STEP_SECONDS) - before.total(STEP_SECONDS)
    assert decoding == pytest.approx(steps, rel=0.05)


def test_steps_are_counted_by_their_batch(readings: tuple[Scrape, Scrape, Any]) -> None:
    before, after, _ = readings

    def counted(**labels: str) -> float:
        return after.total(STEPS, **labels) - before.total(STEPS, **labels)

    # The first step of a busy time has none before it to be measured from.
    assert TOKENS - 2 <= counted(batch="1") <= TOKENS
    assert counted(mode="mixed") <= 3
    samples = after.total(DECODE_BATCH, "_count") - before.total(DECODE_BATCH, "_count")
    assert samples == counted()


def test_each_generated_sequence_has_its_own_latencies(service: RunningService) -> None:
    before = service.settled()
    service.post("completions", {"prompt": "x", "n": 3, "max_tokens": 5, "ignore_eos": True})
    after = service.settled()
    samples = [after.total(spec, "_count") - before.total(spec, "_count") for spec in (TTFT, ITL, TPOT)]
    assert samples == [3, 3 * 4, 3]


def test_tokens_and_outcomes_are_counted(readings: tuple[Scrape, Scrape, Any]) -> None:
    before, after, usage = readings
    assert after.total(GENERATED_TOKENS) - before.total(GENERATED_TOKENS) == usage.completion_tokens == TOKENS
    ok = {"outcome": "ok"}
    assert after.total(REQUESTS, **ok) - before.total(REQUESTS, **ok) == 1


def test_merges_and_bytes_follow_from_positions(readings: tuple[Scrape, Scrape, Any]) -> None:
    before, after, usage = readings
    # The last token is sampled and never decoded.
    positions = range(usage.prompt_tokens, usage.prompt_tokens + TOKENS - 1)
    merges = sum(position % M == M - 1 for position in positions)
    appends = len(positions) - merges

    def counted(spec: MetricSpec, **labels: str) -> float:
        return after.total(spec, **labels) - before.total(spec, **labels)

    def written(kind: str) -> float:
        return counted(STATE_BYTES, direction="write", kind=kind)

    assert counted(MERGES) == LAYERS * merges
    assert written("append") == LAYERS * appends * ENTRY_BYTES
    assert written("merge") == LAYERS * merges * BASE_BYTES
    assert written("fill") == LAYERS * (usage.prompt_tokens % M) * ENTRY_BYTES
    write_through = counted(WRITE_THROUGH_BYTES, direction="write")
    assert write_through == LAYERS * len(positions) * BASE_BYTES
    assert 6.5 < write_through / counted(STATE_BYTES, direction="write") < 7.5
    assert after.total(MERGE_INTERVAL) == M
    assert after.total(LIVE_ENTRIES) == LAYERS * ((usage.prompt_tokens + TOKENS - 1) % M)


def test_each_request_has_one_outcome(service: RunningService) -> None:
    before = service.settled()
    service.post("completions", {"prompt": "x", "max_tokens": 2})
    service.post("completions", {"prompt": "x", "max_tokens": 2, "stream": True})
    service.post("completions", {"prompt": "x", "max_tokens": -1})
    service.post("completions", {"prompt": "x", "max_tokens": -1, "stream": True})
    service.post("chat/completions", {"messages": 5})
    after = service.settled()
    (outcomes,) = REQUESTS.labels.values()
    changed = {
        outcome: after.total(REQUESTS, outcome=outcome) - before.total(REQUESTS, outcome=outcome)
        for outcome in outcomes
    }
    assert changed == {"ok": 2, "client_error": 3, "rejected": 0, "aborted": 0, "error": 0}


def test_a_replica_has_at_most_600_series(readings: tuple[Scrape, Scrape, Any]) -> None:
    _, scrape, _ = readings
    ours = [
        labels["replica"]
        for name, series in scrape.samples.items()
        if name.startswith("ray_deltalog_")
        for labels, _ in series
    ]
    assert 100 < max(Counter(ours).values()) <= 600


def test_scrapes_are_for_prometheus_alone(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.get("/metrics", cast_to=object)
