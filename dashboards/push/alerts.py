"""Alerts of a Prometheus rule file as Grafana-managed rules.

Prometheus fires for every series that an expression returns, whatever its value; Grafana fires where the
condition is not zero. So a rule asks for the series (A), turns any value into 1 (B), and compares with 0 (C).
Recording rules stay with Prometheus.
"""

import hashlib
import re
from collections import Counter
from typing import Any

from dashboards.push.connect import PushError

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
_MAX_UID = 40
# Grafana evaluates groups on a grid of this many seconds and refuses other intervals.
_GRID_S = 10
_EXPRESSION = "__expr__"


def convert(
    groups: list[dict[str, Any]], folder_uid: str, datasource_uid: str, org_id: int
) -> list[dict[str, Any]]:
    """Every group with an alert in it, as Grafana's provisioning API takes it."""
    names = Counter(rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule)
    converted = []
    for group in groups:
        alerts = [rule for rule in group["rules"] if "alert" in rule]
        if not alerts:
            continue
        interval_s = seconds(group.get("interval", "1m"))
        if interval_s < _GRID_S or interval_s % _GRID_S:
            raise PushError(
                f"expected the interval of group {group['name']!r} to be a multiple of {_GRID_S} s, "
                f"got {group['interval']!r}"
            )
        rules = [
            {
                **_rule(alert, _title(alert, names), datasource_uid),
                "orgID": org_id,
                "folderUID": folder_uid,
                "ruleGroup": group["name"],
            }
            for alert in alerts
        ]
        converted.append(
            {"title": group["name"], "folderUid": folder_uid, "interval": interval_s, "rules": rules}
        )
    titles = Counter(rule["title"] for group in converted for rule in group["rules"])
    repeated = [title for title, count in titles.items() if count > 1]
    if repeated:
        raise PushError(
            f"expected alerts of one name to differ in their severity, got twice: {repeated}; rename one"
        )
    return converted


def _title(alert: dict[str, Any], names: Counter[str]) -> str:
    """The alert's name; where several have it, as burn rates that page and that do not, with severity."""
    name: str = alert["alert"]
    severity = alert.get("labels", {}).get("severity")
    return f"{name} {severity}" if names[name] > 1 and severity else name


def seconds(duration: str) -> int:
    """Whole seconds of a duration as Prometheus writes it, as 1m30s."""
    parts = re.findall(r"(\d+)(ms|[smhdwy])", duration)
    if not parts or "".join(map("".join, parts)) != duration:
        raise PushError(f"expected a duration as 30s, 5m or 1h30m, got {duration!r}")
    return int(sum(int(number) * _SECONDS[unit] for number, unit in parts))


def rule_uid(title: str) -> str:
    """The same for the same title, always; one too long for Grafana ends in a hash."""
    uid = re.sub(r"[^a-zA-Z0-9]+", "-", title)
    if len(uid) > _MAX_UID:
        uid = f"{uid[: _MAX_UID - 9]}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"
    return uid


def _rule(alert: dict[str, Any], title: str, datasource_uid: str) -> dict[str, Any]:
    rule = {
        "uid": rule_uid(title),
        "title": title,
        "condition": "C",
        "data": [
            _query("A", datasource_uid, {"expr": alert["expr"], "instant": True, "range": False}),
            _query(
                "B", _EXPRESSION, {"type": "math", "expression": "is_number($A) || is_nan($A) || is_inf($A)"}
            ),
            _query(
                "C",
                _EXPRESSION,
                {
                    "type": "threshold",
                    "expression": "B",
                    "conditions": [{"type": "query", "evaluator": {"type": "gt", "params": [0]}}],
                },
            ),
        ],
        "for": f"{seconds(alert.get('for', '0s'))}s",
        # No series is how Prometheus says that nothing is wrong.
        "noDataState": "OK",
        "execErrState": "Error",
        "isPaused": False,
        "labels": _texts(alert.get("labels", {})),
        "annotations": _texts(alert.get("annotations", {})),
    }
    if "keep_firing_for" in alert:
        rule["keep_firing_for"] = f"{seconds(alert['keep_firing_for'])}s"
    return rule


def _query(ref: str, datasource_uid: str, model: dict[str, Any]) -> dict[str, Any]:
    # Grafana adds the last two to a model that lacks them; said here, they make no difference later.
    common = {"refId": ref, "intervalMs": 1000, "maxDataPoints": 43200}
    kind = _EXPRESSION if datasource_uid == _EXPRESSION else "prometheus"
    return {
        "refId": ref,
        "queryType": "",
        "relativeTimeRange": {"from": 600, "to": 0},
        "datasourceUid": datasource_uid,
        "model": {"datasource": {"type": kind, "uid": datasource_uid}, **common, **model},
    }


def _texts(texts: dict[str, str]) -> dict[str, str]:
    # In Grafana $value is a sentence about all queries; the number is that of query A.
    return {key: re.sub(r"\$value\b", "$values.A.Value", text) for key, text in texts.items()}
