"""A service with API keys: who gets in, what a limit does, what stays secret; many streams; its end."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from load import Stream, all_ended, body, open_streams, reached
from running_service import RunningService, running, simulated
from waiting import until

from service.keys import new_key
from service.metrics.requests import RUNNING_REQUESTS

STREAMS = 2000
SECRETS = {name: new_key() for name in ("free", "requests", "concurrent", "tokens", "misspelt", "spare")}
LIMITS: dict[str, dict[str, int]] = {
    "free": {},
    "requests": {"requests_per_minute": 2},
    "concurrent": {"concurrent_requests": 2},
    "tokens": {"tokens_per_minute": 30},
    "misspelt": {"tokens_per_minute": 30},
}
ROUTES = [
    *(("GET", path) for path in ("/v1/models", "/v1/models/demo", "/version", "/openapi.json", "/nothing")),
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")),
    ("DELETE", "/v1/models"),
]


def write_keys(path: Path, *names: str) -> None:
    entries = [{"name": name, "sha256": SECRETS[name][1]} | LIMITS.get(name, {}) for name in names]
    path.write_text(yaml.safe_dump({"keys": entries}))


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {SECRETS[name][0]}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Steps of 200 ms, of which five travel together, so that 2,000 streams are no load by themselves."""
    folder = tmp_path_factory.mktemp("keys")
    write_keys(folder / "keys.yaml", *LIMITS)
    pool = {"max_concurrent_requests": STREAMS // 2, "coalesce_ms": 1000}
    config = simulated(200, keys_file=str(folder / "keys.yaml"), pool=pool)
    with running(config, folder) as service:
        yield service


def ask(service: RunningService, key: str, **options: Any) -> httpx.Response:
    return httpx.post(
        f"{service.url}/v1/completions",
        json={"model": "demo", "prompt": "a b c", "max_tokens": 1} | options,
        headers=bearer(key),
        timeout=60,
    )


@pytest.mark.parametrize("presented", [None, "Bearer wrong", "Bearer", "Basic wrong", SECRETS["free"][0]])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_without_a_key(
    guarded: RunningService, method: str, path: str, presented: str | None
) -> None:
    headers = {"authorization": presented} if presented else {}
    response = httpx.request(method, guarded.url + path, headers=headers, content=b"{}")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_health_needs_none(guarded: RunningService) -> None:
    for path in ("/health", "/health/ready"):
        assert httpx.get(guarded.url + path).status_code == 200


def test_the_openai_client_with_its_key(guarded: RunningService) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=SECRETS["free"][0], max_retries=0)
    assert client.completions.create(model="demo", prompt="a", max_tokens=2).usage
    with pytest.raises(openai.AuthenticationError, match="expected a valid API key; got another one"):
        client.with_options(api_key="wrong").models.list()


def refusal(response: httpx.Response) -> tuple[int, str, int]:
    return response.status_code, response.json()["error"]["code"], int(response.headers["retry-after"])


def test_requests_a_minute(guarded: RunningService) -> None:
    assert [ask(guarded, "requests").status_code for _ in range(2)] == [200, 200]
    status, code, wait_s = refusal(ask(guarded, "requests"))
    assert (status, code) == (429, "key_requests_per_minute")
    assert 1 <= wait_s <= 30


def test_tokens_a_minute(guarded: RunningService) -> None:
    assert ask(guarded, "tokens", max_tokens=40).status_code == 200
    status, code, wait_s = refusal(ask(guarded, "tokens"))
    assert (status, code) == (429, "key_tokens_per_minute")
    # 43 were taken of 30; half a one comes back a second.
    assert 1 <= wait_s <= 28


def test_a_request_for_no_model_takes_no_tokens(guarded: RunningService) -> None:
    for _ in range(2):
        assert ask(guarded, "misspelt", model="nope", prompt="a" * 100_000).status_code == 404
    assert ask(guarded, "misspelt").status_code == 200


def test_calls_between_processes_may_be_larger_than_grpcs_own_bound(guarded: RunningService) -> None:
    """4 MiB; the body may have 16."""
    assert ask(guarded, "free", prompt="b" * 5_000_000).status_code == 200


def test_requests_at_a_time(guarded: RunningService) -> None:
    async def run() -> None:
        streams = await open_streams(guarded.config["port"], [body(100)] * 2, **bearer("concurrent"))
        await reached(lambda: all(stream.events for stream in streams), 30, "both to run")
        assert refusal(await asyncio.to_thread(ask, guarded, "concurrent")) == (
            429,
            "key_concurrent_requests",
            1,
        )
        for stream in streams:
            stream.transport.abort()

    asyncio.run(run())
    until(lambda: ask(guarded, "concurrent").status_code == 200, 10, "its places to be free again")


def test_keys_change_without_a_restart(guarded: RunningService) -> None:
    path = Path(guarded.config["keys_file"])
    assert ask(guarded, "spare").status_code == 401
    write_keys(path, *LIMITS, "spare")
    until(lambda: ask(guarded, "spare").status_code == 200, 10, "the new key to be known")
    path.write_text("keys: [")
    time.sleep(2)
    assert ask(guarded, "spare").status_code == 200, "a file that is wrong changes nothing"
    write_keys(path, *LIMITS)
    until(lambda: ask(guarded, "spare").status_code == 401, 10, "the key to be gone")


def test_two_thousand_streams_at_once(guarded: RunningService) -> None:
    async def run() -> None:
        streams: list[Stream] = []

        def accepted() -> bool:
            return all(stream.status for stream in streams)

        # A step takes 200 ms; the first streams have to outlast the opening of the last.
        for _ in range(0, STREAMS, 100):
            streams += await open_streams(guarded.config["port"], [body(1000)] * 100, **bearer("free"))
            await reached(accepted, 60, "a hundred more to be accepted")
        await reached(lambda: all(stream.events for stream in streams), 60, "every stream to have a token")
        assert not any(stream.ended.done() for stream in streams), "all 2,000 are open"
        for stream in streams:
            stream.transport.abort()

    asyncio.run(run())
    until(lambda: guarded.scrape().total(RUNNING_REQUESTS) == 0, 60, "all of them to be stopped again")


def test_keys_and_prompts_stay_out_of_logs_and_metrics(guarded: RunningService) -> None:
    prompt = "a secret that nobody else should read"
    assert ask(guarded, "free", prompt=prompt).status_code == 200
    ask(guarded, "free", prompt=prompt, max_tokens=-1)
    headers = {"authorization": "Bearer sk-mistyped", "x-request-id": "the-last-of-them"}
    httpx.get(f"{guarded.url}/v1/models", headers=headers)
    until(lambda: "the-last-of-them" in guarded.logs(), 10, "all to be logged")
    logs = Path(guarded.output().partition("log to ")[2].split("\n")[0].rstrip("."))
    written = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file()}
    written[Path("metrics")] = httpx.get(f"http://127.0.0.1:{guarded.config['metrics_port']}/metrics").content
    written[Path("output")] = guarded.output().encode()
    never = [prompt, "sk-mistyped", *(secret for secret, _ in SECRETS.values())]
    found = [(path, text) for path, content in written.items() for text in never if text.encode() in content]
    assert not found


def test_each_request_is_one_line_of_json(guarded: RunningService) -> None:
    headers = bearer("free") | {"x-request-id": "my-own-id"}
    asked = {"model": "demo", "prompt": "a b", "max_tokens": 3}
    answer = httpx.post(f"{guarded.url}/v1/completions", json=asked, headers=headers, timeout=30)
    assert answer.headers["x-request-id"] == "my-own-id"
    assert answer.json()["id"] == "cmpl-my-own-id"
    logs = Path(guarded.output().partition("log to ")[2].split("\n")[0].rstrip("."))

    def lines() -> list[dict[str, Any]]:
        texts = [path.read_text() for path in (logs / "serve").glob("*ingress*")]
        return [json.loads(line) for text in texts for line in text.splitlines() if "my-own-id" in line]

    (line,) = until(lines, 10, "the line")
    expected = {"key": "free", "status": 200, "outcome": "ok", "prompt_tokens": 2, "generated_tokens": 3}
    assert {name: line[name] for name in expected} == expected


def test_it_stops_without_cutting_streams(guarded: RunningService) -> None:
    """The last test of this service: SIGTERM, to its whole process group, while streams of 20 s run."""

    async def run() -> None:
        streams = await open_streams(guarded.config["port"], [body(100)] * 64, **bearer("free"))
        await reached(lambda: all(stream.events for stream in streams), 30, "every stream to begin")
        os.killpg(guarded.process.pid, signal.SIGTERM)
        await reached(lambda: "Stopping" in guarded.output(), 10, "it to begin to stop")

        def refused() -> bool:
            response = ask(guarded, "free")
            assert response.status_code in (200, 503)
            assert response.status_code == 200 or int(response.headers["retry-after"]) > 0
            return response.status_code == 503

        await asyncio.to_thread(until, refused, 15, "new requests to be refused")
        assert not any(stream.ended.done() for stream in streams)
        await all_ended(streams, 60)
        assert all(stream.done and stream.events == 100 for stream in streams)

    asyncio.run(run())
