"""What /openapi.json says of the routes: bodies, answers, and every status."""

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class Status(BaseModel):
    status: str


class Version(BaseModel):
    version: str


class ModelCard(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: str
    data: list[ModelCard]


_MEANINGS = {
    400: "The request is wrong; the message says where.",
    401: "No valid API key came with it.",
    404: "There is no such model.",
    408: "The body took too long.",
    413: "The body is too large.",
    429: "The pool is full or a limit of the key is reached; come back after Retry-After seconds.",
    500: "The service failed on the request.",
    503: "No replica of the model answers; come back after Retry-After seconds.",
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in statuses}


_TEXT: dict[str, Any] = {"type": "string"}
_PROMPT: dict[str, Any] = {
    "oneOf": [
        _TEXT | {"minLength": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
    ]
}
_MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": _TEXT, "content": {"type": ["string", "array", "null"]}},
    },
}
_SAMPLING: dict[str, Any] = {
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "stream": {"type": "boolean"},
    "seed": {"type": "integer"},
}


def _takes(required: dict[str, Any], optional: dict[str, Any], streams: bool) -> dict[str, Any]:
    """Request body and answers of a route that an engine serves; further keys are vLLM's to check."""
    body = {
        "type": "object",
        "required": ["model", *required],
        "properties": {"model": _TEXT} | required | optional,
    }
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": _TEXT}
    return {
        "responses": _errors(*_MEANINGS) | {200: {"description": "The answer.", "content": content}},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}}
        },
    }


CHAT = _takes({"messages": _MESSAGES}, _SAMPLING, streams=True)
COMPLETION = _takes({"prompt": _PROMPT}, _SAMPLING, streams=True)
TOKENIZE = _takes({"prompt": _TEXT}, {}, streams=False)
DETOKENIZE = _takes(
    {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}, {}, streams=False
)
READING: dict[str, Any] = {"responses": _errors(400, 401, 500, 503)}
READING_A_MODEL: dict[str, Any] = {"responses": _errors(400, 401, 404, 500, 503)}
HEALTH: dict[str, Any] = {"responses": _errors(400, 500, 503)}
