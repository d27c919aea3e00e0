"""vLLM as the engine: AsyncLLM behind vLLM's own OpenAI serving classes."""

import asyncio
import dataclasses
import json
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.platforms import current_platform
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.async_llm import AsyncLLM

from service.config import ConfigError
from service.engine.logger import EngineLogger
from service.engine.memory import check_memory
from service.engine.outbox import Outbox
from service.engine.protocol import GRAMMARS, Answer, Call, EngineLoad, EngineStartError, Message, Usage
from service.errors import ApiError, engine_dead, internal, invalid_request
from service.metrics.log import DeltaLogMetrics
from service.pools import PoolConfig

logger = logging.getLogger("ray.serve")

CPU_CACHE_BYTES = 2**30
"""State and cache of a replica on a CPU, where the pool says nothing of memory."""
MEMORY_ARGUMENTS = {"kv_cache_memory_bytes", "gpu_memory_utilization"}

_STREAM_ERROR = 'data: {"error"'


def engine_args(pool: PoolConfig) -> AsyncEngineArgs:
    """vLLM's arguments for `pool`. Raises ConfigError for what vLLM refuses."""
    parsers = ToolParserManager.list_registered()
    if pool.tool_call_parser not in (None, *parsers):
        raise ConfigError(
            f"pool {pool.name!r}: tool_call_parser: expected one of {', '.join(sorted(parsers))}; got "
            f"{pool.tool_call_parser!r}; correct it"
        )
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for key in sorted(pool.engine_args.keys() - known):
        raise ConfigError(
            f"pool {pool.name!r}: engine_args: expected arguments of vLLM's AsyncEngineArgs; got {key!r}; "
            "remove it or correct its spelling"
        )
    deltalog = {} if pool.merge_interval is None else {"deltalog": {"merge_interval": pool.merge_interval}}
    # The service exports its own metrics; vLLM's default loggers would only print.
    defaults: dict[str, Any] = {"disable_log_stats": True}
    if current_platform.is_cpu() and not pool.engine_args.keys() & MEMORY_ARGUMENTS:
        # vLLM would take nine tenths of the machine's memory, and not start where less is free.
        defaults["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    try:
        return AsyncEngineArgs(
            model=pool.model,
            served_model_name=[pool.model_id],
            additional_config=deltalog,
            **defaults | pool.engine_args,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"pool {pool.name!r}: engine_args: expected values that vLLM takes; got: {error}; correct them"
        ) from error


def engine_config(pool: PoolConfig) -> None:
    """Let vLLM make its whole configuration for `pool`, model included, and see whether it fits. Raises
    ConfigError."""
    try:
        check_memory(pool, engine_args(pool).create_engine_config())
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"pool {pool.name!r}: engine_args: expected what vLLM takes for this model; got: "
            f"{_start_failure(error)}; correct it"
        ) from error


class VllmEngine:
    """One model in vLLM, with its OpenAI API."""

    def __init__(self, pool: PoolConfig) -> None:
        self._pool = pool
        self._logger = EngineLogger(pool)
        try:
            self._llm = AsyncLLM.from_engine_args(engine_args(pool), stat_loggers=[lambda *_: self._logger])
        except Exception as error:
            raise EngineStartError(_start_failure(error)) from error
        models = OpenAIServingModels(self._llm, [BaseModelPath(name=pool.model_id, model_path=pool.model)])
        templates: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
        parser = pool.tool_call_parser
        tools: dict[str, Any] = {"tool_parser": parser, "enable_auto_tools": parser is not None}
        renderer = OnlineRenderer(
            self._llm.model_config, self._llm.renderer, request_logger=None, **templates, **tools
        )
        renderer.warmup()
        shared: dict[str, Any] = {"online_renderer": renderer, "request_logger": None}
        chat = OpenAIServingChat(self._llm, models, response_role="assistant", **shared, **templates, **tools)
        completion = OpenAIServingCompletion(self._llm, models, **shared)
        tokenization = ServingTokenization(models, renderer, **templates)
        self._endpoints: dict[str, tuple[TypeAdapter[Any], Any]] = {
            "chat": (TypeAdapter(ChatCompletionRequest), chat.create_chat_completion),
            "completion": (TypeAdapter(CompletionRequest), completion.create_completion),
            "tokenize": (TypeAdapter(TokenizeRequest), tokenization.create_tokenize),
            "detokenize": (TypeAdapter(DetokenizeRequest), tokenization.create_detokenize),
        }

    async def start(self) -> None:
        body = {"model": self._pool.model_id, "prompt": "Ready?", "max_tokens": 1}
        async for message in self.answer(Call("completion", body, "ready")):
            if isinstance(message, Answer) and message.status != 200:
                raise EngineStartError(f"the model did not generate its first token: {message.body}")
        # The token that proves the engine ready is nobody's request.
        self._logger.start_metrics()
        self._deltalog = None if self._pool.merge_interval is None else DeltaLogMetrics(self._pool)

    async def answer(self, call: Call) -> AsyncGenerator[Message, None]:
        # vLLM takes the id of its own requests from here and leaves what they used here.
        http = Request({"type": "http", "headers": [(b"x-request-id", call.request_id.encode())]})
        try:
            result = await self._create(call, http)
        except ApiError as error:
            yield Answer.of(error)
            return
        if isinstance(result, BaseModel):
            yield Answer(200, result.model_dump_json())
            yield _usage(http)
            return
        outbox, started = Outbox(self._pool), False
        filling = asyncio.create_task(self._fill(outbox, result, http, call))
        try:
            async for message in outbox.texts():
                if isinstance(message, str) and not started:
                    started = True
                    yield Answer(200, None)
                yield message
        finally:
            filling.cancel()
            with suppress(asyncio.CancelledError):
                await filling

    async def check_health(self) -> None:
        await self._ask_workers("check_health")

    def load(self) -> EngineLoad:
        states = self._llm.output_processor.request_states.values()
        backlog = sum(state.prompt_len for state in states if state.is_prefilling)
        return EngineLoad(backlog, self._logger.prefill_per_step, self._logger.calibration.learned)

    async def publish(self) -> None:
        self._logger.publish(self._llm.get_num_unfinished_requests())
        if self._deltalog is not None:
            self._deltalog.update(await self._ask_workers("deltalog_counters"))

    def shutdown(self) -> None:
        self._llm.shutdown()

    async def _ask_workers(self, method: str) -> Any:
        """What the workers answer, through the engine's loop. Raises when the engine dies meanwhile:
        vLLM itself would wait for ever for the answer of an engine that died."""
        asking = asyncio.ensure_future(self._llm.collective_rpc(method))
        try:
            while not asking.done():
                await self._llm.check_health()
                await asyncio.wait([asking], timeout=0.2)
            return asking.result()
        finally:
            asking.cancel()

    async def _fill(
        self, outbox: Outbox, events: AsyncGenerator[str, None], http: Request, call: Call
    ) -> None:
        """Put vLLM's stream into the outbox."""
        try:
            async with aclosing(events):
                async for event in events:
                    if event.startswith(_STREAM_ERROR):
                        # vLLM would close the stream as if it were complete.
                        error = json.loads(event.removeprefix("data: "))["error"]
                        outbox.close(Answer.of(self._api_error(error, call)))
                        return
                    outbox.put(event)
            outbox.close(_usage(http))
        except Exception as error:
            outbox.close(error)

    async def _create(self, call: Call, http: Request) -> Any:
        """vLLM's response, or its stream of SSE events. Raises ApiError."""
        request_type, create = self._endpoints[call.endpoint]
        try:
            request = request_type.validate_python(call.body)
        except ValidationError as error:
            raise invalid_request(error) from None
        except Exception as error:
            # vLLM's own checks of a body refuse it in their way, or trip over types that they do not expect.
            refusal = create_error_response(error).error.model_dump()
            raise ApiError(400, refusal["message"], param=refusal["param"]) from None
        self._refuse(request)
        try:
            result = await create(request, http)
        except Exception as error:
            refusal = create_error_response(error).error.model_dump()
            if refusal["code"] >= 500 and not self._llm.errored:
                logger.exception("vLLM failed on request %s.", call.request_id)
            raise self._api_error(refusal, call) from error
        if hasattr(result, "error"):
            raise self._api_error(result.error.model_dump(), call)
        return result

    def _refuse(self, request: Any) -> None:
        """Raises ApiError for what vLLM takes and fails on, or refuses by naming a flag of its own server."""
        seed, temperature = getattr(request, "seed", None), getattr(request, "temperature", None)
        on_cpu = self._llm.vllm_config.device_config.device_type == "cpu"
        if on_cpu and seed is not None and temperature != 0:
            raise ApiError(
                400,
                "seed: expected none, or temperature 0, because vLLM on a CPU loses its engine to a seeded "
                f"prompt that takes more than one step; got {seed}; leave it out",
                param="seed",
            )
        asked = getattr(request, "tools", None) and getattr(request, "tool_choice", "none") not in (
            None,
            "none",
        )
        if asked and self._pool.tool_call_parser is None:
            raise ApiError(
                400,
                "tools: expected none, because the pool has no `tool_call_parser`; got some; set it in the "
                "configuration, or send `tool_choice` as none",
                param="tools",
            )

    def _api_error(self, error: dict[str, Any], call: Call) -> ApiError:
        if self._llm.errored:
            return engine_dead()
        asked = [name for name in GRAMMARS if call.body.get(name)]
        if error["code"] >= 500 and asked:
            # A grammar that does not compile, or not in time, fails in the engine like a fault of its own.
            return ApiError(
                400,
                f"{asked[0]}: expected a structure that compiles in time; got one that failed with "
                f"{error['message'][:200]!r}; simplify it",
                param=asked[0],
            )
        if error["code"] >= 500:
            return internal()
        return ApiError(error["code"], error["message"], param=error["param"])


def _usage(http: Request) -> Usage:
    """What vLLM says that a request used; a request for tokens of a text uses none."""
    metadata = getattr(http.state, "request_metadata", None)
    usage = metadata and metadata.final_usage_info
    return Usage(usage.prompt_tokens, usage.completion_tokens or 0) if usage else Usage(0, 0)


def _start_failure(error: Exception) -> str:
    """The reason in a person's words, out of what vLLM wraps it in."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}".removeprefix(
                ": "
            )
            for fault in error.errors()
        )
    # EngineCore only logs why it died, to the output that Ray keeps of this process and its children.
    output = Path("/proc/self/fd/1").resolve()
    logged = output.read_text(errors="replace") if output.is_file() else ""
    reasons = re.findall(
        r"^\((?:VllmWorker|Worker|EngineCore).*\] (\w+(?:Error|Exception): .*)", logged, re.MULTILINE
    )
    return reasons[0] if reasons else f"{type(error).__name__}: {error}"
