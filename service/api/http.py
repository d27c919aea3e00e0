"""Bytes to requests and answers to bytes: JSON bodies and server-sent events."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from service.engine.protocol import Answer, Message
from service.errors import ApiError, headers

MAX_BODY_BYTES = 16 * 1024 * 1024


async def read_body(request: Request) -> bytes:
    """The body of a request; one that is too large is refused before it is held. Raises ApiError 413."""
    _refuse_too_large(int(request.headers.get("content-length", 0)))
    body = bytearray()
    async for chunk in request.stream():
        _refuse_too_large(len(body) + len(chunk))
        body += chunk
    return bytes(body)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body, with a `model`. Raises ApiError 400."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        came = str(error) if raw else "an empty body"
        raise ApiError(400, f"expected a JSON object; got {came}; send the request as JSON") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object; got {type(body).__name__}; send the request as JSON")
    model = body.get("model")
    if not isinstance(model, str):
        raise ApiError(
            400,
            f"model: expected the name of a model; got {model!r}; take a name from /v1/models",
            param="model",
        )
    return body


async def events(messages: AsyncGenerator[Message, None]) -> AsyncGenerator[str, None]:
    """The text of a stream. One that fails ends with an error event and without [DONE]."""
    async with aclosing(messages):
        async for message in messages:
            yield message if isinstance(message, str) else f"data: {message.body}\n\n"


def respond(answer: Answer, further: Mapping[str, str] | None = None) -> Response:
    """The response to a request that is not a stream, with `further` headers."""
    return Response(
        answer.body,
        status_code=answer.status,
        headers=headers(answer.status) | dict(further or {}),
        media_type="application/json",
    )


def _refuse_too_large(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise ApiError(
            413,
            f"expected a body of at most {MAX_BODY_BYTES} bytes; got {num_bytes} or more; "
            "send a shorter prompt",
            code="body_too_large",
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}, which is not JSON")
