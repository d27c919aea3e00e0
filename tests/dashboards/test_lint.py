"""The boards keep every rule, and every rule finds the fault that it is there for."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from dashboards import lint
from dashboards.boards import boards
from dashboards.panels import TAG
from service.metrics.log import LIVE_ENTRIES, MERGES, STATE_BYTES
from service.metrics.requests import REQUESTS, TPOT
from service.metrics.routing import READY

BOARDS = boards()
CHOICE = '{pool=~"$pool", model=~"$model"}'
RATE = f"rate({REQUESTS.prom_name}{CHOICE}[$__rate_interval])"


def _panel(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda board: board["panels"][0].update(values)


def _query(expression: str) -> Callable[[dict[str, Any]], None]:
    return lambda board: board["panels"][0]["targets"][0].update(expr=expression)


def _variable(number: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda board: board["templating"]["list"][number].update(values)


FAULTS: list[tuple[lint.Rule, str, Callable[[dict[str, Any]], None]]] = [
    (lint.parses, "open bracket", _query(f"sum by (pool, model) ({RATE}")),
    (lint.says_what_it_shows, "no title", _panel(title="")),
    (lint.says_what_it_shows, "no advice", _panel(description="Requests.")),
    (lint.has_a_unit, "no unit", _panel(fieldConfig={"defaults": {}})),
    (lint.asks_the_chosen_data_source, "string", _panel(datasource="Prometheus")),
    (
        lint.asks_the_chosen_data_source,
        "uid",
        _panel(datasource={"type": "prometheus", "uid": "PBFA97CFB590B2093"}),
    ),
    (lint.asks_the_chosen_data_source, "no variable", _variable(0, name="ds")),
    (lint.asks_the_chosen_data_source, "variable's own", _variable(1, datasource=None)),
    (lint.lets_choose, "one pool", _variable(1, multi=False)),
    (lint.lets_choose, "not all models", _variable(2, includeAll=False)),
    (
        lint.obeys_the_choice,
        "every pool",
        _query(f"sum by (pool, model) (rate({MERGES.prom_name}[$__rate_interval]))"),
    ),
    (lint.links_the_others, "no link", lambda board: board.update(links=[])),
    (lint.links_the_others, "no tag", lambda board: board.update(tags=[])),
    (lint.numbers_panels, "twice", lambda board: board["panels"][0].update(id=board["panels"][1]["id"])),
    (lint.numbers_panels, "none", _panel(id=None)),
    (
        lint.fits_the_grid,
        "overlap",
        lambda board: board["panels"][0].update(gridPos=board["panels"][1]["gridPos"]),
    ),
    (lint.fits_the_grid, "too wide", _panel(gridPos={"x": 20, "y": 99, "w": 5, "h": 4})),
    (lint.looks_back_as_far_as_needed, "fixed", _query(RATE.replace("$__rate_interval", "1m"))),
    (
        lint.names_known_metrics,
        "typing error",
        _query(f"sum by (pool, model) (ray_deltalog_request_total{CHOICE})"),
    ),
    (lint.names_known_metrics, "no part", _query(f"sum by (pool, model) ({TPOT.prom_name}{CHOICE})")),
    (
        lint.names_known_metrics,
        "Ray's sum",
        _query(f"sum by (pool, model) (rate({TPOT.prom_name}_sum{CHOICE}[$__rate_interval]))"),
    ),
    (lint.sums_whole_pools, "bare", _query(RATE)),
    (lint.sums_whole_pools, "by replica", _query(f"sum by (pool, model, WorkerId) ({RATE})")),
    (lint.sums_whole_pools, "without", _query(f"sum without (replica) ({RATE})")),
    (lint.counts_repeated_gauges_once, "sum", _query(f"sum by (pool, model) ({READY.prom_name}{CHOICE})")),
    (lint.rates_counters, "no rate", _query(f"sum by (pool, model) ({STATE_BYTES.prom_name}{CHOICE})")),
    (
        lint.rates_counters,
        "rate of a gauge",
        _query(f"sum by (pool, model) (rate({LIVE_ENTRIES.prom_name}{CHOICE}[$__rate_interval]))"),
    ),
    (lint.takes_no_sum_of_ratios, "sum", _query(f"sum by (pool, model) ({RATE} / {RATE})")),
    (
        lint.takes_no_average_of_percentiles,
        "max of p95",
        _query(
            "max by (pool, model) (histogram_quantile(0.95, sum by (pool, model, le) "
            f"(rate({TPOT.prom_name}_bucket{CHOICE}[$__rate_interval]))))"
        ),
    ),
    (
        lint.takes_no_average_of_percentiles,
        "each replica's",
        _query(f"histogram_quantile(0.95, rate({TPOT.prom_name}_bucket{CHOICE}[$__rate_interval]))"),
    ),
    (
        lint.takes_no_average_of_percentiles,
        "avg",
        _query(f"avg by (pool, model) ({LIVE_ENTRIES.prom_name}{CHOICE})"),
    ),
]


@pytest.mark.parametrize("uid", BOARDS)
def test_a_board_keeps_every_rule(uid: str) -> None:
    assert lint.lint(BOARDS[uid]) == []


@pytest.mark.parametrize(
    ("rule", "fault"),
    [pytest.param(rule, fault, id=f"{rule.__name__}: {name}") for rule, name, fault in FAULTS],
)
def test_a_rule_finds_its_fault(rule: lint.Rule, fault: Callable[[dict[str, Any]], None]) -> None:
    board = copy.deepcopy(BOARDS["deltalog-slo"])
    assert not list(rule(board))
    fault(board)
    assert list(rule(board))


def test_every_rule_has_a_fault() -> None:
    assert {rule for rule, _, _ in FAULTS} == set(lint.RULES)


def test_the_boards_are_four_that_share_a_tag() -> None:
    assert list(BOARDS) == ["deltalog-slo", "deltalog-log", "deltalog-router", "deltalog-engine"]
    assert all(board["tags"] == [TAG] for board in BOARDS.values())


def test_a_query_names_its_metrics() -> None:
    expression = f"sum by (pool) ({RATE}) / on (pool) max by (pool) ({READY.prom_name}) or vector(1)"
    assert lint.metrics_of(expression) == {REQUESTS.prom_name, READY.prom_name}
