"""Bytes to requests and answers to bytes: JSON bodies and server-sent events."""

import asyncio
import json
import re
import reprlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from service.api.router import Wanted
from service.engine.protocol import GRAMMARS, Answer, Endpoint, Message, Usage
from service.errors import ApiError
from service.keys import Lease

MAX_BODY_BYTES = 16 * 1024 * 1024
BODY_TIMEOUT_S = 30.0
MAX_DEPTH = 64
MAX_CONTAINERS = 500_000
"""Opening brackets in a body, those in its texts included: they bound the memory that it takes."""
MAX_SEQUENCES = 128
"""Sequences that one request may generate."""
MAX_GRAMMAR_BYTES = 32 * 1024
"""Of what an answer must look like, as JSON: the engine compiles it for all requests in one place, in a time
that grows faster than its length."""
PRIORITY_HEADER = "x-deltalog-priority"


async def read_body(request: Request) -> bytes:
    """The body of a request; one too large or too slow is refused before it is held. Raises ApiError."""
    declared = request.headers.get("content-length", "0")
    _refuse_too_large(int(declared) if declared.isdecimal() else 0)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                _refuse_too_large(len(body) + len(chunk))
                body += chunk
    except TimeoutError:
        raise ApiError(
            408,
            f"expected the whole body within {BODY_TIMEOUT_S:.0f} s; got {len(body)} bytes; send it faster",
            code="body_timeout",
        ) from None
    return bytes(body)


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body, with a `model`, within the limits. Raises ApiError 400."""
    if raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
        raise ApiError(400, f"expected at most {MAX_CONTAINERS} lists and objects; got more; send fewer")
    try:
        body = json.loads(raw.decode(), parse_constant=_refuse_constant)
        if not isinstance(body, dict):
            raise ValueError(type(body).__name__)
        _refuse_too_deep(body)
        if b"\\u" in raw:
            # Half of a pair of escapes is valid JSON and no text.
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        came = str(error) if raw else "an empty body"
        raise ApiError(400, f"expected a JSON object; got {came}; send the request as JSON") from None
    model = body.get("model")
    if not isinstance(model, str):
        raise ApiError(
            400,
            f"model: expected the name of a model; got {reprlib.repr(model)}; take a name from /v1/models",
            param="model",
        )
    if "stream_interval" in body:
        raise ApiError(
            400,
            "stream_interval: expected no such setting, the service says how tokens travel; got one; leave "
            "it out",
            param="stream_interval",
        )
    _refuse_too_many_sequences(body)
    _refuse_large_grammars(body)
    return body


def wanted(endpoint: Endpoint, body: dict[str, Any], guess: int, headers: Mapping[str, str]) -> Wanted:
    """What a router goes by. `guess`: tokens of a prompt that does not list them. Raises ApiError 400."""
    prompt, asked = body.get("prompt"), body.get("max_completion_tokens") or body.get("max_tokens")
    listed = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    priority = headers.get(PRIORITY_HEADER, "0")
    if not re.fullmatch(r"-?\d{1,4}", priority):
        raise ApiError(
            400,
            f"{PRIORITY_HEADER}: expected a whole number, lower ones wait less; got {priority[:32]!r}; "
            "correct it or leave it out",
            param=PRIORITY_HEADER,
        )
    return Wanted(
        len(prompt) if prompt and listed else max(1, guess),
        asked if isinstance(asked, int) and 0 < asked < 10**7 else None,
        int(priority),
        prompt or body.get("messages"),
        endpoint in ("chat", "completion"),
    )


async def events(messages: AsyncGenerator[Message, None], lease: Lease) -> AsyncGenerator[str, None]:
    """The text of a stream. One that fails ends with an error event and without [DONE]."""
    async with aclosing(messages):
        async for message in messages:
            if isinstance(message, str):
                # One token an event, until the usage says exactly; a stream may be left before it comes.
                lease.tokens += message.count("data: ")
                yield message
            elif isinstance(message, Answer):
                yield f"data: {message.body}\n\n"
            else:
                charge(lease, message)


def charge(lease: Lease, usage: Usage) -> None:
    """What a request took, now that it is known."""
    lease.tokens = usage.prompt_tokens + usage.generated_tokens


def respond(answer: Answer, further: Mapping[str, str] | None = None) -> Response:
    """The response to a request that is not a stream, with `further` headers."""
    retry_after = {"retry-after": str(answer.retry_after_s)} if answer.retry_after_s else {}
    return Response(
        answer.body,
        status_code=answer.status,
        headers=retry_after | dict(further or {}),
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


def _refuse_too_deep(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    depth = 0
    while level := [
        inside
        for value in level
        for inside in (value.values() if isinstance(value, dict) else value)
        if isinstance(inside, dict | list)
    ]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels of lists and objects")


def _refuse_too_many_sequences(body: dict[str, Any]) -> None:
    prompts = body.get("prompt")
    # A list of numbers is one prompt.
    texts = max(1, sum(isinstance(item, str | list) for item in prompts) if isinstance(prompts, list) else 1)
    for name in ("n", "best_of"):
        copies = body.get(name)
        if copies is None:
            continue
        # vLLM would take text for the number that it spells.
        if not isinstance(copies, int | float):
            raise ApiError(
                400,
                f"{name}: expected a number; got {reprlib.repr(copies)}; correct it and send again",
                param=name,
            )
        if copies * texts > MAX_SEQUENCES:
            raise ApiError(
                400,
                f"{name}: expected at most {MAX_SEQUENCES} sequences a request; got {copies} for each of "
                f"{texts} prompts; ask for fewer",
                param=name,
            )
    if texts > MAX_SEQUENCES:
        raise ApiError(
            400,
            f"prompt: expected at most {MAX_SEQUENCES} prompts a request; got {texts}; send fewer",
            param="prompt",
        )


def _refuse_large_grammars(body: dict[str, Any]) -> None:
    for name in GRAMMARS:
        size = len(json.dumps(body[name])) if name in body else 0
        if size > MAX_GRAMMAR_BYTES:
            raise ApiError(
                400,
                f"{name}: expected at most {MAX_GRAMMAR_BYTES} bytes; got {size}; ask for less structure",
                param=name,
            )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}, which is not JSON")
