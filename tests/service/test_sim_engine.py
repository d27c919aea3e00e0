"""The simulated engine: that its steps take the model's time, and that it answers like an engine."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from service.engine import sim_engine
from service.engine.protocol import Answer, Call, Message, Usage
from service.engine.sim_engine import SimEngine
from service.pools import PoolConfig

FAST = {"fixed_ms": 1.0, "per_row_ms": 0.0, "per_prefill_token_ms": 0.0}


class NoMetrics:
    """Stands where Ray's metrics would; there is no Ray here."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_engine, "LatencyMetrics", lambda _: NoMetrics())


async def started(**model: Any) -> SimEngine:
    pool = PoolConfig(name="p", model="m", served_model_name="demo", coalesce_ms=0, sim=FAST | model)
    engine = SimEngine(pool)
    await engine.start()
    return engine


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[SimEngine]:
    engine = await started()
    yield engine
    engine.shutdown()


def ask(engine: SimEngine, endpoint: Any = "completion", **body: Any) -> AsyncGenerator[Message, None]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if endpoint == "chat" else {"prompt": "a b c"}
    return engine.answer(Call(endpoint, {"model": "demo"} | prompt | body, "id-1"))


async def everything(messages: AsyncGenerator[Message, None]) -> list[Message]:
    async with asyncio.timeout(30):
        return [message async for message in messages]


@pytest.mark.asyncio
@pytest.mark.parametrize("endpoint", ["completion", "chat"])
async def test_plain_and_streamed_say_the_same(engine: SimEngine, endpoint: str) -> None:
    answer, usage = await everything(ask(engine, endpoint, max_tokens=5, n=2))
    assert isinstance(answer, Answer)
    assert answer.body
    plain = json.loads(answer.body)
    assert [choice["index"] for choice in plain["choices"]] == [0, 1]
    assert plain["usage"]["completion_tokens"] == 10
    assert isinstance(usage, Usage)
    assert usage.generated_tokens == 10
    first, *texts, last = await everything(ask(engine, endpoint, max_tokens=5, n=2, stream=True))
    assert first == Answer(200, None)
    assert last == usage
    *lines, done = "".join(text for text in texts if isinstance(text, str)).strip().split("\n\n")
    assert done == "data: [DONE]"
    said = {0: "", 1: ""}
    for chunk in map(json.loads, (line.removeprefix("data: ") for line in lines)):
        (choice,) = chunk["choices"]
        said[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
    full = plain["choices"][0]
    assert set(said.values()) == {full["message"]["content"] if endpoint == "chat" else full["text"]}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("endpoint", "body", "what"),
    [
        ("completion", {"logprobs": 1}, "logprobs"),
        ("completion", {"max_tokens": 0}, "max_tokens"),
        ("completion", {"max_tokens": 40_000}, "expected prompt and answer to fit"),
        ("completion", {"prompt": ""}, "prompt: expected a prompt"),
        ("chat", {"messages": []}, "messages: expected a prompt"),
        ("tokenize", {}, "expected a model with a tokenizer"),
    ],
)
async def test_what_it_does_not_simulate_is_refused(
    engine: SimEngine, endpoint: str, body: dict[str, Any], what: str
) -> None:
    (refusal,) = await everything(ask(engine, endpoint, **body))
    assert isinstance(refusal, Answer)
    assert refusal.status == 400
    assert refusal.body
    assert what in refusal.body


@pytest.mark.asyncio
async def test_steps_take_the_time_of_the_model() -> None:
    engine = await started(fixed_ms=10, per_row_ms=1, per_prefill_token_ms=1)
    started_at_s = time.monotonic()
    await asyncio.gather(*(everything(ask(engine, max_tokens=20)) for _ in range(5)))
    took_s = time.monotonic() - started_at_s
    # 20 steps of 10 ms and 5 rows, 15 prompt tokens in one or two of them. A busy machine is only ever later.
    assert 20 * 0.015 <= took_s < 5
    engine.shutdown()


@pytest.mark.asyncio
async def test_rows_beyond_the_bound_wait_and_long_prompts_go_in_chunks() -> None:
    engine = await started(fixed_ms=5, max_rows=1, max_prefill_tokens=2)
    ended: list[int] = []

    async def one(index: int) -> None:
        await everything(ask(engine, max_tokens=5))
        ended.append(index)

    await asyncio.gather(*map(one, range(3)))
    assert ended == [0, 1, 2]
    engine.shutdown()


@pytest.mark.asyncio
async def test_leaving_frees_the_row_while_it_waits_and_while_it_runs() -> None:
    engine = await started(fixed_ms=2, max_rows=1)
    running, waiting = (
        ask(engine, max_tokens=10_000, stream=True),
        ask(engine, max_tokens=10_000, stream=True),
    )
    assert await anext(running) == Answer(200, None)
    asking = asyncio.create_task(anext(waiting))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await running.aclose()
    assert len(await everything(ask(engine, max_tokens=3))) == 2
    engine.shutdown()


@pytest.mark.asyncio
async def test_an_engine_whose_steps_ended_is_not_healthy(engine: SimEngine) -> None:
    await engine.check_health()
    engine.shutdown()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="expected the steps to go on"):
        await engine.check_health()
