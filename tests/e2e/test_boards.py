"""The boards' queries on what a live service exports, through a real Prometheus."""

import asyncio
import os
import re
import signal
import time
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import yaml
from pages import Page
from prometheus import Server, running_prometheus
from running_service import ROOT, RunningService, running, simulated
from waiting import free_ports, until

from dashboards import show
from dashboards.boards import boards
from dashboards.boards.deltalog import MEAN_TPOT, OBSERVED
from dashboards.generate import GENERATED as GENERATED_IN
from dashboards.lint import metrics_of, queries
from dashboards.load import Load, put_load
from dashboards.promql import WINDOW
from dashboards.rules import groups, rendered
from service.launch import METRICS_PERIOD_S
from service.metrics import SPECS
from service.metrics.requests import GENERATED_TOKENS, REQUESTS, TPOT
from service.metrics.routing import READY
from service.metrics.scheduler import CACHE_USAGE, PROMPT_TOKENS, WAITING
from service.metrics.steps import BREAK_EVEN, MODEL_ERROR, STEP_SECONDS

LOAD_S = 45.0
UNITS = {
    "none": r"\d",
    "s": r"\d ?(µs|ms|s|mins?|hours?)$",
    "percent": "%",
    "percentunit": "%",
    "bytes": r"B$",
    "Bps": r"B/s$",
    "reqps": r"req/s$",
}
"""What the figures of a unit look like; a unit of our own is its suffix."""
GPU = "ray_node_g"
"""Ray's metrics of GPUs, which a machine without one does not have."""
GENERATED = ROOT / GENERATED_IN
BOARDS = list(boards().values())
PANELS = [(board["uid"], panel["title"]) for board in BOARDS for panel in board["panels"]]


def asked(expression: str) -> str:
    """A board's query as Grafana asks it with all pools and models chosen."""
    return expression.replace(WINDOW, "30s").replace("$pool", ".*").replace("$model", ".*")


@pytest.fixture(scope="module")
def observed(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningService, Server, Load]]:
    """The deployment that `make observe` shows, after a load, with what the client saw of it."""
    config = yaml.safe_load((ROOT / "deploy/serve/cpu-observe.yaml").read_text())
    config["pools"][0]["model"] = str(demo_model)
    config["port"], config["metrics_port"] = free_ports(2)
    folder = tmp_path_factory.mktemp("observed")
    target = f"127.0.0.1:{config['metrics_port']}"
    with running(config, folder) as service, running_prometheus(folder, [target], rendered()) as prometheus:
        load = asyncio.run(put_load(service.url, ["demo"], LOAD_S, lambda *_: None))
        # What the last requests did is exported, and then scraped.
        time.sleep(METRICS_PERIOD_S + 2)
        yield service, prometheus, load


def drawn(prometheus: Server, expression: str) -> int:
    """Points that a panel has of the last half minute of the load."""
    now_s = time.time()
    series = prometheus.query_range(asked(expression), now_s - 30, now_s, 5)
    return sum(value != "NaN" for each in series for _, value in each["values"])


def may_be_empty(expression: str) -> bool:
    """Whether this deployment has none of it: a GPU, a batch at which the log pays, a second pool."""
    names = metrics_of(expression)
    return (
        expression == OBSERVED or BREAK_EVEN.prom_name in names or any(name.startswith(GPU) for name in names)
    )


@pytest.mark.parametrize(("uid", "title"), PANELS)
def test_every_panel_has_data(observed, uid: str, title: str) -> None:
    _, prometheus, _ = observed
    (board,) = (board for board in BOARDS if board["uid"] == uid)
    expressions = [expression for named, expression in queries(board) if named == title]
    empty = [each for each in expressions if not drawn(prometheus, each) and not may_be_empty(each)]
    assert expressions
    assert empty == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_panel_is_drawn_by_grafanas_own_components(observed, tmp_path: Path) -> None:
    """Needs node, npm and Chromium."""
    _, prometheus, _ = observed
    show.build_page()
    span = f"from={1000 * (time.time() - LOAD_S):.0f}&to={1000 * time.time():.0f}"
    with show.serving_page(GENERATED, prometheus.url) as url:
        for board in BOARDS:
            image = tmp_path / f"{board['uid']}.png"
            address = f"{url}/?board={board['uid']}&{span}"
            html, console = show.photograph(address, show.board_height(board), image, tmp_path)
            assert console == []
            assert image.stat().st_size < 200_000
            drawn = Page(html).panels
            assert set(drawn) == {panel["title"] for panel in board["panels"]}
            for panel in board["panels"]:
                seen, unit = drawn[panel["title"]], panel["fieldConfig"]["defaults"]["unit"]
                assert (seen["data-state"], seen["data-ink"]) == ("drawn", "true"), seen
                assert panel["title"] in seen["text"]
                assert "No data" not in seen["text"]
                assert re.search(UNITS.get(unit, re.escape(unit.removeprefix("suffix:"))), seen["data-unit"])


def test_every_metric_of_boards_and_rules_and_the_catalogue_is_there(observed) -> None:
    _, prometheus, _ = observed
    there = set(prometheus.get("label/__name__/values"))
    recorded = {rule["record"] for group in groups() for rule in group["rules"] if "record" in rule}
    expressions = [expression for board in BOARDS for _, expression in queries(board)]
    expressions += [rule["expr"] for group in groups() for rule in group["rules"]]
    named = set().union(*map(metrics_of, expressions)) - recorded
    assert {name for name in named - there if not name.startswith(GPU)} == {BREAK_EVEN.prom_name}
    suffixes = {"histogram": "_bucket", "counter": "", "gauge": ""}
    declared = {f"{spec.prom_name}{suffixes[spec.kind]}" for spec in SPECS}
    # On a CPU the log does not pay, at no batch.
    assert declared - there == {BREAK_EVEN.prom_name}


def test_tpot_on_the_board_is_the_clients(observed) -> None:
    _, prometheus, load = observed
    assert load.failed == 0
    assert prometheus.value(f"sum({TPOT.prom_name}_count)") == len(load.tpots_s)
    # As the board asks it, over the whole load.
    whole = MEAN_TPOT.replace(WINDOW, f"{LOAD_S + 30:.0f}s").replace("$pool", ".*").replace("$model", ".*")
    assert prometheus.value(whole) == pytest.approx(load.mean_tpot_s, rel=0.05)
    p50 = prometheus.value(f"histogram_quantile(0.5, sum by (le) ({TPOT.prom_name}_bucket))")
    theirs = median(load.tpots_s)
    near = {bisect_left(TPOT.buckets, theirs * factor) for factor in (0.95, 1, 1.05)}
    assert bisect_left(TPOT.buckets, p50) in near


def test_what_the_scheduler_had_is_on_the_board(observed) -> None:
    _, prometheus, load = observed
    assert prometheus.value(f"sum({PROMPT_TOKENS.prom_name})") >= len(load.tpots_s)
    assert 0 < prometheus.value(f"max(max_over_time({CACHE_USAGE.prom_name}[{LOAD_S:.0f}s]))") < 1
    assert prometheus.value(f"max({WAITING.prom_name})") == 0
    off = prometheus.value(f"sum({MODEL_ERROR.prom_name}) / sum({STEP_SECONDS.prom_name})")
    assert 0 < off < 0.5


def test_a_restarted_replica_neither_doubles_nor_splits_a_series(tmp_path: Path) -> None:
    config = simulated(step_ms=2)
    target = f"127.0.0.1:{config['metrics_port']}"

    def generate(service: RunningService, requests: int) -> None:
        for _ in range(requests):
            service.post("completions", {"prompt": "x", "max_tokens": 50})

    with (
        running(config, tmp_path) as service,
        running_prometheus(tmp_path, [target], rendered()) as prometheus,
    ):
        began_s = time.time()
        ready = f"max by (pool, model) ({READY.prom_name})"
        until(lambda: prometheus.value(ready) == 2, 30, "both replicas on the board")
        generate(service, 30)
        time.sleep(METRICS_PERIOD_S + 2)
        victim = service.processes("ServeReplica:deltalog:test")[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in service.processes("ServeReplica:deltalog:test"), 30, "its end")
        until(lambda: len(service.processes("ServeReplica:deltalog:test")) == 2, 60, "its successor")
        until(lambda: prometheus.value(ready) == 2, 60, "both replicas on the board")
        generate(service, 30)
        time.sleep(METRICS_PERIOD_S + 2)
        window = f"{round(time.time() - began_s) + 5}s"
        for spec, made in ((GENERATED_TOKENS, 60 * 50), (REQUESTS, 60)):
            (series,) = prometheus.query(f"sum by (pool, model) (increase({spec.prom_name}[{window}]))")
            assert float(series["value"][1]) == pytest.approx(made, rel=0.1)
        for board in BOARDS:
            for title, expression in queries(board):
                # The one panel that is there to tell replicas apart.
                splits = {"WorkerId"} if title == "Step time by replica" else {"replica", "WorkerId"}
                found = [each["metric"] for each in prometheus.query(asked(expression))]
                assert not any(splits & set(labels) for labels in found), expression
