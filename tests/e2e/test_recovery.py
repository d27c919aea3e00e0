"""An engine that dies: streams say so, requests are refused at once, and the service comes back by itself."""

import json
import os
import signal
from typing import Any

import httpx
from running_service import RunningService, descendants


def test_an_engine_that_dies_is_replaced(service: RunningService) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": "x",
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as stream:
        events = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        first = next(events)
        (engine,) = (pid for pid, name in descendants(service.folder).items() if "EngineCore" in name)
        os.kill(engine, signal.SIGKILL)
        *_, last = events
    assert "choices" in json.loads(first)
    assert json.loads(last)["error"]["code"] == "engine_dead", (
        "a broken stream ends with an error, not [DONE]"
    )

    refused = service.post("completions", {"prompt": "x"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert httpx.get(f"{service.url}/health/ready", timeout=30).status_code == 503
    assert httpx.get(f"{service.url}/health").status_code == 200

    service.wait_ready()
    answer = service.post("completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3
