"""Queries of the boards over known series: more replicas, a restart and unlike load falsify no figure."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from dashboards.boards import boards
from dashboards.promql import WINDOW
from service.metrics.log import MERGE_INTERVAL
from service.metrics.requests import GENERATED_TOKENS, REQUESTS, RUNNING_REQUESTS, TPOT, TPOT_SUM
from service.metrics.routing import DESIRED_REPLICAS, READY

LOG, STOCK = "log", "stock"
BOTH = ("first", "second")
RUN = "{0}+{1}x30"
"""A counter, at {0} and {1} more every minute."""
SERIES = [
    # Two ingresses see the same two replicas, and one replica of the other pool.
    *((READY.prom_name, LOG, replica, "", "2x30") for replica in BOTH),
    *((READY.prom_name, STOCK, replica, "", "1x30") for replica in BOTH),
    *((MERGE_INTERVAL.prom_name, LOG, replica, "", "8x30") for replica in BOTH),
    *((RUNNING_REQUESTS.prom_name, LOG, replica, "", "3x30") for replica in BOTH),
    # The second replica ends after ten minutes; the third takes its place and counts from 0.
    (GENERATED_TOKENS.prom_name, LOG, "first", "", RUN.format(0, 600)),
    (GENERATED_TOKENS.prom_name, LOG, "second", "", "0+1200x10"),
    (GENERATED_TOKENS.prom_name, LOG, "third", "", "_x10 0+1200x20"),
    # Ten sequences a minute of 0.125 s a token, thirty of 0.25 s: the mean is 0.21875 s, not 0.1875 s.
    (f"{TPOT.prom_name}_count", LOG, "first", "", RUN.format(0, 10)),
    (TPOT_SUM.prom_name, LOG, "first", "", RUN.format(0, 1.25)),
    (f"{TPOT.prom_name}_count", LOG, "second", "", RUN.format(0, 30)),
    (TPOT_SUM.prom_name, LOG, "second", "", RUN.format(0, 7.5)),
    (f"{TPOT.prom_name}_count", STOCK, "first", "", RUN.format(0, 60)),
    (TPOT_SUM.prom_name, STOCK, "first", "", RUN.format(0, 26.25)),
    # One ingress answers 10 of 10 a minute, the other 10 of 30.
    (REQUESTS.prom_name, LOG, "first", "ok", RUN.format(0, 10)),
    (REQUESTS.prom_name, LOG, "second", "ok", RUN.format(0, 10)),
    (REQUESTS.prom_name, LOG, "second", "rejected", RUN.format(0, 15)),
    (REQUESTS.prom_name, LOG, "second", "error", RUN.format(0, 5)),
    (DESIRED_REPLICAS.prom_name, LOG, "first", "", "4x30"),
]
EXPECTED = {
    ("deltalog-slo", "Replicas ready", 0): {LOG: 2, STOCK: 1},
    ("deltalog-slo", "Tokens generated", 0): {LOG: 30},
    ("deltalog-slo", "Errors", 0): {LOG: 0.5},
    ("deltalog-slo", "SLO met", 0): {LOG: 0.5},
    ("deltalog-slo", "Saturation", 0): {LOG: 6},
    ("deltalog-log", "Mean TPOT, for A/B", 0): {LOG: 0.21875, STOCK: 0.4375},
    ("deltalog-log", "Speed-up", 0): {LOG: 2},
    ("deltalog-router", "Replicas", 0): {LOG: 4, STOCK: 1},
    ("deltalog-engine", "Replicas aside", 0): {LOG: 0, STOCK: 0},
}


def _series(name: str, pool: str, replica: str, outcome: str, values: str) -> dict[str, str]:
    labels = {
        "pool": pool,
        "model": "m",
        "replica": replica,
        "WorkerId": f"{pool}-{replica}",
        "outcome": outcome,
    }
    matchers = ", ".join(f'{label}="{value}"' for label, value in labels.items() if value)
    return {"series": f"{name}{{{matchers}}}", "values": values}


def _expression(uid: str, title: str, number: int) -> str:
    (panel,) = [panel for panel in boards()[uid]["panels"] if panel["title"] == title]
    expression: str = panel["targets"][number]["expr"]
    return expression.replace(WINDOW, "5m").replace("$pool", ".*").replace("$model", ".*")


def _judged(expected: dict[tuple[str, str, int], dict[str, float]], folder: Path) -> str:
    """Empty where Prometheus' own engine agrees, else what it says."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here; Debian has it in the package prometheus")
    tests = [
        {
            # promtool compares every bit; the figures are multiples of this power of two.
            "expr": f"round({_expression(*query)}, {1 / 1024})",
            "eval_time": "20m",
            "exp_samples": [
                {"labels": f'{{pool="{pool}", model="m"}}', "value": value} for pool, value in values.items()
            ],
        }
        for query, values in expected.items()
    ]
    case = {"interval": "1m", "input_series": [_series(*one) for one in SERIES], "promql_expr_test": tests}
    path = folder / "queries.yml"
    path.write_text(json.dumps({"tests": [case]}))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("query", EXPECTED, ids=lambda query: f"{query[0]}: {query[1]}")
def test_known_series_give_known_figures(query: tuple[str, str, int], tmp_path: Path) -> None:
    assert _judged({query: EXPECTED[query]}, tmp_path) == ""


def test_a_wrong_figure_is_noticed(tmp_path: Path) -> None:
    assert "got" in _judged({("deltalog-slo", "Replicas ready", 0): {LOG: 4, STOCK: 2}}, tmp_path)
