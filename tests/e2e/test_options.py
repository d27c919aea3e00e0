"""What vLLM takes of a request beyond the prompt arrives there: each option shows in what comes back."""

import json
from typing import Any

import httpx
import openai
import pytest
from running_service import RunningService

from service.api.ingress import VERSION

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "parameters": CITY}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
"""How a model that the parser `hermes` reads writes a call."""


def complete(client: openai.OpenAI, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    defaults = {"model": "demo", "prompt": "The log of a slot", "max_tokens": 16, "temperature": 0}
    return client.completions.create(**defaults | options, extra_body=extra or {})


def chat(client: openai.OpenAI, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    defaults = {"model": "demo", "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
    return client.chat.completions.create(**defaults | options, extra_body=extra or {})


def tokens(service: RunningService, prompt: str) -> list[int]:
    asked = {"model": "demo", "prompt": prompt, "add_special_tokens": False}
    response = httpx.post(f"{service.url}/tokenize", json=asked, timeout=30)
    found: list[int] = response.raise_for_status().json()["tokens"]
    return found


def test_logit_bias(service: RunningService, client: openai.OpenAI) -> None:
    (letter,) = tokens(service, "x")
    assert complete(client, logit_bias={str(letter): 100}).choices[0].text == "x" * 16


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties(service: RunningService, client: openai.OpenAI, penalty: str) -> None:
    """A bias leaves letters to choose from. Against a reward, a penalty makes the model choose more."""
    bias = {str(token): 100 for letter in "abcdefghijklm" for token in tokens(service, letter)}
    texts = [complete(client, logit_bias=bias, **{penalty: value}).choices[0].text for value in (-2, 2)]
    assert len(set(texts[0])) < len(set(texts[1]))


def test_min_tokens_and_ignore_eos(service: RunningService, client: openai.OpenAI) -> None:
    """A bias makes the model end at once, but for what is asked."""
    (end,) = tokens(service, "<|end|>")

    def generated(**extra: Any) -> int:
        answer = complete(client, extra, logit_bias={str(end): 100})
        count: int = answer.usage.completion_tokens
        return count

    assert generated() == 1
    assert generated(min_tokens=5) == 6
    assert generated(ignore_eos=True) == 16


def test_response_format(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = chat(client, response_format=wanted).choices[0]
    assert json.loads(answer.message.content)["city"] in ("Oslo", "Rome")
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_must_be_called(service: RunningService, client: openai.OpenAI, choice: Any) -> None:
    """A bias makes the model end as soon as it may; it would call again and again."""
    (end,) = tokens(service, "<|end|>")
    asked = {
        "tools": [{"type": "function", "function": WEATHER | {"strict": True}}],
        "tool_choice": choice,
        "logit_bias": {str(end): 100},
    }
    (call,) = chat(client, **asked).choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    streamed = chat(client, **asked, stream=True)
    deltas = [call for chunk in streamed for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "weather"
    arguments = "".join(delta.function.arguments or "" for delta in deltas)
    assert json.loads(arguments) == json.loads(call.function.arguments)


def test_a_tool_that_the_model_chooses(client: openai.OpenAI) -> None:
    """A model with random weights chooses none by itself, so its text is prescribed."""
    tools = [{"type": "function", "function": WEATHER}]
    answer = chat(client, {"structured_outputs": {"choice": [CALL]}}, tools=tools).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"type": "no type"}])
def test_a_structure_that_does_not_compile(service: RunningService, schema: dict[str, Any]) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        answer = service.post(
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "response_format": asked, "stream": stream},
        )
        # A stream may have begun by then.
        assert answer.status_code == 400 or (stream and "[DONE]" not in answer.text), answer.text
        assert '"type": "invalid_request_error"' in answer.text
    assert service.post("completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_tokens_and_back(service: RunningService) -> None:
    found = tokens(service, "The log of a slot")
    asked = {"model": "demo", "tokens": found}
    response = httpx.post(f"{service.url}/detokenize", json=asked, timeout=30)
    assert response.json() == {"prompt": "The log of a slot"}
    assert len(found) > 3


def test_version(service: RunningService) -> None:
    assert httpx.get(f"{service.url}/version").json() == {"version": VERSION}
