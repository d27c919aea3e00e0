"""What the ingress and a replica say to each other, and what a replica expects of its engine."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from service.errors import ApiError

Endpoint = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The verdict on a request: its HTTP status and JSON body.

    `body` is None when the answer is a stream, whose SSE events follow. After events, an Answer says why
    the stream ends before its time.
    """

    status: int
    body: str | None

    @classmethod
    def of(cls, error: ApiError) -> "Answer":
        return cls(error.status, error.body)


Message = Answer | str
"""An Answer, or the text of one SSE event with its closing blank line."""


class EngineStartError(Exception):
    """The engine refused to start or could not. The message is the engine's own reason."""


class Engine(Protocol):
    """One model, loaded. Building one, and `start`, raise EngineStartError."""

    async def start(self) -> None:
        """Generate one token the way requests do; the engine is ready when it has."""

    def answer(self, endpoint: Endpoint, body: dict[str, Any]) -> AsyncGenerator[Message, None]:
        """Serve one request: an Answer first, then the events of a stream. Closing it stops generation."""

    async def check_health(self) -> None:
        """Raise when the engine cannot generate any more."""

    async def publish(self) -> None:
        """Bring the engine's metrics up to date."""

    def shutdown(self) -> None:
        """Stop the engine's processes."""
