"""Real Prometheus and Alertmanager on this machine, for tests that scrape, evaluate and receive."""

import math
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from waiting import free_ports, until

from deploy.setup_tools import TOOLS, found

START_TIMEOUT_S = 30


def binary(name: str) -> str:
    """Path of a program of Prometheus or Alertmanager; LookupError says how to get it."""
    path = found(name)
    if path is None:
        raise LookupError(f"expected {name} on the path or in .cache/tools; got none; run `make tools`")
    return path


@dataclass(frozen=True)
class Server:
    """One that runs: where it listens."""

    url: str

    def get(self, path: str, **parameters: str | float) -> Any:
        """The `data` of an answer of Prometheus's API. An error's text is in the exception."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10).json()
        assert answer["status"] == "success", f"{path} {parameters}: {answer.get('error')}"
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant query: `metric` and `value`."""
        return self.get("query", query=expr)["result"]

    def value(self, expr: str) -> float:
        """Of an expression that has one series at most; NaN if it has none."""
        series = self.query(expr)
        assert len(series) <= 1, f"{expr}: expected one series; got {len(series)}; aggregate it"
        return float(series[0]["value"][1]) if series else math.nan

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        """Series of a range query: `metric` and `values`."""
        return self.get("query_range", query=expr, start=start_s, end=end_s, step=step_s)["result"]

    def firing(self) -> set[str]:
        """Names of the alerts that fire now, in Prometheus."""
        return {
            alert["labels"]["alertname"]
            for alert in self.get("alerts")["alerts"]
            if alert["state"] == "firing"
        }


@contextmanager
def running_prometheus(
    folder: Path,
    targets: Sequence[str],
    rules_text: str,
    scrape_interval_s: float = 1,
    alertmanager: Server | None = None,
) -> Iterator[Server]:
    """Prometheus that scrapes `targets` (host:port), evaluates the rules, sends alerts; all in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rules.yaml").write_text(rules_text)
    interval = f"{round(1000 * scrape_interval_s)}ms"
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "deltalog", "static_configs": [{"targets": list(targets)}]}],
    }
    if alertmanager is not None:
        receivers = [{"targets": [alertmanager.url.removeprefix("http://")]}]
        config["alerting"] = {"alertmanagers": [{"static_configs": receivers}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        binary("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        # Else an alert that stays is not sent again within a short test.
        "--rules.alert.resend-delay=1s",
    ]
    with _running(command, folder / "prometheus.log", address) as server:
        yield server


@contextmanager
def running_alertmanager(folder: Path, webhook_url: str) -> Iterator[Server]:
    """Alertmanager that posts each alert to `webhook_url` as it fires and as it resolves."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "route": {
            "receiver": "test",
            "group_by": ["alertname", "severity", "pool", "model", "metric"],
            "group_wait": "100ms",
            "group_interval": "1s",
            "repeat_interval": "1h",
        },
        "receivers": [{"name": "test", "webhook_configs": [{"url": webhook_url, "send_resolved": True}]}],
    }
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        binary("prometheus-alertmanager"),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    with _running(command, folder / "alertmanager.log", address) as server:
        yield server


@contextmanager
def _running(command: list[str], log: Path, address: str) -> Iterator[Server]:
    # A proxy of the environment has no business between programs of one machine.
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    url = f"http://{address}"
    # Where one that was unpacked there finds its files.
    cwd = TOOLS if TOOLS.is_dir() else None

    def ready() -> bool:
        assert process.poll() is None, f"{command[0]} ended: {log.read_text()[-2000:]}"
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/-/ready", timeout=2).status_code == 200
        return False

    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            until(ready, START_TIMEOUT_S, f"{command[0]} at {address}")
            yield Server(url)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
