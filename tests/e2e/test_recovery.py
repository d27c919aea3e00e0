"""An engine that dies, stands still or is configured anew: what becomes of requests, and of the service."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import yaml
from running_service import RunningService
from waiting import until

from service.metrics.log import MERGE_INTERVAL, STATE_BYTES, WRITE_THROUGH_BYTES
from service.metrics.requests import REQUESTS, RUNNING_REQUESTS


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
        (engine,) = service.engines()
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
    ready = f"{service.url}/health/ready"
    until(lambda: httpx.get(ready, timeout=30).status_code == 503, 5, "the loss to be known", period_s=0.05)
    assert httpx.get(f"{service.url}/health").status_code == 200
    # The refusal is counted last.
    until(lambda: counted("rejected"), 10, "the refusal to be counted")
    assert (counted("error"), counted("rejected")) == (2, 1), "a request that was accepted is not rejected"

    service.wait_ready()
    answer = service.post("completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3


def stop_engine(service: RunningService) -> int:
    """The engine's process stands still, with all that it holds."""
    (engine,) = service.engines()
    os.kill(engine, signal.SIGSTOP)
    return engine


def test_an_engine_that_stalls_for_5_seconds_loses_nothing(service: RunningService) -> None:
    # Long enough to be seen running: metrics come every four seconds.
    body: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 1000, "ignore_eos": True}
    started_at_s = time.monotonic()
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(service.post, "completions", body, 120) for _ in range(4)]
        until(lambda: service.scrape().total(RUNNING_REQUESTS) == 4, 20, "the requests to run")
        engine = stop_engine(service)
        asked.append(threads.submit(service.post, "completions", body, 120))
        time.sleep(5)
        os.kill(engine, signal.SIGCONT)
        answers = [one.result().json()["usage"]["completion_tokens"] for one in asked]
    assert answers == [1000] * 5
    assert time.monotonic() - started_at_s > 5
    assert service.engines() == [engine]


def test_an_engine_that_stalls_for_longer_is_replaced(service: RunningService) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as stream:
        events = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        next(events)
        stalled = stop_engine(service)
        *_, last = events
    assert json.loads(last)["error"]["code"] == "replica_lost"
    until(lambda: stalled not in service.engines(), 30, "the stalled engine to be gone")
    service.wait_ready()
    answer = service.post("completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_configuration_that_does_not_start_is_taken_back(service: RunningService) -> None:
    """SIGHUP with more context than the model has: no replica of it starts."""
    (pool,) = service.config["pools"]
    wrong = pool | {"engine_args": pool["engine_args"] | {"max_model_len": 10_000_000}}
    (service.folder / "service.yaml").write_text(yaml.safe_dump(service.config | {"pools": [wrong]}))
    goes_on = "The service goes on as it was configured"
    service.process.send_signal(signal.SIGHUP)
    until(lambda: goes_on in service.output(), 180, "it to be taken back")
    assert "max_model_len" in service.output().partition(goes_on)[2]
    service.wait_ready()
    assert service.post("completions", {"prompt": "x", "max_tokens": 3}).status_code == 200


def test_deltalog_is_switched_off_in_place(service: RunningService) -> None:
    """SIGHUP with a merge interval of 1: every token is written through, in the tests after it too."""
    (pool,) = service.config["pools"]
    config = service.config | {"pools": [pool | {"merge_interval": 1}]}
    (service.folder / "service.yaml").write_text(yaml.safe_dump(config))
    (engine,), said = service.engines(), service.output().count("The new configuration serves.")
    service.process.send_signal(signal.SIGHUP)
    until(lambda: service.output().count("The new configuration serves.") > said, 120, "it to be rolled out")
    assert engine not in service.engines()
    service.wait_ready()
    until(lambda: service.scrape().total(MERGE_INTERVAL) == 1, 30, "the merge interval")
    before = service.settled()
    answer = service.post("completions", {"prompt": "x", "max_tokens": 33, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 33
    after = service.settled()
    written, write_through = (
        after.total(spec, direction="write") - before.total(spec, direction="write")
        for spec in (STATE_BYTES, WRITE_THROUGH_BYTES)
    )
    assert written == write_through > 0
