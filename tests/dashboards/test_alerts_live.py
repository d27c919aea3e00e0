"""The shipped rules on a faster clock, in real Prometheus and Alertmanager: faults are induced, alerts
arrive, faults end, and Alertmanager says that they have.

The metrics are the catalogue's, exported by this test.
"""

import threading
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from alerting import receiving
from prometheus import running_alertmanager, running_prometheus
from waiting import until

from dashboards import rules
from service.metrics import SPECS
from service.metrics.log import ASIDE, MERGE_INTERVAL, MERGES
from service.metrics.replicas import BUILD_INFO
from service.metrics.requests import GENERATED_TOKENS, REQUESTS, SLO_SEQUENCES, TTFT
from service.metrics.routing import QUEUED, READY
from service.metrics.spec import MetricSpec

FASTER = 60
"""Minutes become seconds: the shortest window, of 5 minutes, still holds five scrapes."""
POOLS = ("good", "bad")
PERIOD_S = 0.2
FAULTS = {
    ("DeltaLogTpotBurnRate", "critical"),
    ("DeltaLogNoReadyReplica", "critical"),
    ("DeltaLogQueueGrowing", "warning"),
    ("DeltaLogErrorRatio", "critical"),
    ("DeltaLogNeverMerges", "critical"),
    ("DeltaLogDecodesAsStock", "warning"),
}
HEALTHY_S = 10
"""Longer than any `for` of up to five minutes, on the faster clock."""

pytestmark = pytest.mark.timeout(240)


class Exporter(threading.Thread):
    """Two pools under load. While `faulty`, all that can go wrong goes wrong in the one that is `bad`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.faulty = False
        self._stopped = threading.Event()
        registry = prometheus_client.CollectorRegistry()
        self._metrics = {spec.name: self._metric(spec, registry) for spec in SPECS}
        self._server, _ = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
        self.target = f"127.0.0.1:{self._server.server_port}"

    def _metric(self, spec: MetricSpec, registry: prometheus_client.CollectorRegistry) -> Any:
        make = getattr(prometheus_client, spec.kind.capitalize())
        buckets = {"buckets": spec.buckets} if spec.kind == "histogram" else {}
        return make(spec.prom_name, spec.help, ("pool", "model", *spec.labels), registry=registry, **buckets)

    def _series(self, spec: MetricSpec, pool: str, **labels: str) -> Any:
        return self._metrics[spec.name].labels(pool=pool, model="demo", **labels)

    def run(self) -> None:
        for pool in POOLS:
            labels = {name: values[0] for name, values in BUILD_INFO.labels.items()}
            self._series(BUILD_INFO, pool, **labels).set(1)
            self._series(MERGE_INTERVAL, pool).set(2)
        while not self._stopped.wait(PERIOD_S):
            for pool in POOLS:
                self._serve(pool, bad=self.faulty and pool == "bad")

    def _serve(self, pool: str, bad: bool) -> None:
        late = "missed" if bad else "met"
        self._series(READY, pool).set(0 if bad else 2)
        self._series(QUEUED, pool).set(50 if bad else 0)
        self._series(ASIDE, pool).set(bad)
        self._series(SLO_SEQUENCES, pool, tpot=late, ttft="met").inc(10)
        self._series(REQUESTS, pool, outcome="error" if bad else "ok").inc(10)
        self._series(GENERATED_TOKENS, pool).inc(100)
        self._series(TTFT, pool).observe(0.1)
        self._series(MERGES, pool).inc(0 if bad else 50)

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self._server.shutdown()


def test_alerts_fire_arrive_and_resolve(tmp_path: Path) -> None:
    exporter = Exporter()
    exporter.start()
    with (
        receiving() as (inbox, webhook),
        running_alertmanager(tmp_path, webhook) as alertmanager,
        running_prometheus(
            tmp_path, [exporter.target], rules.rendered(FASTER), alertmanager=alertmanager
        ) as prometheus,
    ):
        evaluated = f"min(count_over_time({rules.recording.READY_REPLICAS}[1m]))"
        enough = HEALTHY_S / rules.INTERVAL_S * FASTER
        until(lambda: prometheus.value(evaluated) >= enough, 60, "a while in which all is well")
        assert prometheus.firing() == set()
        assert not inbox.of_pools()

        exporter.faulty = True
        until(lambda: inbox.last("firing") >= FAULTS, 60, f"{FAULTS} to arrive")
        assert prometheus.firing() >= {name for name, _ in FAULTS}
        exporter.faulty = False
        until(lambda: inbox.last("resolved") >= FAULTS, 90, "them to resolve")
        # The slow burn goes on until its window of 30 minutes has passed.
        until(lambda: prometheus.firing() <= {"DeltaLogTpotBurnRate"}, 30, "Prometheus to agree")
        exporter.stop()

    for alert in inbox.of_pools():
        texts = alert["annotations"]
        assert texts["summary"].startswith("Pool bad (demo): "), "a pool that was well is named"
        assert "{{" not in "".join(texts.values())
        assert len(texts["runbook"]) > 100


def test_a_service_that_is_gone_is_noticed(tmp_path: Path) -> None:
    exporter = Exporter()
    exporter.start()
    with running_prometheus(tmp_path, [exporter.target], rules.rendered(FASTER)) as prometheus:
        ready = rules.recording.READY_REPLICAS
        until(lambda: len(prometheus.query(ready)) == len(POOLS), 30, "both pools to be recorded")
        exporter.stop()
        until(
            lambda: prometheus.firing() == {"DeltaLogMetricsAbsent"}, 60, "the alert that nothing is exported"
        )
        missing = {alert["labels"]["metric"] for alert in prometheus.get("alerts")["alerts"]}
        assert missing == {spec.prom_name for spec in rules.recording.ALWAYS_THERE}
