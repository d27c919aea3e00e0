"""What happens to every request before and after its route: its id, its key, its line in the log."""

import logging
import re
import time
from contextlib import ExitStack
from typing import Any, ClassVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http import respond
from service.engine.protocol import Answer
from service.errors import ApiError, to_api_error
from service.keys import Key, KeyRing, Lease

OPEN_PATHS = ("/health", "/health/ready")
"""Asked by what has no key."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

logger = logging.getLogger("ray.serve")


class Guard:
    """ASGI middleware. There is one ingress in a process, which sets `keys` before anything listens."""

    keys: ClassVar[KeyRing | None] = None

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"][:128],
            "key": None,
            "request_id": None,
        }
        started_at_s = time.monotonic()

        async def noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
            await send(message)

        try:
            with ExitStack() as held:
                try:
                    self._admit(scope, record, held)
                except ApiError as error:
                    await respond(Answer.of(error), _challenge(error))(scope, receive, noting_status)
                else:
                    await self._app(scope, receive, noting_status)
        except ClientDisconnect:
            pass
        except Exception as error:
            logger.exception("Request %s failed.", record["request_id"])
            if "status" in record:  # only a connection that breaks off says that the answer is not whole
                raise
            await respond(Answer.of(to_api_error(error)))(scope, receive, noting_status)
        finally:
            if scope["path"] not in OPEN_PATHS:
                # No status: the client left before there was one.
                record["duration_s"] = round(time.monotonic() - started_at_s, 4)
                logger.info("request", extra=record | scope.get("state", {}).get("record", {}))

    def _admit(self, scope: Scope, record: dict[str, Any], held: ExitStack) -> None:
        """Check id and key, and take a place of the key's for what generates. Raises ApiError."""
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            raise ApiError(
                400,
                "x-request-id: expected 1 to 128 visible ASCII characters; got something else; correct it or "
                "leave it out",
                param="x-request-id",
            )
        record["request_id"] = request_id
        state = scope.setdefault("state", {})
        state["lease"], state["record"] = Lease(), {}
        if self.keys is None or scope["path"] in OPEN_PATHS:
            return
        key = _authenticate(self.keys, headers)
        record["key"] = key.config.name
        if scope["method"] == "POST":
            state["lease"] = held.enter_context(key.lease())


def lease_of(request: Request) -> Lease:
    """Where the tokens of a request are counted."""
    lease: Lease = request.state.lease
    return lease


def _authenticate(keys: KeyRing, headers: Headers) -> Key:
    scheme, _, presented = headers.get("authorization", "").partition(" ")
    key = keys.find(presented.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        came = "another one" if presented else "none"
        raise ApiError(
            401,
            f"expected a valid API key; got {came}; send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
        )
    return key


def _challenge(error: ApiError) -> dict[str, str]:
    return {"www-authenticate": "Bearer"} if error.status == 401 else {}
