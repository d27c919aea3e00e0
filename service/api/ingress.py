"""The ingress: the OpenAI routes over HTTP."""

import asyncio
import importlib.metadata
import logging
import time

import ray
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from service.api import schema
from service.api.guard import Guard, lease_of
from service.api.http import charge, events, parse_body, read_body, respond, wanted
from service.api.pool import Pool
from service.api.router import BYTES_A_TOKEN, Router
from service.api.trailers import ignore_trailers
from service.config import ServiceConfig
from service.engine.protocol import Answer, Call, Endpoint, Usage
from service.errors import ApiError, not_ready, to_api_error
from service.keys import KeyRing
from service.placement import misfit

VERSION = importlib.metadata.version("deltalog")
MISFIT_PERIOD_S = 10.0
DEBUG_HEADER = "x-deltalog-debug"
"""A request that has it is told where it went and why, in x-deltalog-route."""

logger = logging.getLogger("ray.serve")

api = FastAPI(title="DeltaLog", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
api.add_middleware(Guard)


@api.exception_handler(ApiError)
@api.exception_handler(HTTPException)
async def report(_: Request, error: Exception) -> Response:
    """What a request is refused for, in OpenAI's shape. Guard reports what nobody foresaw."""
    # A 405 names the methods that are allowed in a header.
    further = error.headers if isinstance(error, HTTPException) else None
    return respond(Answer.of(to_api_error(error)), further)


class Ingress:
    """Checks requests, finds the pool of their model and writes the answers."""

    def __init__(self, config: ServiceConfig, pools: list[DeploymentHandle]) -> None:
        ignore_trailers()
        name = serve.get_replica_context().replica_id.unique_id
        handles = zip(config.pools, pools, strict=True)
        made = {pool.name: Pool(pool, handle, name) for pool, handle in handles}
        self._routers = {
            model: Router([made[pool.name] for pool in pools], config.policy, config.max_queued_requests)
            for model, pools in config.models.items()
        }
        self._started_at_s = int(time.time())
        watches = [router.watch(pool) for router in self._routers.values() for pool in router.pools]
        watches.append(_report_misfits(list(made.values())))
        if config.keys_file is not None:
            Guard.keys = KeyRing(config.keys_file, config.ingress_replicas)
            watches.append(Guard.keys.watch())
        self._watchers = [asyncio.ensure_future(watch) for watch in watches]

    @api.post("/v1/chat/completions", **schema.CHAT)
    async def chat_completions(self, request: Request) -> Response:
        return await self._serve("chat", request)

    @api.post("/v1/completions", **schema.COMPLETION)
    async def completions(self, request: Request) -> Response:
        return await self._serve("completion", request)

    @api.post("/tokenize", **schema.TOKENIZE)
    async def tokenize(self, request: Request) -> Response:
        return await self._serve("tokenize", request)

    @api.post("/detokenize", **schema.DETOKENIZE)
    async def detokenize(self, request: Request) -> Response:
        return await self._serve("detokenize", request)

    @api.get("/v1/models", **schema.READING)
    async def models(self) -> schema.ModelList:
        return schema.ModelList(object="list", data=[self._card(model) for model in self._routers])

    @api.get("/v1/models/{model:path}", **schema.READING_A_MODEL)
    async def model(self, model: str) -> schema.ModelCard:
        return self._card(self._router(model).model)

    @api.get("/version", **schema.READING)
    async def version(self) -> schema.Version:
        return schema.Version(version=VERSION)

    @api.get("/health", **schema.HEALTH)
    async def health(self) -> schema.Status:
        """The process is alive."""
        return schema.Status(status="alive")

    @api.get("/health/ready", **schema.HEALTH)
    async def ready(self) -> schema.Status:
        """Every model has a replica that generates, as of half a second ago."""
        for model, router in self._routers.items():
            if not router.ready:
                raise not_ready(model)
        return schema.Status(status="ready")

    async def _serve(self, endpoint: Endpoint, request: Request) -> Response:
        raw = await read_body(request)
        body, lease = parse_body(raw), lease_of(request)
        router, record = self._router(body["model"]), request.state.record
        # What it is charged until its usage is known, or if its client leaves before.
        lease.tokens = len(raw) // BYTES_A_TOKEN
        call = Call(endpoint, body, request.headers["x-request-id"])
        messages = router.answer(call, wanted(endpoint, body, lease.tokens, request.headers), record)
        answer = await anext(messages)
        assert isinstance(answer, Answer)
        route = record.pop("route", None)
        told = {"x-deltalog-route": route} if route and DEBUG_HEADER in request.headers else {}
        if answer.body is None:
            return StreamingResponse(events(messages, lease), headers=told, media_type="text/event-stream")
        if answer.status >= 400:
            lease.tokens = 0
        async for message in messages:
            if isinstance(message, Usage):
                charge(lease, message)
        return respond(answer, told)

    def _router(self, model: str) -> Router:
        if model not in self._routers:
            raise ApiError(
                404,
                f"expected one of the models {', '.join(self._routers)}; got {model[:128]!r}; correct it",
                param="model",
                code="model_not_found",
            )
        return self._routers[model]

    def _card(self, model: str) -> schema.ModelCard:
        return schema.ModelCard(id=model, object="model", created=self._started_at_s, owned_by="deltalog")


async def _report_misfits(pools: list[Pool]) -> None:
    """Say, once, which pools wait for a node that there is not: Serve itself waits in silence."""
    said: set[str] = set()
    while True:
        nodes = ray.nodes()
        faults = {fault for pool in pools if not pool.ready and (fault := misfit(pool.config, nodes))}
        for fault in sorted(faults - said):
            logger.error("%s. Until then it has no replica.", fault)
        said |= faults
        await asyncio.sleep(MISFIT_PERIOD_S)
