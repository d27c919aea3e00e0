"""What the service refuses: the status, OpenAI's shape, what to do; and the next request is served."""

import asyncio
import socket
from typing import Any

import httpx
import openai
import pytest
from running_service import MAX_CONCURRENT_REQUESTS, RunningService
from waiting import until

LONG = "word " * 5000
VLLM_ROUTES = [
    *("/load", "/ping", "/invocations", "/server_info", "/collective_rpc", "/pause", "/resume", "/sleep"),
    *("/wake_up", "/reset_prefix_cache", "/start_profile", "/update_weights", "/abort_requests"),
    *("/scale_elastic_ep", "/v1/load_lora_adapter", "/v1/responses", "/v1/messages", "/v1/embeddings"),
]
SERVE_ROUTES = ["/-/routes", "/-/healthz", "/%2D/routes", "/-/ROUTES"]


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.fixture(autouse=True)
def the_next_request_is_served(service: RunningService) -> Any:
    yield
    assert service.post("completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'"model"', b"null"], ids=repr)
def test_malformed_bodies(service: RunningService, content: bytes) -> None:
    error = refusal(httpx.post(f"{service.url}/v1/completions", content=content, timeout=60), 400)
    assert error["message"].startswith("expected a JSON object; got")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "header", ["serve-multiplexed_model-id", "serve_multiplexed_model_id", "x-session-id"]
)
def test_headers_of_serves_own_are_none_of_ours(service: RunningService, header: str) -> None:
    answer = httpx.get(f"{service.url}/v1/models", headers=[(header.encode(), b"\xff")])
    assert answer.status_code == 200


def test_a_trailer_is_no_header(service: RunningService) -> None:
    body = b'{"model": "demo", "prompt": "x", "max_tokens": 1}'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        b"%x\r\n%b\r\n0\r\nx-request-id: behind\r\nx-request-timeout-seconds: 0.001\r\n\r\n"
        % (len(body), body)
    )
    with socket.create_connection(("127.0.0.1", service.config["port"]), timeout=60) as client:
        client.sendall(request)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"behind" not in answer


def test_two_request_ids(service: RunningService) -> None:
    twice = [(b"x-request-id", b"ok"), (b"x-request-id", b"\xff")]
    for headers in (twice, [(b"x-request-id", b"ok,\xff")]):
        answer = httpx.get(f"{service.url}/v1/models", headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "x-request-id"


@pytest.mark.parametrize("request_id", [b"\xff", b"two words", b"x" * 129], ids=["byte", "space", "long"])
def test_wrong_request_ids(service: RunningService, request_id: bytes) -> None:
    headers = {b"x-request-id": request_id}
    error = refusal(httpx.get(f"{service.url}/v1/models", headers=headers, timeout=60), 400)
    assert error["param"] == "x-request-id"


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
def test_a_body_that_is_too_large(service: RunningService, chunked: bool) -> None:
    chunks = [b" " * 2**20] * 17
    content = iter(chunks) if chunked else b"".join(chunks)
    error = refusal(httpx.post(f"{service.url}/v1/completions", content=content, timeout=60), 413)
    assert error["code"] == "body_too_large"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "stop": 5}, "stop"),
        ({"prompt": "x", "seed": 2**70}, "seed"),
        ({"prompt": "x", "logprobs": 500}, "logprobs"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": 5}, "prompt"),
        ({}, "prompt"),
        ({"prompt": LONG}, "input_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_completions(service: RunningService, body: dict[str, Any], param: str, stream: bool) -> None:
    error = refusal(service.post("completions", body | {"stream": stream}), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "hello"},
        {"messages": []},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": -5},
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": 5},
    ],
    ids=lambda body: str(body)[:60],
)
def test_wrong_chats(service: RunningService, body: dict[str, Any]) -> None:
    refusal(service.post("chat/completions", body), 400)


def test_the_client_sees_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="demo", prompt="x", max_tokens=-1)
    with pytest.raises(openai.NotFoundError, match="got 'other'") as unknown:
        client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"


def test_unknown_models_routes_and_methods(service: RunningService) -> None:
    assert refusal(service.post("completions", {"model": "other", "prompt": "x"}), 404)["param"] == "model"
    assert refusal(service.post("completions", {"model": None, "prompt": "x"}), 400)["param"] == "model"
    refusal(httpx.get(f"{service.url}/v1/nothing"), 404)
    wrong_method = httpx.get(f"{service.url}/v1/completions")
    refusal(wrong_method, 405)
    assert wrong_method.headers["allow"] == "POST"


@pytest.mark.parametrize("path", [*VLLM_ROUTES, *SERVE_ROUTES, "/docs", "/redoc", "/metrics"])
def test_no_other_route_is_exposed(service: RunningService, path: str) -> None:
    for method in ("GET", "POST"):
        assert refusal(httpx.request(method, service.url + path), 404)["code"] == "not_found"


def test_nobody_waits_for_a_model_that_loads(service: RunningService) -> None:
    assert service.early_ready is not None, "the service was ready before it could be asked"
    assert service.early_completion is not None
    for response in (service.early_ready, service.early_completion):
        assert refusal(response, 503)["code"] == "not_ready"
        assert int(response.headers["retry-after"]) > 0
        # At once, but for an ingress that starts at the same time; loading the model takes half a minute.
        assert response.elapsed.total_seconds() < 15


def test_alive_and_ready(service: RunningService) -> None:
    assert httpx.get(f"{service.url}/health").json() == {"status": "alive"}
    assert httpx.get(f"{service.url}/health/ready").json() == {"status": "ready"}


def test_a_full_pool_says_when_to_come_back(service: RunningService) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    refused: list[httpx.Response] = []

    async def ask(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", f"{service.url}/v1/completions", json=body) as response:
            await response.aread()
            refused.append(response)

    async def ask_for_more_than_fits() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            asking = [asyncio.create_task(ask(client)) for _ in range(MAX_CONCURRENT_REQUESTS + 4)]
            async with asyncio.timeout(10):
                while len(refused) < 4:
                    await asyncio.wait([task for task in asking if not task.done()], timeout=0.1)
            for task in asking:
                task.cancel()

    asyncio.run(ask_for_more_than_fits())
    assert len(refused) == 4
    for response in refused:
        error = refusal(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "pool_full")
        assert f"at most {MAX_CONCURRENT_REQUESTS} requests" in error["message"]
        assert int(response.headers["retry-after"]) > 0
    until(lambda: service.post("completions", {"prompt": "x", "max_tokens": 1}).is_success, 10, "room again")
