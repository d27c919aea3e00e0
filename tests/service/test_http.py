"""Request bodies in, server-sent events out."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from service.api import http
from service.api.http import MAX_BODY_BYTES, MAX_DEPTH, MAX_SEQUENCES, events, parse_body, read_body, respond
from service.api.ingress import report
from service.engine.protocol import Answer, Message, Usage
from service.errors import ApiError
from service.keys import Lease


def test_a_body_is_passed_on_as_it_came() -> None:
    body = {"model": "demo", "prompt": "x", "anything": [1, None]}
    assert parse_body(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    ("raw", "status", "what"),
    [
        (b"", 400, "got an empty body"),
        (b"{", 400, "line 1 column 2"),
        (b"\xff\xfe", 400, "can't decode byte 0xff"),
        (b'{"model": "\\ud800"}', 400, "surrogates not allowed"),
        (b'{"model": "m", "n": 129}', 400, "at most 128 sequences"),
        (b'{"model": "m", "n": 1e300}', 400, "at most 128 sequences"),
        (b'{"model": "m", "n": "5000"}', 400, "n: expected a number; got '5000'"),
        (b'{"model": "m", "stream_interval": 1000}', 400, "expected no such setting"),
        (b'{"model": "m", "n": 2, "prompt": [' + b'"x",' * 64 + b'"x"]}', 400, "2 for each of 65 prompts"),
        (b'{"model": "m", "prompt": [' + b'"x",' * 128 + b'"x"]}', 400, "at most 128 prompts"),
        (b'{"model": "m", "x": ' + b"[" * 65 + b"]" * 65 + b"}", 400, "more than 64 levels"),
        (b'{"model": "m", "x": [' + b"[]," * 500_000 + b"[]]}", 400, "lists and objects"),
        (b"[" * 100_000, 400, "expected a JSON object"),
        (b"[]", 400, "got list"),
        (b"null", 400, "got NoneType"),
        (b"5", 400, "got int"),
        (b'{"model": "m", "temperature": NaN}', 400, "the number NaN"),
        (
            b'{"model": "m", "structured_outputs": {"choice": ["' + b"a" * 2**15 + b'"]}}',
            400,
            "at most 32768",
        ),
        (b"{}", 400, "model: expected the name of a model; got None"),
        (b'{"model": 5}', 400, "model: expected the name of a model; got 5"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_body_is_refused(raw: bytes, status: int, what: str) -> None:
    with pytest.raises(ApiError, match="expected") as refusal:
        parse_body(raw)
    assert refusal.value.status == status
    assert what in str(refusal.value)


CHUNK = b" " * (MAX_BODY_BYTES // 4)


class Upload:
    """A client that sends `CHUNK` after `CHUNK`, `left` times, and counts what was taken of it."""

    def __init__(self, left: int) -> None:
        self.left, self.taken = left, 0

    async def receive(self) -> dict[str, Any]:
        self.left, self.taken = self.left - 1, self.taken + 1
        return {"type": "http.request", "body": CHUNK, "more_body": self.left > 0}

    def request(self, *headers: tuple[bytes, bytes]) -> Request:
        return Request({"type": "http", "headers": headers}, self.receive)


@pytest.mark.asyncio
async def test_a_body_may_be_as_large_as_the_bound() -> None:
    assert await read_body(Upload(4).request()) == CHUNK * 4


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("headers", "taken"),
    [([(b"content-length", str(MAX_BODY_BYTES + 1).encode())], 0), ([], 5)],
    ids=["declared", "chunked"],
)
async def test_no_more_is_taken_of_a_body_that_is_too_large(
    headers: list[tuple[bytes, bytes]], taken: int
) -> None:
    upload = Upload(1000)
    with pytest.raises(ApiError, match=f"at most {MAX_BODY_BYTES} bytes") as refusal:
        await read_body(upload.request(*headers))
    assert refusal.value.status == 413
    assert upload.taken == taken


async def stream(*messages: Message) -> AsyncGenerator[Message, None]:
    for message in messages:
        yield message


@pytest.mark.asyncio
async def test_events_pass_through() -> None:
    sent = ["data: {}\n\n", "data: [DONE]\n\n"]
    assert [text async for text in events(stream(*sent), Lease())] == sent


@pytest.mark.asyncio
async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    failure = Answer.of(ApiError(503, "gone", code="replica_lost"))
    *_, last = [text async for text in events(stream("data: {}\n\n", failure), Lease())]
    assert last.startswith("data: ")
    assert last.endswith("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"


@pytest.mark.asyncio
async def test_leaving_the_events_closes_what_makes_them() -> None:
    closed = []

    async def endless() -> AsyncGenerator[Message, None]:
        try:
            while True:
                yield "data: {}\n\n"
        finally:
            closed.append(True)

    reader = events(endless(), Lease())
    await anext(reader)
    await reader.aclose()
    assert closed == [True]


@pytest.mark.asyncio
async def test_a_stream_charges_what_it_took() -> None:
    """Events while it runs, for a client that leaves; the usage once it is known."""
    lease = Lease()
    messages = ["data: 1\n\n", "data: 2\n\ndata: 3\n\n", "data: [DONE]\n\n", Usage(10, 3)]
    assert [lease.tokens async for _ in events(stream(*messages), lease)] == [1, 3, 4]
    assert lease.tokens == 13


@pytest.mark.asyncio
async def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.05)

    async def silent() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ApiError, match="expected the whole body within") as refusal:
        await read_body(Request({"type": "http", "headers": []}, silent))
    assert refusal.value.status == 408


def test_what_is_within_the_limits_is_taken() -> None:
    nested = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    tokens = list(range(MAX_SEQUENCES * 2))
    raw = json.dumps({"model": "m", "n": MAX_SEQUENCES, "prompt": tokens}).encode()
    assert parse_body(raw)["prompt"] == tokens
    floats = [1.0] * (MAX_SEQUENCES + 1)
    assert parse_body(json.dumps({"model": "m", "prompt": floats}).encode())["prompt"] == floats
    assert parse_body(f'{{"model": "m", "x": {nested}}}'.encode())["model"] == "m"


def test_a_refusal_carries_its_headers() -> None:
    response = respond(Answer.of(ApiError(429, "full")))
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) > 0
    assert response.media_type == "application/json"


@pytest.mark.asyncio
async def test_a_wrong_method_is_told_the_right_one() -> None:
    response = await report(Upload(0).request(), HTTPException(405, headers={"Allow": "POST"}))
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
