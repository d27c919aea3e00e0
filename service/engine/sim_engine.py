"""A simulated engine: continuous batches whose steps take the time of a step model, on no model at all.

For load and for faults, where the time that a step takes matters and the text does not. It answers with as
many words as tokens were asked for, and refuses what it does not simulate.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.engine.outbox import Outbox
from service.engine.protocol import Answer, Call, EngineLoad, Message, Usage
from service.errors import ApiError, invalid_request
from service.metrics.requests import LatencyMetrics
from service.metrics.steps import StepMetrics
from service.pools import PoolConfig
from service.routing.calibrate import Calibration
from service.routing.policy import PREFILL_WINDOW

CATCH_UP_S = 0.1
"""A clock that is later than this starts anew: the machine is too slow for the model."""


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Body(BaseModel):
    """What the simulated engine takes of a request. Sampling options change nothing in a count of words."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    ignore_eos: bool = False
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = 1.0
    seed: int | None = None
    user: str | None = None

    def prompt_tokens(self, endpoint: str) -> int:
        """Words of the prompt, one at least. Raises ApiError when the endpoint's own prompt is absent."""
        name, prompt = ("messages", self.messages) if endpoint == "chat" else ("prompt", self.prompt)
        if not prompt:
            raise ApiError(400, f"{name}: expected a prompt; got none; send one", param=name)
        return max(1, len(prompt if name == "prompt" and isinstance(prompt, list) else str(prompt).split()))


@dataclass(eq=False)
class _Row:
    """One sequence that is generated."""

    request: "_Request"
    index: int
    prefill_left: int
    tokens_left: int
    generated: int = 0
    first_at_s: float = 0.0


@dataclass(eq=False)
class _Request:
    """One request: its rows, where their tokens go, and how its events look."""

    call: Call
    body: _Body
    prompt_tokens: int
    outbox: Outbox
    arrived_at_s: float = field(default_factory=time.monotonic)
    created_s: int = field(default_factory=lambda: int(time.time()))
    rows_left: int = 0
    gone: bool = False

    def __post_init__(self) -> None:
        self.rows_left = self.body.n
        self._head = json.dumps(self._object(chunk=True, choices=[]))[:-2]
        # An event a token: only the index, the text and the reason are put together each time.
        self._key = '"delta": {"content": ' if self.call.endpoint == "chat" else '"text": '
        self._close = "}" if self.call.endpoint == "chat" else ""

    def max_tokens(self) -> int:
        return self.body.max_completion_tokens or self.body.max_tokens or 16

    def put(self, row: _Row, last: bool) -> None:
        """One more token of `row`."""
        if not self.body.stream:
            return
        if row.generated == 1 and self.call.endpoint == "chat":
            self._put(f'{{"index": {row.index}, "delta": {{"role": "assistant", "content": ""}}}}')
        reason = '"length"' if last else "null"
        text = f'{{"index": {row.index}, {self._key}"{_word(row.generated)}"{self._close}'
        self._put(f'{text}, "finish_reason": {reason}}}')

    def finish(self) -> None:
        """Every row has its tokens."""
        usage = Usage(self.prompt_tokens, self.max_tokens() * self.body.n)
        if self.body.stream:
            if self.body.stream_options.include_usage:
                chunk = self._object(chunk=True, choices=[]) | {"usage": _openai_usage(usage)}
                self.outbox.put(f"data: {json.dumps(chunk)}\n\n")
            self.outbox.put("data: [DONE]\n\n")
        self.outbox.close(usage)

    def plain(self, usage: Usage) -> str:
        """The body of an answer that is no stream."""
        text = "".join(_word(index) for index in range(1, self.max_tokens() + 1))
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}}
            if self.call.endpoint == "chat"
            else {"text": text}
        )
        choices = [
            {"index": index, **content, "logprobs": None, "finish_reason": "length"}
            for index in range(self.body.n)
        ]
        return json.dumps(self._object(chunk=False, choices=choices) | {"usage": _openai_usage(usage)})

    def _put(self, choice: str) -> None:
        self.outbox.put(f"data: {self._head}{choice}]}}\n\n")

    def _object(self, chunk: bool, choices: list[Any]) -> dict[str, Any]:
        chat = self.call.endpoint == "chat"
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.call.request_id}",
            "object": kind,
            "created": self.created_s,
            "model": self.body.model,
            "choices": choices,
        }


class SimEngine:
    """Batches that take the time of a step model."""

    def __init__(self, pool: PoolConfig) -> None:
        assert pool.sim is not None
        self._pool, self._model = pool, pool.sim
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._work = asyncio.Event()
        self._metrics: LatencyMetrics | None = None
        self._prefill_per_step = 0.0
        self._calibration = Calibration(pool.sim.cost)

    async def start(self) -> None:
        self._stepping = asyncio.create_task(self._step_for_ever())
        async for _ in self.answer(
            Call("completion", {"model": "", "prompt": "Ready?", "max_tokens": 1}, "")
        ):
            pass
        # The token that proves the engine ready is nobody's request.
        self._metrics = LatencyMetrics(self._pool)
        self._steps = StepMetrics(self._pool)

    async def answer(self, call: Call) -> AsyncGenerator[Message, None]:
        try:
            request = self._take_in(call)
        except ApiError as error:
            yield Answer.of(error)
            return
        try:
            started = False
            async for message in request.outbox.texts():
                if isinstance(message, str) and not started:
                    started = True
                    yield Answer(200, None)
                elif isinstance(message, Usage) and not request.body.stream:
                    yield Answer(200, request.plain(message))
                yield message
        finally:
            request.gone = True

    async def check_health(self) -> None:
        if self._stepping.done():
            raise RuntimeError("expected the steps to go on; they ended; see the log before this line")

    def load(self) -> EngineLoad:
        backlog = sum(row.prefill_left for row in self._waiting if not row.request.gone)
        return EngineLoad(backlog, self._prefill_per_step, self._calibration.learned)

    async def publish(self) -> None:
        assert self._metrics is not None
        running = {row.request for row in [*self._running, *self._waiting] if not row.request.gone}
        self._metrics.publish(len(running))
        self._steps.publish(self._calibration.learned)

    def shutdown(self) -> None:
        self._stepping.cancel()

    def _take_in(self, call: Call) -> _Request:
        """Queue the rows of a request. Raises ApiError."""
        if call.endpoint not in ("chat", "completion"):
            raise ApiError(
                400, f"expected a model with a tokenizer; got the simulated engine for {call.endpoint}"
            )
        try:
            body = _Body.model_validate(call.body)
        except ValidationError as error:
            raise invalid_request(error) from None
        request = _Request(call, body, body.prompt_tokens(call.endpoint), Outbox(self._pool))
        total = request.prompt_tokens + request.max_tokens()
        if total > self._model.max_model_len:
            raise ApiError(
                400,
                f"max_tokens: expected prompt and answer to fit {self._model.max_model_len} tokens; got "
                f"{total}; send less or ask for less",
                param="max_tokens",
            )
        for index in range(body.n):
            self._waiting.append(_Row(request, index, request.prompt_tokens, request.max_tokens()))
        self._work.set()
        return request

    async def _step_for_ever(self) -> None:
        due_s = stepped_at_s = time.monotonic()
        while True:
            self._drop_what_left()
            if not (self._waiting or self._running):
                self._work.clear()
                await self._work.wait()
                due_s = stepped_at_s = time.monotonic()
            prefill_tokens = self._prefill()
            self._prefill_per_step += (prefill_tokens - self._prefill_per_step) / PREFILL_WINDOW
            step_ms = self._model.cost.step_ms(len(self._running), prefill_tokens)
            due_s += step_ms / 1000
            now_s = time.monotonic()
            if due_s < now_s - CATCH_UP_S:
                due_s = now_s
            await asyncio.sleep(max(0.0, due_s - now_s))
            # The batch as it was, with the time that its step really took.
            taken_s, stepped_at_s = time.monotonic() - stepped_at_s, time.monotonic()
            self._calibration.step(len(self._running), prefill_tokens, 1000 * taken_s)
            if self._metrics is not None:
                self._steps.step(len(self._running), prefill_tokens, taken_s)
            self._emit()

    def _drop_what_left(self) -> None:
        if any(row.request.gone for row in self._running):
            self._running = [row for row in self._running if not row.request.gone]
        while self._waiting and self._waiting[0].request.gone:
            self._waiting.popleft()

    def _prefill(self) -> int:
        """Take rows in while there is room. Returns the prompt tokens of the step."""
        left = self._model.max_prefill_tokens
        while self._waiting and left and len(self._running) < self._model.max_rows:
            row = self._waiting[0]
            taken = min(left, row.prefill_left)
            row.prefill_left, left = row.prefill_left - taken, left - taken
            if row.prefill_left:
                break
            self._running.append(self._waiting.popleft())
        return self._model.max_prefill_tokens - left

    def _emit(self) -> None:
        """A token for every row that runs."""
        now_s, finished = time.monotonic(), False
        for row in self._running:
            if row.request.gone:
                continue
            row.generated += 1
            row.tokens_left -= 1
            if row.generated == 1 or not row.tokens_left:
                self._observe(row, now_s)
            row.request.put(row, last=not row.tokens_left)
            if not row.tokens_left:
                finished = True
                row.request.rows_left -= 1
                if not row.request.rows_left:
                    row.request.finish()
        if self._metrics is not None and self._running:
            self._metrics.generated_tokens.inc(len(self._running))
        if finished:
            self._running = [row for row in self._running if row.tokens_left]

    def _observe(self, row: _Row, now_s: float) -> None:
        """TTFT, and what follows from the last token. ITL is left out: a sample a token would cost more than
        the token."""
        arrived_at_s = row.request.arrived_at_s
        if row.generated == 1:
            row.first_at_s = now_s
            if self._metrics is not None:
                self._metrics.ttft.observe(now_s - arrived_at_s)
        if not row.tokens_left and self._metrics is not None:
            self._metrics.finished(row.first_at_s - arrived_at_s, now_s - arrived_at_s, row.generated)


def _word(index: int) -> str:
    return f" w{index}"


def _openai_usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
    }
