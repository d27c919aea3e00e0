"""The event loop: arrivals, stretches of steps, reports, scaling and failures."""

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf

from service.routing.autoscale import Autoscaler, Bounds, Load, Offered
from service.routing.policy import ReplicaView
from service.sim.replica import Job, SimReplica
from service.sim.router import Router
from service.sim.scenario import Failure, PolicyName, Scenario, SimPool
from service.sim.workload import Arrival, trace

SCALE_PERIOD_S = 2.0


@dataclass
class Outcome:
    """What came of one run. Jobs that were rejected or lost have no end."""

    jobs: list[Job] = field(default_factory=list)
    rejected: int = 0
    lost: int = 0
    gpu_seconds: float = 0.0
    end_s: float = 0.0
    most_replicas: int = 0
    most_queued: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class World:
    """One scenario under one policy."""

    def __init__(self, scenario: Scenario, policy: PolicyName) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.routers = [Router(scenario.policy(policy), len(scenario.pools)) for _ in range(scenario.routers)]
        self.replicas: dict[str, SimReplica] = {}
        self.alive: list[list[SimReplica]] = [[] for _ in scenario.pools]
        self.outcome = Outcome()
        self._events: list[tuple[float, int, str, object]] = []
        self._sequence = count()
        self._names = count()
        self._offered = [Offered() for _ in scenario.pools]
        self._scalers = [self._scaler(pool) for pool in scenario.pools]

    def run(self) -> Outcome:
        """Until every request that was accepted has ended."""
        scenario = self.scenario
        for index, pool in enumerate(scenario.pools):
            for _ in range(pool.replicas):
                self._start(index, 0.0, ready=True)
        for failure in scenario.failures:
            self._at(failure.at_s, "fail", failure)
        for number in range(scenario.routers):
            self._at(scenario.report_period_s * (number + 1) / scenario.routers, "report", number)
        if scenario.autoscale:
            self._at(SCALE_PERIOD_S, "scale", None)
        arrivals = self._jobs()
        job = next(arrivals, None)
        open_jobs = self.outcome.jobs
        while job is not None or self._busy():
            if job is not None and (not self._events or job.arrived_s <= self._events[0][0]):
                self._arrive(job)
                open_jobs.append(job)
                job = next(arrivals, None)
                continue
            now_s, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(now_s, what)
        self._close()
        return self.outcome

    def _busy(self) -> bool:
        return any(router.queue for router in self.routers) or any(
            replica.rows for pool in self.alive for replica in pool
        )

    def _jobs(self) -> Iterator[Job]:
        scenario = self.scenario
        source: Iterable[Arrival]
        if scenario.workload is not None:
            source = scenario.workload.arrivals(scenario.seed)
        else:
            assert scenario.trace is not None
            source = trace(scenario.trace, scenario.trace_rate, scenario.trace_limit)
        shares = [slo.share for slo in scenario.slos]
        draw = random.Random(scenario.seed + 1)
        for index, arrival in enumerate(source):
            slo = scenario.slos[0] if len(shares) == 1 else draw.choices(scenario.slos, shares)[0]
            yield Job(
                index, arrival.at_s, arrival.prompt_tokens, arrival.output_tokens, slo, prefix=arrival.prefix
            )

    def _at(self, time_s: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._sequence), kind, what))

    def _arrive(self, job: Job) -> None:
        job.router = self.random.randrange(len(self.routers)) if len(self.routers) > 1 else 0
        router = self.routers[job.router]
        if router.queue:
            self._wait(router, job)
            self._serve_queues(job.arrived_s)
        elif not self._route(router, job, job.arrived_s):
            self._wait(router, job)

    def _wait(self, router: Router, job: Job) -> None:
        if len(router.queue) >= self.scenario.queue:
            self._reject(job)
            return
        router.queue.append(job)
        self.outcome.most_queued = max(self.outcome.most_queued, len(router.queue))

    def _reject(self, job: Job) -> None:
        self.outcome.rejected += 1
        self._offered[0].note(job.prompt_tokens, job.output_tokens)

    def _route(self, router: Router, job: Job, now_s: float) -> bool:
        ask = router.ask(job, now_s)
        decision = router.policy.choose(router.pools, ask)
        if decision.replica is None:
            return False
        self.outcome.reasons[str(decision.reason)] += 1
        replica = self.replicas[decision.replica]
        job.replica, job.spilled = replica.name, decision.spilled
        router.sent(job, ask, replica.name)
        if not job.retried:
            self._offered[replica.pool].note(job.prompt_tokens, job.output_tokens)
        end_s = replica.take(job, now_s)
        if end_s is not None:
            self._at(end_s, "step", (replica, replica.version))
        return True

    def _step(self, now_s: float, what: tuple[SimReplica, int]) -> None:
        replica, version = what
        if version != replica.version:
            return
        started, finished = replica.settle()
        for jobs, note in ((started, ReplicaView.started), (finished, ReplicaView.finished)):
            for job in jobs:
                view = self.routers[job.router].view(job)
                if view is not None and job.ask is not None:
                    note(view, job.ask)
        end_s = replica.plan(now_s)
        if end_s is not None:
            self._at(end_s, "step", (replica, replica.version))
        elif replica.draining:
            self._end(replica, now_s)
        if started or finished:
            self._serve_queues(now_s)

    def _serve_queues(self, now_s: float) -> None:
        for router in self.routers:
            while router.queue:
                job = router.queue[0]
                late_ms = self.scenario.margin * job.slo.ttft_ms
                if 1000 * (now_s - job.arrived_s) >= late_ms:
                    self._reject(job)
                elif not self._route(router, job, now_s):
                    break
                router.queue.popleft()

    def _report(self, now_s: float, number: int) -> None:
        router = self.routers[number]
        for pool in self.alive:
            for replica in pool:
                if replica.name in router.views:
                    router.report(replica)
        self._at(now_s + self.scenario.report_period_s, "report", number)
        self._serve_queues(now_s)

    def _scale(self, now_s: float, _what: None) -> None:
        waiting = sum(len(router.queue) for router in self.routers)
        for index, scaler in enumerate(self._scalers):
            serving = [replica for replica in self.alive[index] if not replica.draining]
            views = [_truth(replica) for replica in serving if replica.ready]
            # Who waits, waits for the first pool; the others only get what spills.
            load = Load(
                views, len(serving) - len(views), 0 if index else waiting, *self._offered[index].rates(now_s)
            )
            wanted = scaler.desired(now_s, load)
            for _ in range(wanted - len(serving)):
                self._start(index, now_s)
            for replica in sorted(serving, key=lambda each: -each.order)[: max(0, len(serving) - wanted)]:
                self._drain(replica, now_s)
        self._at(now_s + SCALE_PERIOD_S, "scale", None)

    def _start(self, index: int, now_s: float, *, ready: bool = False) -> None:
        pool, number = self.scenario.pools[index], next(self._names)
        replica = SimReplica(
            f"{pool.name}-{number}",
            index,
            number,
            pool.model,
            pool.rows_limit,
            pool.chunk_tokens,
            pool.memory_tokens,
            now_s,
        )
        self.replicas[replica.name] = replica
        self.alive[index].append(replica)
        self.outcome.most_replicas = max(self.outcome.most_replicas, sum(map(len, self.alive)))
        if ready:
            self._ready(now_s, replica)
        else:
            self._at(now_s + pool.cold_start_s, "ready", replica)

    def _ready(self, now_s: float, replica: SimReplica) -> None:
        if replica.draining:
            return
        replica.ready = True
        for router in self.routers:
            router.add(replica)
        self._serve_queues(now_s)

    def _drain(self, replica: SimReplica, now_s: float) -> None:
        replica.draining = True
        for router in self.routers:
            if replica.name in router.views:
                router.remove(replica)
        if not replica.rows:
            self._end(replica, now_s)

    def _end(self, replica: SimReplica, now_s: float) -> None:
        replica.ended_s = now_s
        self.alive[replica.pool].remove(replica)

    def _fail(self, now_s: float, failure: Failure) -> None:
        index, number, slow_down = failure.pool, failure.replica, failure.slow_down
        if number >= len(self.alive[index]):
            return
        replica = self.alive[index][number]
        if slow_down is not None:
            replica.slow_down = slow_down
            return
        lost = replica.kill()
        self._drain(replica, now_s)
        self._start(index, now_s)
        for job in lost:
            if job.first_s < inf or job.retried:
                self.outcome.lost += 1
                continue
            job.retried = True
            router = self.routers[job.router]
            if not self._route(router, job, now_s):
                self._wait(router, job)

    def _scaler(self, pool: SimPool) -> Autoscaler:
        slo = min(self.scenario.slos, key=lambda each: each.tpot_ms)
        most = pool.max_replicas or pool.replicas
        margin = self.scenario.margin
        return Autoscaler(
            Bounds(pool.replicas, most, slo.tpot_ms, margin=margin, cold_start_s=pool.cold_start_s)
        )

    def _close(self) -> None:
        ends = [job.end_s for job in self.outcome.jobs if job.end_s < inf]
        self.outcome.end_s = max(ends, default=0.0)
        for replica in self.replicas.values():
            end_s = self.outcome.end_s if replica.ended_s is None else replica.ended_s
            gpus = self.scenario.pools[replica.pool].gpus
            self.outcome.gpu_seconds += gpus * max(0.0, end_s - replica.started_s)


def _truth(replica: SimReplica) -> ReplicaView:
    view = ReplicaView(replica.name, replica.order, replica.model, replica.rows_limit, replica.chunk_tokens)
    view.rows = replica.rows
    return view
