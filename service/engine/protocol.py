"""What the ingress and a replica say to each other, and what a replica expects of its engine."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from service.errors import ApiError
from service.routing.cost import StepModel

Endpoint = Literal["chat", "completion", "tokenize", "detokenize"]
GRAMMARS = ("response_format", "structured_outputs")
"""What in a body says what an answer must look like."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it travels to an engine: which endpoint, the body as JSON values, and its id.

    replica: the one that it was routed to; None where the router has no view of the pool.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    request_id: str
    replica: str | None = None


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


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has before it: prompt tokens of requests without a first token, the mean that a step
    takes in, and what its steps cost, once that is known."""

    prefill_tokens: int
    prefill_per_step: float
    model: StepModel | None


@dataclass(frozen=True, slots=True)
class Demand:
    """What an ingress has seen of requests for a pool: how many wait for room, and how many came a second,
    with their prompt and output tokens."""

    ingress: str
    waiting: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """What an ingress asks a replica for its report with. replica: the one that is meant; None: each."""

    replica: str | None
    demand: Demand


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica answers to a probe. order: its age, older ones lower. rows: requests that it holds."""

    replica: str
    order: int
    alive: bool
    rows: int
    engine: EngineLoad


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

    def load(self) -> EngineLoad:
        """What lies before the engine now."""

    async def publish(self) -> None:
        """Bring the engine's metrics up to date."""

    def shutdown(self) -> None:
        """Stop the engine's processes."""
