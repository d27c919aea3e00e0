"""Request bodies in, server-sent events out."""

import json
from collections.abc import AsyncGenerator

import pytest

from service.api.http import MAX_BODY_BYTES, events, parse_body, respond
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
        (b" " * (MAX_BODY_BYTES + 1), 413, "send a shorter prompt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_body_is_refused(raw: bytes, status: int, what: str) -> None:
    with pytest.raises(ApiError, match="expected") as refusal:
        parse_body(raw)
    assert refusal.value.status == status
    assert what in str(refusal.value)


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
