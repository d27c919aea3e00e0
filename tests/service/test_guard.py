"""What happens to a request that the ingress fails on, and to a client that has gone."""

import json
import logging
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.api.guard import Guard

SCOPE = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"x-request-id", b"one")]}


async def sent_for(error: Exception, *, started: bool) -> list[dict[str, Any]]:
    """What the client gets of an application that fails."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await Guard(app)(dict(SCOPE), receive, send)
    return sent


@pytest.mark.asyncio
async def test_a_fault_of_ours_is_a_500_and_logged_as_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        start, body = await sent_for(RuntimeError("a secret"), started=False)
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal"
    (line,) = [record for record in caplog.records if record.message == "request"]
    assert line.status == 500


@pytest.mark.asyncio
async def test_a_fault_within_an_answer_breaks_the_connection() -> None:
    with pytest.raises(RuntimeError):
        await sent_for(RuntimeError(), started=True)


@pytest.mark.asyncio
async def test_a_client_that_has_gone_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="ray.serve"):
        assert await sent_for(ClientDisconnect(), started=False) == []
    assert not caplog.records
