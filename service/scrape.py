"""Read the metrics endpoint back, for the demo and the tests."""

from collections import defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

from service.metrics.spec import MetricSpec


class Scrape:
    """One reading of the metrics endpoint at `url`. Raises httpx.HTTPError when it does not answer."""

    def __init__(self, url: str) -> None:
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        text = httpx.get(url, timeout=10).raise_for_status().text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples[sample.name].append((sample.labels, sample.value))

    def total(self, spec: MetricSpec, suffix: str = "", **labels: str) -> float:
        """Sum over replicas and nodes of the series with these labels; a histogram has suffixes."""
        series = self.samples[spec.prom_name + suffix]
        return sum(value for found, value in series if labels.items() <= found.items())
