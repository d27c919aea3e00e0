"""docs/metrics.md, from the declarations of the metrics."""

from service.metrics import CATALOGUE
from service.metrics.spec import MetricSpec

HEAD = """# Metrics

Made by `python -m dashboards build` from the declarations in `service/metrics/`; do not edit.

Every series has the labels `pool` and `model`. Ray adds its own, among them `deployment`, `replica` and
`WorkerId`: aggregate with `sum by (pool, model)`, and gauges that all replicas or ingresses repeat with
`max by (pool, model)`. A histogram has the series `_bucket`, `_sum` and `_count`. To see them where
the service runs, by its `metrics_port`:

    curl -s http://127.0.0.1:8090/metrics | grep ray_deltalog
"""
COLUMNS = ("metric", "type", "unit", "labels", "meaning")


def _labels(spec: MetricSpec) -> str:
    # What an info metric carries depends on what is installed.
    values = {name: "..." if spec.unit == "info" else ", ".join(known) for name, known in spec.labels.items()}
    return "; ".join(f"`{name}`: {known}" for name, known in values.items())


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def metrics_page() -> str:
    """The page, one table an area."""
    page = [HEAD]
    for area, specs in CATALOGUE.items():
        page += [f"## {area.capitalize()}\n", _row(*COLUMNS), "|---|---|---|---|---|"]
        page += [
            _row(f"`{spec.prom_name}`", spec.kind, spec.unit, _labels(spec), spec.help) for spec in specs
        ]
        page.append("")
    return "\n".join(page)
