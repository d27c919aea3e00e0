"""A client that leaves stops generation within a second, and what it held is used again correctly."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from running_service import RunningService

from service.metrics.requests import GENERATED_TOKENS, REQUESTS, RUNNING_REQUESTS

FOREVER = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "Once more, from the start.", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@contextmanager
def left_behind(service: RunningService) -> Iterator[dict[str, float]]:
    """One request, left by its client: what the metrics count from before it until nothing runs."""
    before = service.settled()
    counted: dict[str, float] = {}
    yield counted
    after = service.settled()
    counted["tokens"] = after.total(GENERATED_TOKENS) - before.total(GENERATED_TOKENS)
    counted["aborted"] = after.total(REQUESTS, outcome="aborted") - before.total(REQUESTS, outcome="aborted")
    assert after.total(RUNNING_REQUESTS) == 0


def tokens_per_s(service: RunningService) -> float:
    """How fast one stream runs on this machine just now; asked before and after, the load may change."""
    started = time.monotonic()
    response = service.post("completions", {"prompt": "x", **FOREVER, "max_tokens": 100})
    assert response.json()["usage"]["completion_tokens"] == 100
    return 100 / (time.monotonic() - started)


def test_leaving_a_stream(service: RunningService) -> None:
    rate = tokens_per_s(service)
    body = {"model": "demo", "prompt": "x", "stream": True} | FOREVER
    with (
        left_behind(service) as counted,
        httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        received = sum(bool(next(lines)) for _ in range(100))
    assert counted["aborted"] == 1
    assert received <= counted["tokens"] <= received + max(rate, tokens_per_s(service))


def test_leaving_a_plain_request(service: RunningService) -> None:
    rate, waited_s = tokens_per_s(service), 2.0
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    with left_behind(service) as counted, pytest.raises(httpx.ReadTimeout):
        service.post("chat/completions", body | FOREVER, timeout_s=waited_s)
    assert counted["aborted"] == 1
    assert 0 < counted["tokens"] <= (waited_s + 1) * max(rate, tokens_per_s(service))


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_during_prefill(service: RunningService, stream: bool) -> None:
    # Another first token each time, or the prefix cache would have the state.
    first = random.randrange(100, 900)
    body = {"prompt": [first, *[100 + index % 800 for index in range(3600)]], "stream": stream}
    with left_behind(service) as counted, pytest.raises(httpx.ReadTimeout):
        # 113 steps of 32 tokens take twice that where a step takes 2 ms.
        service.post("completions", body | FOREVER | {"max_tokens": 300}, timeout_s=0.1)
    assert counted == {"tokens": 0, "aborted": 1}


def test_what_was_left_is_used_again_correctly(service: RunningService) -> None:
    """Enough requests to take every state page of the engine once more, those left behind included."""
    fresh = service.post("completions", SHORT).json()["choices"][0]["text"]
    for index in range(4):
        with pytest.raises(httpx.ReadTimeout):
            service.post("completions", {"prompt": f"Noise {index}.", **FOREVER}, timeout_s=0.5)
    texts = {service.post("completions", SHORT).json()["choices"][0]["text"] for _ in range(45)}
    assert texts == {fresh}
