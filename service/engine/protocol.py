"""What the ingress and a replica say to each other, and what a replica expects of its engine."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from service.errors import ApiError

Endpoint = Literal["chat", "completion", "tokenize", "detokenize"]
GRAMMARS = ("response_format", "structured_outputs")
"""What in a body says what an answer must look like."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it travels to an engine: which endpoint, the body as JSON values, and its id."""

    endpoint: Endpoint
    body: dict[str, Any]
    request_id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The verdict on a request: its HTTP status and JSON body.

    `body` is None when the answer is a stream, whose SSE events follow. After events, an Answer says why
    the stream ends before its time.
    """

    status: int
    body: str | None
    code: str | None = None
    retry_after_s: int | None = None

    @classmethod
    def of(cls, error: ApiError) -> "Answer":
        return cls(error.status, error.body, error.code, error.retry_after_s)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request has taken; the last message of one that was served."""

    prompt_tokens: int
    generated_tokens: int


Message = Answer | str | Usage
"""An Answer, the text of one or more SSE events, each with its closing blank line, or the Usage."""


class EngineStartError(Exception):
    """The engine refused to start or could not. The message is the engine's own reason."""


class Engine(Protocol):
    """One model, loaded. Building one, and `start`, raise EngineStartError."""

    async def start(self) -> None:
        """Generate one token the way requests do; the engine is ready when it has."""

    def answer(self, call: Call) -> AsyncGenerator[Message, None]:
        """Serve one request: an Answer first, then the events of a stream. Closing it stops generation."""

    async def check_health(self) -> None:
        """Raise when the engine cannot generate any more. Passes through the engine's own loop, so that it
        takes as long as a stall."""

    async def publish(self) -> None:
        """Bring the engine's metrics up to date."""

    def shutdown(self) -> None:
        """Stop the engine's processes."""
