"""A pool as one ingress sees it: what its replicas said last, what was sent to them since, how to ask one."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from service.engine.protocol import Call, Demand, Message, Probe, Report
from service.metrics.requests import REQUESTS
from service.metrics.routing import RoutingMetrics
from service.pools import PoolConfig
from service.routing.autoscale import Offered
from service.routing.calibrate import agreed
from service.routing.cost import StepModel
from service.routing.policy import Ask, ReplicaView

PROBE_PERIOD_S = 0.5
PROBE_TIMEOUT_S = 4.0
PATIENCE_S = 10.0
"""With the only replica of a pool, which may just be slow."""
REPLICA_TIMEOUT_S = 4.0
"""How long one replica has to say whether it takes a request, before another is asked."""
STALE_S = 15.0
"""What replicas said longer ago says nothing any more."""

logger = logging.getLogger("ray.serve")


class UnansweredError(Exception):
    """A replica does not say whether it takes a request."""


@dataclass(eq=False, slots=True)
class Sent:
    """A request that this ingress has sent to a replica, until it ends."""

    ask: Ask
    view: ReplicaView | None
    replica: str | None
    at_s: float
    started: bool = False
    ended_at_s: float = math.inf


class Pool:
    """The views of a pool's replicas: what they report, half a second old while all answer, and what this
    ingress has sent since."""

    def __init__(self, config: PoolConfig, handle: DeploymentHandle, ingress: str) -> None:
        self.config = config
        self.views: dict[str, ReplicaView] = {}
        self.requests = REQUESTS.bind(config)
        self.routing = RoutingMetrics(config)
        self.offered = Offered(_since_s=time.monotonic())
        self._handle = handle
        self._ingress = ingress
        self._in_flight: set[Sent] = set()
        self._ended: deque[Sent] = deque()
        """Those that ended lately, which a report may still count."""
        self._live = 0
        self._reported_at_s = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether a replica generates, as of the last probe."""
        return any(view.ready for view in self.views.values())

    @property
    def room(self) -> int:
        """Requests that its replicas hold at most."""
        return self._replicas * self.config.max_concurrent_requests

    @property
    def _replicas(self) -> int:
        """As many as report, and those that are configured where fewer do."""
        return max(len(self.views), self.config.replicas)

    @property
    def stale(self) -> bool:
        return time.monotonic() - self._reported_at_s > STALE_S

    async def probe(self, waiting: int = 0) -> None:
        """Ask all replicas what they have before them; `waiting` requests wait for this pool."""
        asked_at_s = time.monotonic()
        self.routing.queued.set(waiting)
        demand = Demand(self._ingress, waiting, *self.offered.rates(asked_at_s))
        alone = len(self.views) < 2
        try:
            replies = self._handle.broadcast("probe", Probe(None, demand)).results_async(
                timeout_s=PATIENCE_S if alone else PROBE_TIMEOUT_S, return_exceptions=True
            )
            reports = [reply for reply in await replies if isinstance(reply, Report)]
        except TimeoutError:
            # One replica that hangs keeps the others' answers back.
            asked_at_s = time.monotonic()
            reports = [] if alone else await self._probe_each(demand)
        except Exception:
            reports = []
        self._take_over(reports, asked_at_s)

    async def _probe_each(self, demand: Demand) -> list[Report]:
        """The reports of those known replicas that answer."""

        async def one(replica: str) -> Report | None:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    report: Report = await self._handle.probe.remote(Probe(replica, demand))
                    return report
            except Exception:
                return None

        return [report for report in await asyncio.gather(*map(one, self.views)) if report is not None]

    def _take_over(self, reports: list[Report], asked_at_s: float) -> None:
        models = agreed(
            [report.engine.model for report in reports],
            [report.rows for report in reports],
            self.config.step_model,
        )
        self.views = {
            report.replica: self._view(report, model, asked_at_s)
            for report, model in zip(reports, models, strict=True)
        }
        for sent in self._in_flight:
            sent.view = self.views.get(sent.replica) if sent.replica else None
        self._reported_at_s = time.monotonic()
        live = sum(view.ready for view in self.views.values())
        self.routing.replicas(live, sum(view.rows > 0 for view in self.views.values()))
        if live != self._live:
            logger.warning("Pool %r: %d of %d replicas generate.", self.config.name, live, self._replicas)
        self._live = live

    def _view(self, report: Report, model: StepModel, asked_at_s: float) -> ReplicaView:
        """A report, and what was sent since it was asked for."""
        mine = [sent for sent in self._in_flight if sent.replica == report.replica]
        since = [sent for sent in mine if sent.at_s > asked_at_s]
        ended = [
            sent
            for sent in self._ended
            if sent.replica == report.replica and sent.at_s <= asked_at_s < sent.ended_at_s
        ]
        pool = self.config
        return ReplicaView(
            report.replica,
            report.order,
            model,
            rows_limit=pool.max_concurrent_requests,
            chunk_tokens=pool.chunk_tokens,
            ready=report.alive,
            rows=max(0, report.rows + len(since) - len(ended)),
            prefill_tokens=report.engine.prefill_tokens
            + sum(sent.ask.prompt_tokens for sent in since if not sent.started),
            prefill_per_step=report.engine.prefill_per_step,
            strictest_tpot_ms=min((sent.ask.tpot_ms for sent in mine), default=math.inf),
        )

    def sent(self, ask: Ask, replica: str | None) -> Sent:
        """A request is on its way to `replica`; None: to whichever Serve picks."""
        view = self.views.get(replica) if replica else None
        if view is not None:
            view.sent(ask)
        sent = Sent(ask, view, replica, time.monotonic())
        self._in_flight.add(sent)
        return sent

    def started(self, sent: Sent) -> None:
        """Its first words came."""
        if sent.view is not None and not sent.started:
            sent.view.started(sent.ask)
        sent.started = True

    def ended(self, sent: Sent) -> None:
        """It is over, however it went."""
        self._in_flight.discard(sent)
        sent.ended_at_s = time.monotonic()
        self._ended.append(sent)
        while self._ended[0].ended_at_s < sent.ended_at_s - PATIENCE_S:
            self._ended.popleft()
        if sent.view is not None:
            if not sent.started:
                sent.view.prefill_tokens = max(0, sent.view.prefill_tokens - sent.ask.prompt_tokens)
            sent.view.finished(sent.ask)

    async def ask(self, call: Call, patience_s: float) -> AsyncGenerator[Message | None, None]:
        """What a replica answers: None once it has accepted the request, or a refusal alone.

        Raises UnansweredError when it does not say within `patience_s`, REPLICA_TIMEOUT_S at most, and Ray's
        RayActorError when the replica is lost.
        """
        replies: DeploymentResponseGenerator = self._handle.options(stream=True).answer.remote(call)
        try:
            # A replica says at once whether it takes a request; an answer may take long. (In Python 3.11
            # asyncio.wait_for may lose a client's leaving that comes with the reply.)
            try:
                async with asyncio.timeout(min(patience_s, REPLICA_TIMEOUT_S)):
                    accepted: Any = await anext(replies)
            except TimeoutError:
                raise UnansweredError from None
            yield accepted
            async for message in replies:
                yield message
        finally:
            replies.cancel()
