"""The service as a subprocess, started the way a user starts it, and what the tests ask of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml
from waiting import free_ports, until

from service.launch import METRICS_PERIOD_S
from service.metrics.log import MERGES, STATE_BYTES
from service.metrics.requests import GENERATED_TOKENS, REQUESTS, RUNNING_REQUESTS
from service.scrape import Scrape

ROOT = Path(__file__).parents[2]
MARK = "DELTALOG_TEST_SERVICE"
MAX_CONCURRENT_REQUESTS = 20
STALL_TIMEOUT_S = 15.0
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60


def configuration(model: Path, **pool: Any) -> dict[str, Any]:
    """A configuration on free ports. Prefill goes in small chunks, so that it takes long enough to leave."""
    port, metrics_port = free_ports(2)
    engine_args = {
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 32,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 24 * 1024**2,
        # A model with random weights would go on with blanks for ever.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    defaults = {
        "name": "test",
        "model": str(model),
        "served_model_name": "demo",
        "max_concurrent_requests": MAX_CONCURRENT_REQUESTS,
        "stall_timeout_s": STALL_TIMEOUT_S,
        "merge_interval": 8,
        "tool_call_parser": "hermes",
    }
    return {
        "port": port,
        "metrics_port": metrics_port,
        "pools": [defaults | {"engine_args": engine_args | pool.pop("engine_args", {})} | pool],
    }


def simulated(step_ms: float, **settings: Any) -> dict[str, Any]:
    """A configuration on free ports whose engines are simulated: two replicas, steps of a fixed time and a
    millisecond more for each prompt token. `pool` changes its pool, the rest the service."""
    port, metrics_port = free_ports(2)
    pool = {
        "name": "test",
        "model": "simulated",
        "served_model_name": "demo",
        "replicas": 2,
        "max_concurrent_requests": 32,
        "sim": {"fixed_ms": step_ms, "per_row_ms": 0, "per_prefill_token_ms": 1, "max_rows": 1000},
    }
    return {
        "port": port,
        "metrics_port": metrics_port,
        "drain_timeout_s": 60,
        "pools": [pool | settings.pop("pool", {})],
    } | settings


def start(config: dict[str, Any], folder: Path) -> "subprocess.Popen[str]":
    """`python -m service serve`, its output in `folder`/output.txt; `stop` finds all that it starts."""
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(config))
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "service", "serve", str(path)],
            cwd=ROOT,
            env=os.environ | {MARK: str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            # A process group of its own, so that a test can signal all of it.
            start_new_session=True,
        )


def descendants(folder: Path) -> dict[int, str]:
    """Live processes of the service started with `folder`, Ray's and vLLM's included, by command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ").strip()
        except (OSError, UnicodeDecodeError):
            continue  # It ended while it was looked at, or is not ours to read.
    return found


@contextmanager
def running(config: dict[str, Any], folder: Path) -> Iterator["RunningService"]:
    """A service of its own; it must stop without a trace."""
    service = RunningService(config, folder, start(config, folder))
    try:
        service.wait_ready()
        yield service
    finally:
        code = service.stop()
    assert code == 0, service.output()
    until(lambda: not descendants(folder), 30, "everything to be gone")


@dataclass
class RunningService:
    """A service that is ready."""

    config: dict[str, Any]
    folder: Path
    process: "subprocess.Popen[str]"
    early_ready: httpx.Response | None = None
    """/health/ready while the model loads."""
    early_completion: httpx.Response | None = None
    """A completion asked for while the model loads."""
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.config['port']}"

    def wait_ready(self) -> None:
        """Poll /health/ready to its first 200, keeping the first refusal and what a request got then."""

        def ready() -> bool:
            assert self.process.poll() is None, self.output()
            try:
                response = httpx.get(f"{self.url}/health/ready", timeout=30)
            except httpx.TransportError:
                return False
            # Before the application's routes are known, Serve's proxy answers 404 for a moment.
            if response.status_code == 503 and self.early_ready is None:
                self.early_ready = response
                self.early_completion = self.post("completions", {"prompt": "x"})
            return response.status_code == 200

        until(ready, START_TIMEOUT_S, "the service to be ready")

    def processes(self, of: str) -> list[int]:
        """Process ids whose command line has `of` in it, of this service."""
        return sorted(pid for pid, name in descendants(self.folder).items() if of in name)

    def engines(self) -> list[int]:
        """Process ids of vLLM's engines: by the title that vLLM gives them or, untitled, as spawned.

        setproctitle finds no place for a title once the first variable of the environment has been changed,
        and Ray hands out its environments in no order: one engine in ten has none.
        """
        return self.processes("EngineCore") + self.processes("multiprocessing.spawn")

    def logs(self) -> str:
        """What the service's own processes have logged."""
        folder = Path(self.output().partition("log to ")[2].split("\n")[0].rstrip("."))
        return "".join(path.read_text() for path in sorted((folder / "serve").glob("replica_*")))

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, endpoint: str, body: dict[str, Any], timeout_s: float = 60) -> httpx.Response:
        """POST to /v1/`endpoint`, for the service's model unless `body` names another."""
        content = json.dumps({"model": "demo"} | body)
        return httpx.post(f"{self.url}/v1/{endpoint}", content=content, timeout=timeout_s)

    def scrape(self) -> Scrape:
        return Scrape(f"http://127.0.0.1:{self.config['metrics_port']}/metrics")

    def settled(self) -> Scrape:
        """The metrics once no request runs and two readings, further apart than the export period, agree."""

        def reading() -> tuple[float, ...]:
            self._last = self.scrape()
            counters = (self._last.total(spec) for spec in (GENERATED_TOKENS, MERGES, STATE_BYTES, REQUESTS))
            return (self._last.total(RUNNING_REQUESTS), *counters)

        before: list[tuple[float, ...]] = [()]

        def stands_still() -> bool:
            previous, before[0] = before[0], reading()
            return before[0] == previous and before[0][0] == 0

        until(stands_still, 60, "the metrics to settle", METRICS_PERIOD_S + 1.5)
        return self._last

    def stop(self) -> int:
        """End it as an impatient user does: what comes once it stops must not disturb it. Its exit code."""
        self.process.send_signal(signal.SIGTERM)
        if self.process.poll() is None and "Stopping" not in self.output():
            until(lambda: "Stopping" in self.output(), 10, "it to begin to stop", period_s=0.05)
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)
