"""What a replica is: the class of the Serve deployment that holds an engine."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ray import serve

from service.engine.protocol import Answer, Call, Demand, Engine, Message, Probe, Report
from service.errors import ENGINE_DEAD, engine_dead, pool_full
from service.metrics.replicas import ReplicaMetrics
from service.pools import PoolConfig
from service.scaling import stats

WATCH_PERIOD_S = 1.0
LAST_WORDS_S = 2.0
"""Time for the streams of a dead engine to say why they end, before the replica goes."""
DEMAND_LASTS_S = 12.0
"""An ingress that says nothing for this long is gone."""

logger = logging.getLogger("ray.serve")


class EngineReplica:
    """Serves one pool's model. Serve counts it as running once the model has generated a token."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(self, pool: PoolConfig) -> None:  # type: ignore[misc]
        self._pool = pool
        self._id = serve.get_replica_context().replica_id.unique_id
        self._order = time.time_ns()
        self._metrics = ReplicaMetrics(pool)
        self._demands: dict[str, tuple[float, Demand]] = {}
        self._held = 0
        self._dead = False
        self.engine = _engine(pool)
        await self.engine.start()
        self._metrics.started()
        self._watching = asyncio.create_task(self._watch())

    async def answer(self, call: Call) -> AsyncGenerator[Message | None, None]:
        """Yield None as soon as the request is accepted, then what the engine answers; or a refusal alone."""
        if self._dead:
            yield Answer.of(engine_dead())
            return
        if self._held >= self._pool.max_concurrent_requests:
            yield Answer.of(pool_full(self._pool.max_concurrent_requests))
            return
        self._held += 1
        try:
            yield None
            async with aclosing(self.engine.answer(call)) as messages:
                async for message in messages:
                    if isinstance(message, Answer) and message.code == ENGINE_DEAD:
                        self._dead = True
                    yield message
        finally:
            self._held -= 1

    async def probe(self, probe: Probe) -> Report:
        """What routers know of this replica. What an ingress has seen is kept for the autoscaler."""
        self._demands[probe.demand.ingress] = (time.monotonic(), probe.demand)
        return Report(self._id, self._order, not self._dead, self._held, self.engine.load())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve passes to the autoscaling policy (service/scaling.py)."""
        return stats(self._order, self._held, self.engine.load().model, self._recent_demands())

    def _recent_demands(self) -> list[Demand]:
        now_s = time.monotonic()
        return [demand for at_s, demand in self._demands.values() if now_s - at_s < DEMAND_LASTS_S]

    async def check_health(self) -> None:
        """Raise when the engine is dead, for Serve; `_watch` is quicker."""
        if self._dead:
            raise RuntimeError("expected an engine that lives; it is dead or stalled")

    async def _watch(self) -> None:
        """Ask the engine, through its own loop, whether it lives. Once it does not, end the process, so that
        Serve starts another and sends nothing here meanwhile."""
        while not self._dead:
            try:
                async with asyncio.timeout(self._pool.stall_timeout_s):
                    await self.engine.check_health()
                    await self.engine.publish()
                    self._metrics.publish()
                await asyncio.sleep(WATCH_PERIOD_S)
            except Exception as error:
                self._dead = True
                stalled = isinstance(error, TimeoutError)
                reason = (
                    f"did not answer for {self._pool.stall_timeout_s} s" if stalled else f"died: {error!r}"
                )
                logger.error("The engine of pool %r %s; its replica is replaced.", self._pool.name, reason)
        await asyncio.sleep(LAST_WORDS_S)
        # Serve's own way of stopping an actor waits for requests that a stalled engine never ends.
        os._exit(1)

    def __del__(self) -> None:
        if hasattr(self, "_watching"):
            # The end of an engine that is told to stop is no death.
            self._watching.cancel()
        if hasattr(self, "engine"):
            self.engine.shutdown()


def _engine(pool: PoolConfig) -> Engine:
    if pool.sim:
        from service.engine.sim_engine import SimEngine

        return SimEngine(pool)
    # Only replicas with a model pay for importing vLLM.
    from service.engine.vllm_engine import VllmEngine

    return VllmEngine(pool)
