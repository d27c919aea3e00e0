"""The shipped rules, judged by Prometheus's own promtool, and whether they are what the code generates."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import binary
from rule_cases import BREAKS, CASES, Case
from rule_courses import COURSES

from dashboards import rules
from dashboards.alerts import ALERTS
from service.metrics import SPECS

ROOT = Path(__file__).parents[2]
TEXT = rules.rendered()
EXPRESSIONS = [rule["expr"] for group in rules.groups() for rule in group["rules"]]
RECORDED = {rule["record"] for group in rules.groups() for rule in group["rules"] if "record" in rule}
# Not a histogram's `_sum`: Ray's exporter guesses it from the buckets.
SUFFIXES = {"histogram": ("_bucket", "_count"), "counter": ("",), "gauge": ("",)}
EXPORTED = {f"{spec.prom_name}{suffix}" for spec in SPECS for suffix in SUFFIXES[spec.kind]}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, timeout=60)


def unit_test(
    folder: Path, groups: list[dict[str, Any]], alert: str, cases: list[Case]
) -> subprocess.CompletedProcess[str]:
    """Let promtool judge the cases of one alert."""
    return judged(folder, groups, alert, [as_promtool(alert, case) for case in cases])


def judged(
    folder: Path, groups: list[dict[str, Any]], alert: str, tests: list[dict[str, Any]]
) -> subprocess.CompletedProcess[str]:
    """What promtool says of these rules, of which it takes those that matter to the alert."""
    read = reads(groups, alert)
    matter = [
        {**group, "rules": [rule for rule in group["rules"] if rule.get("record", rule.get("alert")) in read]}
        for group in groups
    ]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": matter}))
    file = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        # Recorded series first, as their groups have it in the file.
        "group_eval_order": [group["name"] for group in groups],
        "tests": tests,
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    return promtool("test", "rules", folder / "test.yaml")


def reads(groups: list[dict[str, Any]], name: str) -> set[str]:
    """A rule, and all recorded series that its value comes from."""
    found = {name}
    for group in groups:
        for rule in group["rules"]:
            if name in (rule.get("record"), rule.get("alert")):
                for series in re.findall(r"pool_model\w*:[\w:]+", rule["expr"]):
                    found |= reads(groups, series)
    return found


def course_test(folder: Path, groups: list[dict[str, Any]], alert: str) -> subprocess.CompletedProcess[str]:
    """Let promtool judge the courses of one alert."""
    tests = [
        {
            "interval": "1m",
            "name": course.name,
            "input_series": [{"series": name, "values": values} for name, values in course.series.items()],
            "promql_expr_test": [
                {
                    "expr": f'sum(ALERTS{{alertname="{alert}", alertstate="firing", '
                    f'severity="{course.severity}"}}) or vector(0)',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": "{}", "value": fires}],
                }
                for minute, fires in ((course.quiet, 0), (course.fires, 1))
                if minute is not None
            ],
        }
        for course in COURSES[alert]
    ]
    return judged(folder, groups, alert, tests)


def as_promtool(alert: str, case: Case) -> dict[str, Any]:
    expected = [
        {
            "exp_labels": {**fires.labels, "severity": fires.severity},
            "exp_annotations": {
                name: filled(text, fires.labels, fires.shown)
                for name, text in annotations(alert, fires.severity)
            },
        }
        for fires in case.expected
    ]
    return {
        "interval": "1m",
        "name": case.name,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [{"eval_time": case.at, "alertname": alert, "exp_alerts": expected}],
    }


def annotations(alert: str, severity: str) -> list[tuple[str, str]]:
    (rule,) = [
        rule
        for group in rules.groups()
        for rule in group["rules"]
        if rule.get("alert") == alert and rule["labels"]["severity"] == severity
    ]
    return list(rule["annotations"].items())


def filled(template: str, labels: dict[str, str], shown: str) -> str:
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda name: labels[name[1]], template)
    return re.sub(r"{{ \$value[^}]*}}", shown, text)


def test_promtool_accepts_the_rules() -> None:
    checked = promtool("check", "rules", ROOT / "dashboards" / "generated" / "rules.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"SUCCESS: {len(EXPRESSIONS)} rules found" in checked.stdout


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}
    for alert in ALERTS:
        cases = CASES[alert.name]
        assert any(alert.severity in {fires.severity for fires in case.expected} for case in cases), (
            alert.name
        )
        assert any(not case.expected for case in cases), alert.name


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_says_so(alert: str, tmp_path: Path) -> None:
    judged = unit_test(tmp_path, rules.groups(), alert, CASES[alert])
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.parametrize("alert", COURSES)
def test_an_alert_begins_when_it_should(alert: str, tmp_path: Path) -> None:
    judged = course_test(tmp_path, rules.groups(), alert)
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.parametrize(("alert", "right", "wrong"), BREAKS)
def test_a_broken_expression_is_noticed(alert: str, right: str, wrong: str, tmp_path: Path) -> None:
    # On one line each, so that no expression is folded in the midst of what is to be broken.
    text = yaml.safe_dump({"groups": rules.groups()}, sort_keys=False, width=10_000)
    assert right in text
    (tmp_path / "broken.yaml").write_text(text.replace(right, wrong))
    assert promtool("check", "rules", tmp_path / "broken.yaml").returncode == 0, "broken, but no rule"
    judged = unit_test(tmp_path, yaml.safe_load(text.replace(right, wrong))["groups"], alert, CASES[alert])
    assert judged.returncode == 1, judged.stdout
    assert f"alertname: {alert}" in judged.stdout + judged.stderr


def test_every_alert_has_broken_forms() -> None:
    assert {alert for alert, _, _ in BREAKS} == set(CASES)


def test_every_metric_is_in_the_catalogue() -> None:
    for expr in EXPRESSIONS:
        assert set(re.findall(r"\bray_\w+", expr)) <= EXPORTED, expr
        assert set(re.findall(r"\bpool_model\w*:[\w:]+", expr)) <= RECORDED, expr


def test_every_label_is_one_of_its_metric() -> None:
    specs = {f"{spec.prom_name}{suffix}": spec for spec in SPECS for suffix in SUFFIXES[spec.kind]}
    for expr in EXPRESSIONS:
        for name, label, values in re.findall(r'(ray_\w+){(\w+)!?[=~]+"([^"]*)"}', expr):
            assert set(values.split("|")) <= set(specs[name].labels[label]), expr


def test_no_sum_or_mean_of_ratios() -> None:
    for expr in EXPRESSIONS:
        assert not re.search(r"\b(sum|avg)\b[^(]*\([^)]*\) ?\(pool_model\w*:\w+:(ratio|mean)", expr), expr
        assert not re.search(r"\b(sum|avg) by \([^)]*\) \(\(", expr), expr
        assert "avg by" not in expr


def test_generated_files_are_fresh() -> None:
    for path, text in rules.generated().items():
        assert (ROOT / path).read_text() == text, f"{path}: run python -m dashboards build"


def test_alerts_name_the_pool_and_say_what_to_do() -> None:
    for alert in ALERTS:
        if alert.name != "DeltaLogMetricsAbsent":
            assert "{{ $labels.pool }}" in alert.summary
            assert "{{ $labels.model }}" in alert.description
            assert "$value" in alert.description
        assert 2 <= len(re.findall(r"[.](?: |$)", f"{alert.meaning} {alert.action}")) <= 7, alert.name


@pytest.mark.parametrize(("seconds", "text"), [(3600, "1h"), (900, "15m"), (90, "90s"), (0.5, "500ms")])
def test_durations(seconds: float, text: str) -> None:
    assert rules.duration(seconds) == text


def test_a_scaled_rule_differs_in_durations_alone() -> None:
    def timeless(text: str) -> str:
        return re.sub(r"\[\w+\]|(?<=for: )\w+|(?<=interval: )\w+", "T", " ".join(text.split()))

    scaled = rules.rendered(60)
    assert timeless(scaled) == timeless(TEXT)
    for before, after in zip(*(yaml.safe_load(text)["groups"] for text in (TEXT, scaled)), strict=True):
        assert (before["interval"], after["interval"]) == ("30s", "500ms")
    assert "[1m]" in scaled
    assert "[5m]" not in scaled
    assert "for: 15s" in scaled
