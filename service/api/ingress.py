"""The ingress: the OpenAI routes over HTTP."""

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from service.api.http import events, parse_body, read_body, respond
from service.api.pool import Pool
from service.config import ServiceConfig
from service.engine.protocol import Answer, Endpoint
from service.errors import ApiError, not_ready, to_api_error

api = FastAPI(title="DeltaLog", openapi_url=None)


@api.exception_handler(ApiError)
@api.exception_handler(HTTPException)
@api.exception_handler(Exception)
async def report(_: Request, error: Exception) -> Response:
    """Every failure of a request, in OpenAI's shape."""
    # A 405 names the methods that are allowed in a header.
    further = error.headers if isinstance(error, HTTPException) else None
    return respond(Answer.of(to_api_error(error)), further)


class Ingress:
    """Checks requests, finds the pool of their model and writes the answers."""

    def __init__(self, config: ServiceConfig, replicas: list[DeploymentHandle]) -> None:
        self._pools = {
            pool.model_id: Pool(pool, replica) for pool, replica in zip(config.pools, replicas, strict=True)
        }
        self._started_at_s = int(time.time())
        self._watchers = [asyncio.ensure_future(pool.watch()) for pool in self._pools.values()]

    @api.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        return await self._complete("chat", request)

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return await self._complete("completion", request)

    @api.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card(model) for model in self._pools]}

    @api.get("/v1/models/{model:path}")
    async def model(self, model: str) -> dict[str, Any]:
        return self._card(self._pool(model).config.model_id)

    @api.get("/health")
    async def health(self) -> dict[str, str]:
        """The process is alive."""
        return {"status": "alive"}

    @api.get("/health/ready")
    async def ready(self) -> dict[str, str]:
        """Every pool has a replica whose model has generated a token and whose engine is alive."""
        for model, pool in self._pools.items():
            if not (pool.ready and await pool.probe()):
                raise not_ready(model)
        return {"status": "ready"}

    async def _complete(self, endpoint: Endpoint, request: Request) -> Response:
        body = parse_body(await read_body(request))
        messages = self._pool(body["model"]).answer(endpoint, body)
        answer = await anext(messages)
        assert isinstance(answer, Answer)
        if answer.body is None:
            return StreamingResponse(events(messages), media_type="text/event-stream")
        await messages.aclose()
        return respond(answer)

    def _pool(self, model: str) -> Pool:
        if model not in self._pools:
            raise ApiError(
                404,
                f"expected one of the models {', '.join(self._pools)}; got {model!r}; correct the name",
                param="model",
                code="model_not_found",
            )
        return self._pools[model]

    def _card(self, model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": self._started_at_s, "owned_by": "deltalog"}
