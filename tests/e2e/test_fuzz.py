"""Requests that went wrong on the way: each gets a proper answer, and the service goes on."""

import asyncio
import copy
import json
import random
from typing import Any

import httpx
import pytest
from running_service import RunningService

SEED = 20_261_130
CONCURRENT = 8
ROUTES = {
    "/v1/completions": {"model": "demo", "prompt": "a b c", "max_tokens": 2, "temperature": 0.5, "n": 1},
    "/v1/chat/completions": {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "stop": ["x"],
    },
    "/tokenize": {"model": "demo", "prompt": "a b c"},
    "/detokenize": {"model": "demo", "tokens": [1, 2, 3]},
}
FURTHER = [
    *("stream", "stream_options", "stop", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice"),
    *("response_format", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "top_p"),
    *("top_k", "seed", "user", "echo", "best_of", "suffix", "priority", "prompt_logprobs", "bad_words"),
    *("allowed_token_ids", "structured_outputs", "max_completion_tokens", "kv_transfer_params", "vllm_xargs"),
    *("truncate_prompt_tokens", "add_special_tokens", "cache_salt", "request_id"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, "", "x", "demo", "\x00"),
    *("\ud83d\ude00" * 3, "a" * 5000, [], [[]], [None], ["x", 1], [-1], [2**40], {}, {"x": {}}, {"0": 1}),
    *({"type": "json_object"}, {"type": "json_schema"}, [{"type": "function"}], {"include_usage": 1}),
]
ANSWERS = {200, 400, 401, 404, 405, 408, 413, 429}


def mutated(body: dict[str, Any], chance: random.Random) -> bytes:
    """The body with a few wrong values, or its bytes damaged."""
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice([*body, *FURTHER])
        if chance.random() < 0.15:
            body.pop(name, None)
        else:
            body[name] = chance.choice(VALUES)
    raw = bytearray(json.dumps(body).encode())
    if chance.random() < 0.3:
        for _ in range(chance.randint(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
    if chance.random() < 0.05:
        del raw[chance.randrange(len(raw)) :]
    return bytes(raw)


async def send(service: RunningService, number: int) -> list[str]:
    """What went wrong with `number` requests."""
    chance = random.Random(SEED)
    requests = [(path, mutated(ROUTES[path], chance)) for path in chance.choices(list(ROUTES), k=number)]
    faults: list[str] = []

    async def worker(client: httpx.AsyncClient) -> None:
        while requests:
            path, raw = requests.pop()
            try:
                response = await client.post(service.url + path, content=raw)
            except httpx.ReadTimeout:
                continue  # It asked for very many tokens; leaving stops them.
            if response.status_code not in ANSWERS:
                faults.append(f"{response.status_code} {path} {raw[:300]!r} {response.text[:300]}")
            elif response.status_code >= 400 and "message" not in response.json()["error"]:
                faults.append(f"no message: {path} {raw[:300]!r}")

    async with httpx.AsyncClient(timeout=3) as client:
        await asyncio.gather(*(worker(client) for _ in range(CONCURRENT)))
    return faults


@pytest.mark.parametrize(
    "number", [500, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_mutated_requests(service: RunningService, number: int) -> None:
    faults = asyncio.run(send(service, number))
    assert not faults, f"{len(faults)}: " + "\n".join(faults[:20])
    answer = service.post("completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3
