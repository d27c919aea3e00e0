"""What may go wrong in a request, and how the client is told: exception -> status -> OpenAI body."""

import json
import reprlib
from http import HTTPStatus

from pydantic import ValidationError
from ray.exceptions import RayActorError
from starlette.exceptions import HTTPException

RETRY_AFTER_S = {429: 1, 503: 5}
"""When to come back, where nothing better is known."""

ENGINE_DEAD = "engine_dead"
POOL_FULL = "pool_full"
"""Codes by which the ingress knows that another replica may do."""

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """A failure that the client is told about, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s or RETRY_AFTER_S.get(status)

    @property
    def body(self) -> str:
        """JSON text of the response body."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return json.dumps(
            {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
        )


def pool_full(most: int, retry_after_s: int | None = None) -> ApiError:
    """No replica has room, or none within its SLO."""
    return ApiError(
        429,
        f"expected at most {most} requests at a time for this model, fewer where an SLO leaves no room for "
        "them; got more; send it again after the time in Retry-After",
        code=POOL_FULL,
        retry_after_s=retry_after_s,
    )


def engine_dead() -> ApiError:
    """The engine that was to serve the request is no more."""
    return ApiError(
        503,
        "expected a running engine; it died on an earlier request; send the request again",
        code=ENGINE_DEAD,
    )


def not_ready(model: str) -> ApiError:
    """No replica of the model's pool answers."""
    return ApiError(
        503,
        f"expected a replica of {model!r} that answers; none does, it is starting or was lost; "
        "wait for /health/ready and send the request again",
        code="not_ready",
    )


def invalid_request(error: ValidationError) -> ApiError:
    """The first fault of a request body; a union reports one per branch, and the first says enough."""
    fault = error.errors(include_url=False)[0]
    param = str(fault["loc"][0]) if fault["loc"] else None
    expected = fault["msg"].replace("Input should be", "expected")
    came = reprlib.repr(fault["input"])
    return ApiError(400, f"{param or 'body'}: {expected}; got {came}; correct it and send again", param=param)


def to_api_error(error: Exception) -> ApiError:
    """The client's view of an exception. What the client did not cause stays in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return _routing_error(error)
    if isinstance(error, RayActorError):
        return ApiError(
            503,
            "expected the replica to finish the request; it was lost; send the request again",
            code="replica_lost",
        )
    return internal()


def internal() -> ApiError:
    """A fault of ours. The log says which."""
    return ApiError(
        500,
        "expected an answer; the service failed on this request and logged why; send it again",
        code="internal",
    )


def _routing_error(error: HTTPException) -> ApiError:
    status = HTTPStatus(error.status_code)
    message = {
        HTTPStatus.NOT_FOUND: "expected a route of the API; this path is none; the models are at /v1/models",
        HTTPStatus.METHOD_NOT_ALLOWED: "expected another method; use POST for completions, GET for the rest",
    }.get(status, str(error.detail))
    return ApiError(status, message, code=status.name.lower())
