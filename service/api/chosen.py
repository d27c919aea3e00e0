"""Serve's own router, told by ours which replica a request goes to."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from service.engine.protocol import Call, Probe
from service.metrics.routing import UNROUTED
from service.pools import PoolConfig


class ChosenReplica(RequestRouter):
    """Gives a request to the replica that its Call names.

    Where it names none, or one that Serve has not heard of or no longer has, the request goes to the replica
    with the shortest queue, and is counted. (Serve's FIFOMixin is left out: with it a replica that was chosen
    for one request is given the oldest.)
    """

    def initialize_state(self, pool: dict[str, Any]) -> None:
        self._unrouted = UNROUTED.bind(PoolConfig.model_validate(pool))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        context = pending_request.routing_context
        # Serve asks again when the replica has not answered; without this it would ask without a pause.
        asked_before, context.should_backoff = context.should_backoff, True
        asked = pending_request.args[0] if pending_request.args else None
        wanted = asked.replica if isinstance(asked, Call | Probe) else None
        chosen = [each for each in candidate_replicas if each.replica_id.unique_id == wanted]
        if chosen:
            return [chosen]
        if candidate_replicas and not asked_before:
            self._unrouted.inc()
        return [candidate_replicas]
