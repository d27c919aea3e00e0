"""The OpenAI API, asked by the openai client."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from running_service import RunningService

PROMPT = "The state of a linear-attention layer is a matrix."
MESSAGES: Any = [{"role": "user", "content": "What is a log?"}]
EXACTLY = {"ignore_eos": True}


def complete(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "extra_body": EXACTLY}
    return client.completions.create(**defaults | options)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="expected one of the models demo; got 'other'"):
        client.models.retrieve("other")


def test_completion_and_its_usage(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.model == "demo"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_streamed_completion_says_the_same(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == complete(client).choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert len(chunks) > 12, "tokens have to arrive while they are generated"


def test_chat_plain_and_streamed(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    plain = client.chat.completions.create(**request)
    assert plain.choices[0].message.role == "assistant"
    assert plain.choices[0].message.content
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason


def test_the_stream_on_the_wire_ends_with_done(service: RunningService) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_stop_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    stop = text[len(text) // 2 :][:4]
    stopped = complete(client, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]


def test_a_seed_does_not_end_the_engine(client: openai.OpenAI) -> None:
    """Whether a prompt takes one step or many: vLLM on a CPU would die of a seed in the second."""
    for prompt in (PROMPT, PROMPT * 20):
        with pytest.raises(openai.BadRequestError, match="seed: expected none, or temperature 0"):
            complete(client, prompt=prompt, temperature=1.0, seed=7)
        assert complete(client, prompt=prompt, seed=7).usage.completion_tokens == 24


def test_n_gives_as_many_choices(client: openai.OpenAI) -> None:
    answer = complete(client, n=3, temperature=1.0, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == 3 * 8


def test_logprobs(client: openai.OpenAI) -> None:
    logprobs = complete(client, logprobs=2, max_tokens=8).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    chat = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content
    for token in content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs), "greedy takes the likeliest"


def test_sixteen_streams_at_once(service: RunningService) -> None:
    async def run() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:

            async def stream(index: int) -> tuple[str, int]:
                text, tokens = "", 0
                async for chunk in await client.completions.create(
                    model="demo",
                    prompt=f"Stream {index}. " * (1 + 3 * index),
                    max_tokens=40,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body=EXACTLY,
                ):
                    text += "".join(choice.text for choice in chunk.choices)
                    tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                return text, tokens

            return await asyncio.gather(*map(stream, range(16)))

    answers = asyncio.run(run())
    assert [tokens for _, tokens in answers] == [40] * 16
    assert len({text for text, _ in answers}) == 16


def test_a_request_id_comes_back(service: RunningService) -> None:
    headers = {"x-request-id": "mine-1"}
    assert httpx.get(f"{service.url}/v1/models", headers=headers).headers["x-request-id"] == "mine-1"
    assert httpx.get(f"{service.url}/v1/models").headers["x-request-id"]
