"""A pool as the ingress sees it: which of its replicas answer, how many requests it holds, how each ends."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from service.config import PoolConfig
from service.engine.protocol import Answer, Call, Message, Usage
from service.errors import (
    ENGINE_DEAD,
    POOL_FULL,
    ApiError,
    engine_dead,
    not_ready,
    pool_full,
    to_api_error,
)
from service.metrics import REQUESTS

PROBE_PERIOD_S = 0.5
ACCEPT_TIMEOUT_S = 10.0
"""How long a request looks for room that other ingresses have taken, and a probe for its answer."""
REPLICA_TIMEOUT_S = 4.0
"""How long one replica has to say whether it takes a request, before another is asked."""
FULL_PERIOD_S = 0.1
LONGEST_RETRY_AFTER_S = 60

logger = logging.getLogger("ray.serve")


class _UnansweredError(Exception):
    """A replica does not say whether it takes a request."""


class Pool:
    """Refuses at once what no replica can take, and passes on the rest."""

    def __init__(self, config: PoolConfig, replica: DeploymentHandle) -> None:
        self.config = config
        self._replica = replica
        self._live = 0
        """Replicas that generate."""
        self._held = 0
        self._refused = 0
        """Requests refused since one was accepted: they all will come back."""
        self._mean_s = 1.0
        """Duration of a request, over the last few."""
        self._requests = REQUESTS.bind(config)

    @property
    def ready(self) -> bool:
        return self._live > 0

    async def watch(self) -> None:
        """Keep knowing which replicas generate, for ever."""
        while True:
            await self.probe()
            await asyncio.sleep(PROBE_PERIOD_S)

    async def probe(self) -> bool:
        """Whether a replica generates now."""
        try:
            replies = self._replica.broadcast("probe").results_async(
                timeout_s=ACCEPT_TIMEOUT_S, return_exceptions=True
            )
            live = sum(reply is True for reply in await replies)
        except TimeoutError:
            # One replica that hangs keeps the others' answers back; requests find out which one it is.
            live = self._live if self._live > 1 else 0
        except Exception:
            live = 0
        if live != self._live:
            logger.warning(
                "Pool %r: %d of %d replicas generate.", self.config.name, live, self.config.replicas
            )
        self._live = live
        return self.ready

    async def answer(self, call: Call, record: dict[str, Any]) -> AsyncGenerator[Message, None]:
        """An Answer, then the events of a stream and the Usage; a stream that fails ends with another Answer.
        What became of the request is put into `record`, for the log.

        Closing the generator, or cancelling what waits for it, stops generation.
        """
        outcome, accepted, started, arrived_at_s = "aborted", False, False, time.monotonic()
        self._held += 1
        try:
            async with aclosing(self._ask(call, record)) as messages:
                async for message in messages:
                    if message is None:
                        accepted = True
                        self._refused = 0
                        continue
                    if isinstance(message, Answer) and message.body is not None:
                        outcome = "error" if started else _outcome(message.status, accepted)
                    if isinstance(message, Usage):
                        record["prompt_tokens"] = message.prompt_tokens
                        record["generated_tokens"] = message.generated_tokens
                    started = True
                    yield message
            if outcome == "aborted":
                outcome = "ok"
        finally:
            self._held -= 1
            self._requests.inc(tags={"outcome": outcome})
            record |= {"pool": self.config.name, "outcome": outcome}
            if accepted:
                self._mean_s += (time.monotonic() - arrived_at_s - self._mean_s) / 16

    async def _ask(self, call: Call, record: dict[str, Any]) -> AsyncGenerator[Message | None, None]:
        """None once a replica has accepted, then what it answers; an Answer of its own if none does."""
        try:
            self._admit()
            async with aclosing(self._ask_until_served(call, record)) as messages:
                async for message in messages:
                    yield message
        except Exception as error:
            failure = to_api_error(error)
            if failure.status == 500:
                logger.exception("Request %s for model %r failed.", call.request_id, self.config.model_id)
            yield Answer.of(failure)

    def _admit(self) -> None:
        if not self.ready:
            raise not_ready(self.config.model_id)
        # Which replicas live is known a moment late; they refuse themselves what they have no room for.
        if self._held > self.config.replicas * self.config.max_concurrent_requests:
            raise self._full()

    async def _ask_until_served(
        self, call: Call, record: dict[str, Any]
    ) -> AsyncGenerator[Message | None, None]:
        """Ask other replicas while the one that Serve picks is full or going, and once more when it is lost
        between taking the request and its first word."""
        deadline_s, lost = time.monotonic() + ACCEPT_TIMEOUT_S, False
        while True:
            accepted, started, refusal = False, False, None
            try:
                async with aclosing(self._ask_one(call)) as messages:
                    async for message in messages:
                        refusal = message.code if isinstance(message, Answer) and not started else None
                        if refusal == ENGINE_DEAD and accepted and not lost:
                            raise RayActorError
                        if refusal == POOL_FULL or (refusal == ENGINE_DEAD and not accepted):
                            break
                        accepted, started = True, started or message is not None
                        yield message
                    else:
                        return
            except _UnansweredError:
                record["tried_again"] = True
            except RayActorError:
                if started or lost:
                    raise
                # Its own line in the log says it; a replica that is lost is one incident, not one a request.
                lost = record["tried_again"] = True
            # One replica is full or going, and says nothing of the others. Serve picks the one that holds
            # least: one whose engine is dead, as long as its process is there.
            if refusal == ENGINE_DEAD and not self.ready:
                raise engine_dead() if lost else not_ready(self.config.model_id)
            if time.monotonic() > deadline_s:
                raise self._full() if refusal == POOL_FULL else not_ready(self.config.model_id)
            await asyncio.sleep(FULL_PERIOD_S)

    async def _ask_one(self, call: Call) -> AsyncGenerator[Message | None, None]:
        replies: DeploymentResponseGenerator = self._replica.options(stream=True).answer.remote(call)
        try:
            # A replica says at once whether it takes a request; an answer may take long. (In Python 3.11
            # asyncio.wait_for may lose a client's leaving that comes with the reply.)
            try:
                async with asyncio.timeout(REPLICA_TIMEOUT_S):
                    accepted = await anext(replies)
            except TimeoutError:
                raise _UnansweredError from None
            yield accepted
            async for message in replies:
                yield message
        finally:
            replies.cancel()

    def _full(self) -> ApiError:
        """The refusal of a request. The k-th in a row is told to come back when k will have ended."""
        self._refused += 1
        room = max(1, self._live) * self.config.max_concurrent_requests
        wait_s = math.ceil(self._refused * self._mean_s / room)
        return pool_full(self.config, min(LONGEST_RETRY_AFTER_S, max(1, wait_s)))


def _outcome(status: int, accepted: bool) -> str:
    if status < 400:
        return "ok"
    if status in (429, 503):
        return "error" if accepted else "rejected"
    return "client_error" if status < 500 else "error"
