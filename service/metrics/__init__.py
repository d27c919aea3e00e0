"""The metrics of the service: each declared once, beside the code that feeds it.

Ray exports them on the metrics port of each node under the name `ray_<name>` and adds labels of its own
(`deployment`, `replica`, `application`, `WorkerId`, ...): aggregate with `sum by (pool, model)`.
"""

from service.metrics import log, replicas, requests, routing, scheduler, steps
from service.metrics.spec import MetricSpec

CATALOGUE: dict[str, tuple[MetricSpec, ...]] = {
    title: tuple(value for value in vars(module).values() if isinstance(value, MetricSpec))
    for title, module in {
        "requests": requests,
        "steps": steps,
        "scheduler": scheduler,
        "log": log,
        "routing": routing,
        "replicas": replicas,
    }.items()
}
"""Every metric, by area."""

SPECS = tuple(spec for area in CATALOGUE.values() for spec in area)
