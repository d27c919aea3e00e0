"""Request bodies in, server-sent events out."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from service.api.http import MAX_BODY_BYTES, events, parse_body, read_body, respond
from service.api.ingress import report
from service.engine.protocol import Answer, Message
from service.errors import ApiError


def test_a_body_is_passed_on_as_it_came() -> None:
    body = {"model": "demo", "prompt": "x", "anything": [1, None]}
    assert parse_body(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    ("raw", "status", "what"),
    [
        (b"", 400, "got an empty body"),
        (b"{", 400, "line 1 column 2"),
        (b"\xff\xfe", 400, "expected a JSON object"),
        (b"[" * 100_000, 400, "expected a JSON object"),
        (b"[]", 400, "got list"),
        (b'{"model": "m", "temperature": NaN}', 400, "the number NaN"),
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
    assert [text async for text in events(stream(*sent))] == sent


@pytest.mark.asyncio
async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    failure = Answer.of(ApiError(503, "gone", code="replica_lost"))
    *_, last = [text async for text in events(stream("data: {}\n\n", failure))]
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

    reader = events(endless())
    await anext(reader)
    await reader.aclose()
    assert closed == [True]


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
