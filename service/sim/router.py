"""One ingress process of the simulation."""

from collections import deque
from math import inf

from service.routing.policy import Ask, Policy, ReplicaView
from service.sim.replica import Job, SimReplica

PREFIX_TOKENS = 1024
"""Prompt tokens that requests with one prefix have in common, at most."""


class Router:
    """One ingress process: its policy, what it knows of the replicas, and who waits."""

    def __init__(self, policy: Policy, pools: int) -> None:
        self.policy = policy
        self.pools: list[list[ReplicaView]] = [[] for _ in range(pools)]
        self.views: dict[str, ReplicaView] = {}
        self.queue: deque[Job] = deque()
        self.prefixes: dict[int, set[str]] = {}

    def add(self, replica: SimReplica) -> None:
        view = ReplicaView(
            replica.name, replica.order, replica.model, replica.rows_limit, replica.chunk_tokens
        )
        self.views[replica.name] = view
        self.pools[replica.pool].append(view)
        self.report(replica)

    def remove(self, replica: SimReplica) -> None:
        self.pools[replica.pool].remove(self.views.pop(replica.name))

    def report(self, replica: SimReplica) -> None:
        """Take over what the replica itself says."""
        view = self.views[replica.name]
        view.rows, view.prefill_tokens = replica.rows, replica.backlog_tokens
        view.prefill_per_step = replica.prefill_per_step
        view.free_tokens = replica.memory_tokens - replica.held_tokens
        view.strictest_tpot_ms = min((job.slo.tpot_ms for job in replica.jobs), default=inf)

    def ask(self, job: Job, now_s: float) -> Ask:
        saved = {}
        if job.prefix is not None:
            tokens = min(job.prompt_tokens, PREFIX_TOKENS)
            saved = {
                name: tokens * self.views[name].model.prefill_token_ms
                for name in self.prefixes.get(job.prefix, ())
                if name in self.views
            }
        waited_ms = 1000 * (now_s - job.arrived_s)
        return Ask(job.prompt_tokens, job.output_tokens, job.slo.tpot_ms, job.slo.ttft_ms, waited_ms, saved)

    def sent(self, job: Job, ask: Ask, name: str) -> None:
        job.ask = ask
        self.views[name].sent(ask)
        if job.prefix is not None:
            self.prefixes.setdefault(job.prefix, set()).add(name)

    def view(self, job: Job) -> ReplicaView | None:
        """Of the replica that has the job; None when it is gone or drains."""
        return self.views.get(job.replica or "")
