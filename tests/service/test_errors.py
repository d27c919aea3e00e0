"""Exceptions as the client sees them."""

import json

import pytest
from ray.exceptions import ActorDiedError
from starlette.exceptions import HTTPException

from service.errors import ApiError, not_ready, to_api_error


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (ApiError(400, "m", param="n"), 400, "invalid_request_error", None),
        (ApiError(429, "m", code="pool_full"), 429, "rate_limit_error", "pool_full"),
        (not_ready("demo"), 503, "service_unavailable_error", "not_ready"),
        (HTTPException(404), 404, "invalid_request_error", "not_found"),
        (HTTPException(405), 405, "invalid_request_error", "method_not_allowed"),
        (ActorDiedError(), 503, "service_unavailable_error", "replica_lost"),
        (ZeroDivisionError("secret"), 500, "server_error", "internal"),
    ],
)
def test_an_exception_becomes_an_openai_error(
    error: Exception, status: int, kind: str, code: str | None
) -> None:
    seen = to_api_error(error)
    assert seen.status == status
    body = json.loads(seen.body)
    assert list(body) == ["error"]
    assert body["error"] == {
        "message": str(seen),
        "type": kind,
        "param": getattr(error, "param", None),
        "code": code,
    }


def test_what_went_wrong_inside_stays_inside() -> None:
    assert "secret" not in to_api_error(ZeroDivisionError("secret")).body


@pytest.mark.parametrize(("status", "retry"), [(429, True), (503, True), (400, False), (500, False)])
def test_only_what_may_pass_says_when_to_retry(status: int, retry: bool) -> None:
    assert (ApiError(status, "m").retry_after_s is not None) is retry
