"""The Serve deployment that holds an engine: one actor per replica."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve

from service.config import PoolConfig
from service.engine.protocol import Endpoint, Engine, Message

PUBLISH_PERIOD_S = 1.0


@serve.deployment
class EngineReplica:
    """Serves one pool's model. Serve counts it as running once the model has generated a token."""

    async def __init__(self, pool: PoolConfig) -> None:
        # Only replicas pay for importing vLLM.
        from service.engine.vllm_engine import VllmEngine

        self.engine: Engine = VllmEngine(pool)
        await self.engine.start()
        self._publisher = asyncio.create_task(self._publish())

    async def answer(self, endpoint: Endpoint, body: dict[str, Any]) -> AsyncGenerator[Message | None, None]:
        """Yield None as soon as the request has arrived, then what the engine answers."""
        yield None
        async for message in self.engine.answer(endpoint, body):
            yield message

    async def check_health(self) -> None:
        """Raise when the engine is dead; Serve then replaces the replica."""
        await self.engine.check_health()

    async def _publish(self) -> None:
        while True:
            await self.engine.publish()
            await asyncio.sleep(PUBLISH_PERIOD_S)

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.shutdown()
