"""The metrics catalogue, and workers' totals turned into increments."""

import re
from typing import Any

import pytest

from service import metrics
from service.metrics import BYTE_KINDS, DIRECTIONS, DeltaLogMetrics, MetricSpec
from service.pools import PoolConfig

SPECS = {spec.name: spec for spec in vars(metrics).values() if isinstance(spec, MetricSpec)}
POOL = PoolConfig(name="p", model="m", merge_interval=8)


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_a_name_says_subject_and_unit(spec: MetricSpec) -> None:
    assert re.fullmatch(r"deltalog_[a-z]+(_[a-z]+)*", spec.name)
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert spec.name.removesuffix("_total").endswith(f"_{spec.unit}") or spec.unit in ("steps",)
    assert spec.prom_name == f"ray_{spec.name}"
    assert spec.help.endswith(".")


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_buckets_are_for_histograms_and_rise(spec: MetricSpec) -> None:
    assert bool(spec.buckets) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(set(spec.buckets))


def worker(merges: int, moved: int) -> dict[str, Any]:
    """Counters of one rank; byte counts are `moved` plus a distinct number per series."""
    return {
        "merge_interval": 8,
        "merges": merges,
        "live_entries": 5,
        "state_bytes": {
            direction: {kind: moved + 10 * i + j for j, kind in enumerate(BYTE_KINDS)}
            for i, direction in enumerate(DIRECTIONS)
        },
        "write_through_bytes": {direction: moved + 100 + i for i, direction in enumerate(DIRECTIONS)},
    }


class Recorder:
    """Stands where a bound Ray metric would and adds up what it is told."""

    def __init__(self, spec: MetricSpec) -> None:
        self.info = {"name": spec.name}
        self.series: dict[tuple[str, ...], float] = {}

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses to count nothing"
        self.series[tuple(tags.values())] = self.series.get(tuple(tags.values()), 0) + value

    def set(self, value: float) -> None:
        self.series[()] = value


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    bound: dict[str, Recorder] = {}

    def bind(spec: MetricSpec, _: PoolConfig) -> Recorder:
        return bound.setdefault(spec.name, Recorder(spec))

    monkeypatch.setattr(MetricSpec, "bind", bind)
    return bound


def test_totals_become_increments(recorders: dict[str, Recorder]) -> None:
    deltalog = DeltaLogMetrics(POOL)
    for totals in ([worker(0, 0)], [worker(3, 1000)], [worker(3, 1000)], [worker(7, 5000)]):
        deltalog.update(totals)
    assert recorders["deltalog_merges_total"].series == {(): 7}
    assert recorders["deltalog_state_bytes_total"].series[("write", "merge")] == 5000 + 11
    assert recorders["deltalog_write_through_bytes_total"].series == {("read",): 5100, ("write",): 5101}
    assert recorders["deltalog_log_live_entries"].series == {(): 5}
    assert recorders["deltalog_merge_interval"].series == {(): 8}
    assert recorders["deltalog_aside_replicas"].series == {(): 0}


def test_a_plugin_that_stands_aside_shows(recorders: dict[str, Recorder]) -> None:
    deltalog = DeltaLogMetrics(POOL)
    deltalog.update([{"standing_aside": "expected another model"}])
    assert recorders["deltalog_aside_replicas"].series == {(): 1}
    assert not recorders["deltalog_merges_total"].series


def test_ranks_share_merges_and_add_bytes(recorders: dict[str, Recorder]) -> None:
    DeltaLogMetrics(POOL).update([worker(3, 1000), worker(3, 2000)])
    assert recorders["deltalog_merges_total"].series == {(): 3}
    assert recorders["deltalog_state_bytes_total"].series[("read", "append")] == 3000
    assert recorders["deltalog_write_through_bytes_total"].series[("write",)] == 3000 + 202
