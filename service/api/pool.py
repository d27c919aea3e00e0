"""A pool as the ingress sees it: whether its replica answers, how many requests it holds, how each ends."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from service.config import PoolConfig
from service.engine.protocol import Answer, Endpoint, Message
from service.errors import ApiError, not_ready, to_api_error
from service.metrics import REQUESTS

PROBE_PERIOD_S = 1.0
ACCEPT_TIMEOUT_S = 5.0
"""A replica that has not taken a probe or a request after this long is as good as none."""

logger = logging.getLogger("ray.serve")


class Pool:
    """Refuses at once what the replica cannot take, and passes on the rest."""

    def __init__(self, config: PoolConfig, replica: DeploymentHandle) -> None:
        self.config = config
        self._replica = replica
        self.ready = False
        self._held = 0
        self._requests = REQUESTS.bind(config)

    async def watch(self) -> None:
        """Keep knowing whether the replica answers, for ever."""
        while True:
            await self.probe()
            await asyncio.sleep(PROBE_PERIOD_S)

    async def probe(self) -> bool:
        """Whether the replica answers now that its engine is alive."""
        response = self._replica.check_health.remote()
        try:
            await asyncio.wait_for(response, ACCEPT_TIMEOUT_S)
            self.ready = True
        except Exception:
            response.cancel()
            self.ready = False
        return self.ready

    async def answer(self, endpoint: Endpoint, body: dict[str, Any]) -> AsyncGenerator[Message, None]:
        """An Answer, then the events of a stream; a stream that fails ends with one more Answer.

        Closing the generator, or cancelling what waits for it, stops generation.
        """
        outcome, accepted, started = "aborted", False, False
        self._held += 1
        try:
            async with aclosing(self._ask(endpoint, body)) as messages:
                async for message in messages:
                    if message is None:
                        accepted = True
                        continue
                    if isinstance(message, Answer) and message.body is not None:
                        outcome = "error" if started else _outcome(message.status, accepted)
                        # The next request need not find out again; `watch` notices a replica that is back.
                        self.ready = self.ready and message.status != 503
                    started = True
                    yield message
            if outcome == "aborted":
                outcome = "ok"
        finally:
            self._held -= 1
            self._requests.inc(tags={"outcome": outcome})

    async def _ask(self, endpoint: Endpoint, body: dict[str, Any]) -> AsyncGenerator[Message | None, None]:
        """None once the replica has accepted, then what it answers; an Answer of its own if it does not."""
        replies: DeploymentResponseGenerator | None = None
        try:
            self._admit()
            replies = self._replica.options(stream=True).answer.remote(endpoint, body)
            await self._accepted(replies)
            yield None
            async for message in replies:
                yield message
        except Exception as error:
            failure = to_api_error(error)
            if failure.status == 500:
                logger.exception("A request for model %r failed.", self.config.model_id)
            yield Answer.of(failure)
        finally:
            if replies is not None:
                replies.cancel()

    def _admit(self) -> None:
        if not self.ready:
            raise not_ready(self.config.model_id)
        if self._held > self.config.max_concurrent_requests:
            raise ApiError(
                429,
                f"expected at most {self.config.max_concurrent_requests} requests at a time for this model; "
                "got more; send it again after the time in Retry-After",
                code="pool_full",
            )

    async def _accepted(self, replies: DeploymentResponseGenerator) -> None:
        """Wait for the replica to take the request, which takes it no time; an answer may take long."""
        try:
            await asyncio.wait_for(anext(replies), ACCEPT_TIMEOUT_S)
        except TimeoutError:
            raise not_ready(self.config.model_id) from None


def _outcome(status: int, accepted: bool) -> str:
    if status < 400:
        return "ok"
    if not accepted and status in (429, 503):
        return "rejected"
    return "client_error" if status < 500 else "error"
