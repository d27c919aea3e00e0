"""Where the requests for one model go: its pools, the policy that chooses, who waits, and how each ends."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayActorError

from service.api.line import Line
from service.api.pool import PROBE_PERIOD_S, Pool, UnansweredError
from service.engine.protocol import Answer, Call, Message, Usage
from service.errors import ENGINE_DEAD, POOL_FULL, ApiError, engine_dead, not_ready, pool_full, to_api_error
from service.metrics.routing import PLACED, REFUSED, WAITED
from service.routing.policy import Ask, Decision, PackSpill, Reason
from service.routing.prefixes import Prefixes, beginning

ACCEPT_TIMEOUT_S = 10.0
"""How long a request looks for room, where no SLO says it."""
FULL_PERIOD_S = 0.1
LEAST_PATIENCE_S = 0.25
"""That a replica gets to say whether it takes a request."""
LONGEST_RETRY_AFTER_S = 60
BYTES_A_TOKEN = 4
"""Of a prompt, roughly."""

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a router goes by: an estimate of the prompt's tokens, the tokens asked for, who waits first (lower
    numbers do), and the prompt itself, as JSON values, for its beginning."""

    prompt_tokens: int
    output_tokens: int | None = None
    priority: int = 0
    prompt: Any = None
    generates: bool = True


@dataclass(slots=True)
class _Trip:
    """A request that looks for a replica."""

    priority: int
    call: Call
    ask: Ask
    prefix: tuple[int, ...]
    pools: list[Pool]
    arrived_at_s: float
    in_line: bool = False
    lost: bool = False
    """A replica was lost between taking it and its first word."""
    decision: Decision | None = None
    """The last."""

    @property
    def route(self) -> str | None:
        """The last decision, in words; not for each try, which are many."""
        return None if self.decision is None else str(self.decision)


class Router:
    """Sends each request where the policy says, lets it wait, or refuses it."""

    def __init__(self, pools: list[Pool], policy: PackSpill, max_queued: int) -> None:
        self.pools = pools
        self.model = pools[0].config.model_id
        self._policy = policy
        self._max_queued = max_queued
        self._prefixes = Prefixes()
        self._line = Line()
        self._held = 0
        self._refused = 0
        """Requests refused since one was accepted: they all will come back."""
        self._mean_s = 1.0
        """Duration of a request, over the last few."""
        self._mean_output_tokens = 256.0
        self._owed = dict.fromkeys(pools, 0.0)
        """Requests that a pool with a share has yet to get."""

    @property
    def ready(self) -> bool:
        return any(pool.ready for pool in self.pools)

    async def watch(self, pool: Pool) -> None:
        """Keep knowing what the replicas of `pool` have before them, for ever."""
        while True:
            # Who waits, waits for the first pool; the others only get what spills.
            await pool.probe(len(self._line) if pool is self.pools[0] else 0)
            self._line.wake()
            await asyncio.sleep(PROBE_PERIOD_S)

    async def answer(
        self, call: Call, wanted: Wanted, record: dict[str, Any]
    ) -> AsyncGenerator[Message, None]:
        """An Answer, then the events of a stream and the Usage; a stream that fails ends with another Answer.
        What became of the request is put into `record`, for the log.

        Closing the generator, or cancelling what waits for it, stops generation.
        """
        outcome, accepted, started, arrived_at_s = "aborted", False, False, time.monotonic()
        record["pool"] = self.pools[0].config.name
        self._held += 1
        try:
            async with aclosing(self._answer(call, wanted, record)) as messages:
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
                        if message.generated_tokens:
                            more = message.generated_tokens - self._mean_output_tokens
                            self._mean_output_tokens += more / 16
                    started = True
                    yield message
            if outcome == "aborted":
                outcome = "ok"
        finally:
            self._held -= 1
            (pool,) = (pool for pool in self.pools if pool.config.name == record["pool"])
            pool.requests.inc(tags={"outcome": outcome})
            if outcome == "rejected":
                self.pools[0].routing.decided(REFUSED)
            record["outcome"] = outcome
            if accepted:
                self._mean_s += (time.monotonic() - arrived_at_s - self._mean_s) / 16

    async def _answer(
        self, call: Call, wanted: Wanted, record: dict[str, Any]
    ) -> AsyncGenerator[Message | None, None]:
        """None once a replica has accepted, then what it answers; an Answer of our own if none does."""
        trip = self._trip(call, wanted)
        try:
            # Which replicas live is known a moment late; they refuse themselves what they have no room for.
            if self._held > self._room + self._max_queued:
                raise self._full(trip)
            async with aclosing(self._until_served(trip, record)) as messages:
                async for message in messages:
                    yield message
        except Exception as error:
            failure = to_api_error(error)
            if failure.status == 500:
                logger.exception("Request %s for model %r failed.", call.request_id, self.model)
            record["route"] = trip.route
            yield Answer.of(failure)

    async def _until_served(
        self, trip: _Trip, record: dict[str, Any]
    ) -> AsyncGenerator[Message | None, None]:
        """Ask other replicas while the one that was chosen is full or going, and once more when it is lost
        between taking the request and its first word."""
        while True:
            pool, decision = await self._place(trip)
            # (Serve's log has a `replica` of its own, the ingress.)
            record |= {"pool": pool.config.name, "served_by": decision.replica, "route": trip.route}
            accepted, refusal = False, None
            sent = pool.sent(trip.ask, decision.replica)
            try:
                call = replace(trip.call, replica=decision.replica)
                # Half of the time that is left, so that another can be asked.
                patience_s = max(LEAST_PATIENCE_S, (self._deadline_s(trip) - time.monotonic()) / 2)
                async with aclosing(pool.ask(call, patience_s)) as messages:
                    async for message in messages:
                        refusal = message.code if isinstance(message, Answer) and not sent.started else None
                        if refusal == ENGINE_DEAD and accepted and not trip.lost:
                            raise RayActorError
                        if refusal == POOL_FULL or (refusal == ENGINE_DEAD and not accepted):
                            break
                        if not accepted:
                            accepted = True
                            self._accepted(pool, trip, decision, record)
                        if message is not None:
                            pool.started(sent)
                        yield message
                    else:
                        return
            except UnansweredError:
                record["tried_again"] = True
            except RayActorError:
                if sent.started or trip.lost:
                    raise
                # Its own line in the log says it; a replica that is lost is one incident, not one a request.
                trip.lost = record["tried_again"] = True
            finally:
                pool.ended(sent)
                self._line.wake()
            # Until the next report: full, or not to be asked.
            if sent.view is not None and refusal == POOL_FULL:
                sent.view.rows = sent.view.rows_limit
            elif sent.view is not None:
                sent.view.ready = False
            if refusal == POOL_FULL and time.monotonic() > self._deadline_s(trip):
                raise self._full(trip)
            if time.monotonic() > trip.arrived_at_s + ACCEPT_TIMEOUT_S:
                raise not_ready(self.model)
            await asyncio.sleep(FULL_PERIOD_S)

    async def _place(self, trip: _Trip) -> tuple[Pool, Decision]:
        """The replica for a request, when it is its turn. Raises ApiError when there is none in time."""
        try:
            return await self._line.wait(trip.priority, self._deadline_s(trip), lambda: self._choose(trip))
        except TimeoutError:
            raise (self._full(trip) if self.ready else not_ready(self.model)) from None

    def _choose(self, trip: _Trip) -> tuple[Pool, Decision] | None:
        """What the policy says now; None: wait. Raises ApiError when no replica generates, unless the request
        has waited already: then it has time left."""
        fresh = [pool for pool in trip.pools if not pool.stale]
        if not fresh:
            trip.decision = Decision(None, Reason.NO_VIEW)
            return trip.pools[0], trip.decision
        if not any(pool.ready for pool in fresh):
            if trip.in_line:
                return None
            raise engine_dead() if trip.lost else not_ready(self.model)
        waited_ms = 1000 * (time.monotonic() - trip.arrived_at_s)
        ask = replace(trip.ask, waited_ms=waited_ms, saved_ms=self._saved_ms(trip))
        began_s = time.perf_counter()
        decision = self._policy.choose([list(pool.views.values()) for pool in trip.pools], ask)
        trip.pools[0].routing.decision_seconds.observe(time.perf_counter() - began_s)
        trip.decision = decision
        if decision.replica is None:
            if not trip.in_line:
                trip.pools[0].routing.decided(WAITED)
            trip.in_line = True
            return None
        pool = next(pool for pool in trip.pools if decision.replica in pool.views)
        if pool.config.caches_prefixes:
            self._prefixes.sent(trip.prefix, decision.replica)
        return pool, decision

    def _saved_ms(self, trip: _Trip) -> dict[str, float]:
        """Prefill that each replica's prefix cache would save, by the prompt's beginning."""
        if not trip.prefix:
            return {}
        views = {name: view for pool in trip.pools for name, view in pool.views.items()}
        had = self._prefixes.characters(trip.prefix)
        return {
            name: min(characters / BYTES_A_TOKEN, trip.ask.prompt_tokens) * views[name].model.prefill_token_ms
            for name, characters in had.items()
            if name in views
        }

    def _accepted(self, pool: Pool, trip: _Trip, decision: Decision, record: dict[str, Any]) -> None:
        if decision.reason is not None:
            pool.routing.decided(PLACED[decision.reason])
        if decision.replica is not None and trip.ask.output_tokens:
            pool.routing.predicted(decision.tpot_ms / 1000)
        if decision.spilled:
            record["spilled"] = True
            pool.routing.spilled.inc()

    def _trip(self, call: Call, wanted: Wanted) -> _Trip:
        if not wanted.generates:
            return _Trip(wanted.priority, call, Ask(0, 0), (), self.pools, time.monotonic())
        slo, usual = self.pools[0].config.slo, round(self._mean_output_tokens)
        ask = Ask(
            wanted.prompt_tokens,
            wanted.output_tokens or usual,
            slo.tpot_ms if slo else math.inf,
            slo.ttft_ms if slo else math.inf,
        )
        pools = self._in_order()
        # Many ask for far more tokens than they get.
        pools[0].offered.note(ask.prompt_tokens, min(ask.output_tokens, usual))
        prefix = beginning(wanted.prompt) if any(pool.config.caches_prefixes for pool in pools) else ()
        return _Trip(wanted.priority, call, ask, prefix, pools, time.monotonic())

    def _in_order(self) -> list[Pool]:
        """The pools in spill order, first the one with a share that is owed a request."""
        for pool in self.pools:
            self._owed[pool] += pool.config.share or 0.0
        first = max(self.pools, key=lambda pool: self._owed[pool])
        if self._owed[first] < 1:
            return self.pools
        self._owed[first] -= 1
        return [first, *(pool for pool in self.pools if pool is not first)]

    @property
    def _room(self) -> int:
        return sum(pool.room for pool in self.pools)

    def _deadline_s(self, trip: _Trip) -> float:
        if math.isinf(trip.ask.ttft_ms):
            return trip.arrived_at_s + ACCEPT_TIMEOUT_S
        # After that the policy sends it nowhere.
        return trip.arrived_at_s + self._policy.margin * trip.ask.ttft_ms / 1000

    def _full(self, trip: _Trip) -> ApiError:
        """The refusal of a request. The k-th in a row is told to come back when k will have ended."""
        self._refused += 1
        wait_s = math.ceil(self._refused * self._mean_s / max(1, self._room))
        return pool_full(self._room, min(LONGEST_RETRY_AFTER_S, max(1, wait_s)))


def _outcome(status: int, accepted: bool) -> str:
    if status < 400:
        return "ok"
    if status in (429, 503):
        return "error" if accepted else "rejected"
    return "client_error" if status < 500 else "error"
