"""What may go wrong in a request, and how the client is told: exception -> status -> OpenAI body."""

import json
from http import HTTPStatus

from ray.exceptions import RayActorError
from starlette.exceptions import HTTPException

RETRY_AFTER_S = {429: 1, 503: 5}

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """A failure that the client is told about, in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> str:
        """JSON text of the response body."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return json.dumps(
            {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
        )


def headers(status: int) -> dict[str, str]:
    """Response headers that belong to a status."""
    return {"retry-after": str(RETRY_AFTER_S[status])} if status in RETRY_AFTER_S else {}


def not_ready(model: str) -> ApiError:
    """No replica of the model's pool answers."""
    return ApiError(
        503,
        f"expected a replica of {model!r} that answers; none does, it is starting or was lost; "
        "wait for /health/ready and send the request again",
        code="not_ready",
    )


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
