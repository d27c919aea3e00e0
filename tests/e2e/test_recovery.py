"""An engine that dies: what it held ends with an error, requests are refused, and the service comes back."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from running_service import RunningService, descendants, until

from service.metrics import REQUESTS, RUNNING_REQUESTS


def test_an_engine_that_dies_is_replaced(service: RunningService) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    url = f"{service.url}/v1/completions"
    before = service.settled()

    def counted(outcome: str) -> float:
        return service.scrape().total(REQUESTS, outcome=outcome) - before.total(REQUESTS, outcome=outcome)

    with (
        ThreadPoolExecutor() as threads,
        httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream,
    ):
        plain = threads.submit(service.post, "completions", body)
        until(lambda: service.scrape().total(RUNNING_REQUESTS) == 2, 10, "both requests to run")
        events = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        first = next(events)
        (engine,) = (pid for pid, name in descendants(service.folder).items() if "EngineCore" in name)
        os.kill(engine, signal.SIGKILL)
        *_, last = events
    assert "choices" in json.loads(first)
    assert json.loads(last)["error"]["code"] == "engine_dead", (
        "a broken stream ends with an error, not [DONE]"
    )
    assert plain.result().status_code == 503
    assert plain.result().json()["error"]["code"] == "engine_dead"

    refused = service.post("completions", {"prompt": "x"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert httpx.get(f"{service.url}/health/ready", timeout=30).status_code == 503
    assert httpx.get(f"{service.url}/health").status_code == 200
    # The refusal is counted last.
    until(lambda: counted("rejected"), 10, "the refusal to be counted")
    assert (counted("error"), counted("rejected")) == (2, 1), "a request that was accepted is not rejected"

    service.wait_ready()
    answer = service.post("completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3
