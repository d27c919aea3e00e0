"""What a replica is: the class of the Serve deployment that holds an engine."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from service.config import PoolConfig
from service.engine.protocol import Endpoint, Engine, Message

PUBLISH_PERIOD_S = 1.0

logger = logging.getLogger("ray.serve")


class EngineReplica:
    """Serves one pool's model. Serve counts it as running once the model has generated a token."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(self, pool: PoolConfig) -> None:  # type: ignore[misc]
        # Only replicas pay for importing vLLM.
        from service.engine.vllm_engine import VllmEngine

        self.engine: Engine = VllmEngine(pool)
        await self.engine.start()
        self._publisher = asyncio.create_task(self._publish())

    async def answer(self, endpoint: Endpoint, body: dict[str, Any]) -> AsyncGenerator[Message | None, None]:
        """Yield None as soon as the request has arrived, then what the engine answers."""
        yield None
        async with aclosing(self.engine.answer(endpoint, body)) as messages:
            async for message in messages:
                yield message

    async def check_health(self) -> None:
        """Raise when the engine is dead; Serve then replaces the replica."""
        await self.engine.check_health()

    async def _publish(self) -> None:
        while True:
            try:
                await self.engine.publish()
            except Exception:
                logger.exception("The engine's metrics could not be published.")
            await asyncio.sleep(PUBLISH_PERIOD_S)

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.shutdown()
