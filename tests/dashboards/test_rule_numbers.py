"""Every threshold, window and `for` of the rules matters to a case: with another, something else fires."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rule_cases import CASES
from test_rules import course_test, reads, unit_test

from dashboards import rules

NUMBER = re.compile(r"(?<![\w.\[])\d+\.?\d*(?![\w\]])")
WINDOW = re.compile(r"\[(\d+)m\]")


def changed(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rule with one number doubled, halved or 1 for 0, or with a time three times as long or short."""
    expr = rule["expr"]

    def replaced(found: re.Match[str], by: str) -> dict[str, Any]:
        return rule | {"expr": f"{expr[: found.start()]}{by}{expr[found.end() :]}"}

    for found in NUMBER.finditer(expr):
        number = float(found[0])
        for other in (2 * number, number / 2) if number else (1,):
            yield replaced(found, f"{other:g}")
    if "alert" in rule:  # what is recorded has its window in its name
        for found in WINDOW.finditer(expr):
            for minutes in (3 * int(found[1]), max(1, int(found[1]) // 3)):
                yield replaced(found, f"[{minutes}m]")
        yield rule | {"for": f"{3 * int(rule['for'].removesuffix('m'))}m"}
        yield rule | {"for": "0m"}


@pytest.mark.parametrize("alert", CASES)
def test_every_number_matters(alert: str, tmp_path: Path) -> None:
    groups = rules.groups()
    read, unnoticed, tried = reads(groups, alert), [], 0
    for group in groups:
        for index, rule in enumerate(group["rules"]):
            if rule.get("record", rule.get("alert")) not in read:
                continue
            for other in changed(rule):
                broken = copy.deepcopy(groups)
                next(each for each in broken if each["name"] == group["name"])["rules"][index] = other
                tried += 1
                noticed = (
                    unit_test(tmp_path, broken, alert, CASES[alert]).returncode
                    or course_test(tmp_path, broken, alert).returncode
                )
                if not noticed:
                    unnoticed.append((rule["expr"], other["expr"], other.get("for")))
    assert tried
    assert not unnoticed
