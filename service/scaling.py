"""Autoscaling on Ray Serve: what replicas tell its controller, and the policy that the controller asks."""

import logging
import time
from collections.abc import Iterable
from math import inf
from typing import Any

from service.engine.protocol import Demand
from service.metrics.routing import DESIRED_REPLICAS
from service.pools import PoolConfig
from service.routing.autoscale import Autoscaler, Bounds, Load
from service.routing.calibrate import agreed
from service.routing.cost import StepModel
from service.routing.policy import ReplicaView

PERIOD_S = 2.0
"""Between two decisions, and between two samples of a replica."""

UNKNOWN = StepModel(0.0, 0.0, 0.0, 0.0)
"""Serve passes on numbers alone; this stands for none."""

logger = logging.getLogger("ray.serve")


def stats(order: int, rows: int, learned: StepModel | None, demands: Iterable[Demand]) -> dict[str, float]:
    """One replica's sample. Every ingress tells every replica what it sees, so any of them can say it."""
    demands, model = list(demands), learned or UNKNOWN
    return {
        "order": float(order),
        "rows": float(rows),
        "fixed_ms": model.fixed_ms,
        "slope_ms": model.slope_ms,
        "prefill_token_ms": model.prefill_token_ms,
        "waiting": float(sum(demand.waiting for demand in demands)),
        "requests_per_s": sum(demand.requests_per_s for demand in demands),
        "prompt_tokens_per_s": sum(demand.prompt_tokens_per_s for demand in demands),
        "output_tokens_per_s": sum(demand.output_tokens_per_s for demand in demands),
    }


def load_of(samples: dict[Any, dict[str, float]], target: int, pool: PoolConfig) -> Load:
    """A pool's load, from the last sample of each replica that runs; `target`: replicas wanted now. Where
    fewer are wanted than run, what the newest hold counts as waiting."""
    ordered = sorted(samples.items(), key=lambda each: each[1]["order"])
    models = agreed(
        [
            StepModel(sample["fixed_ms"], sample["slope_ms"], 0.0, sample["prefill_token_ms"])
            if sample["slope_ms"] + sample["fixed_ms"]
            else None
            for _, sample in ordered
        ],
        [int(sample["rows"]) for _, sample in ordered],
        pool.step_model,
    )
    views = [
        ReplicaView(
            str(replica),
            int(sample["order"]),
            model,
            pool.max_concurrent_requests,
            1,
            rows=int(sample["rows"]),
        )
        for (replica, sample), model in zip(ordered, models, strict=True)
    ]
    beyond = sum(view.rows for view in views[target:])
    views = views[:target]

    def most(name: str) -> float:
        return max((sample[name] for sample in samples.values()), default=0.0)

    rates = (most(name) for name in ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s"))
    return Load(views, target - len(views), int(most("waiting")) + beyond, *rates)


class PoolScaling:
    """Serve's autoscaling policy of one pool: `Autoscaler`, fed with what the replicas last said."""

    def __init__(self, pool: dict[str, Any]) -> None:
        self._pool = PoolConfig.model_validate(pool)
        assert self._pool.slo is not None
        assert self._pool.max_replicas is not None
        self._scaler = Autoscaler(
            Bounds(
                self._pool.replicas,
                self._pool.max_replicas,
                self._pool.slo.tpot_ms,
                cold_start_s=self._pool.start_s,
            )
        )
        self._decided_at_s = -inf
        self._desired = self._pool.replicas
        self._gauge = DESIRED_REPLICAS.bind(self._pool)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve asks ten times a second. Returns the replicas wanted, and no state for Serve to keep."""
        # Nobody follows advice: it is then asked what comes after it.
        target = self._desired if self._pool.advisory else context.target_num_replicas
        now_s = time.monotonic()
        if now_s - self._decided_at_s >= PERIOD_S:
            self._decided_at_s = now_s
            desired = self._scaler.desired(now_s, load_of(_last_samples(context), target, self._pool))
            if desired != self._desired:
                logger.warning("Pool %r: the load asks for %d replicas.", self._pool.name, desired)
            self._desired = desired
            self._gauge.set(desired)
        return (context.target_num_replicas if self._pool.advisory else self._desired), {}


def _last_samples(context: Any) -> dict[Any, dict[str, float]]:
    """The last sample of each running replica that has sent one."""
    running = set(context.running_replicas)
    samples: dict[Any, dict[str, float]] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if replica in running and series:
                samples.setdefault(replica, {})[name] = series[-1].value
    return {replica: sample for replica, sample in samples.items() if "order" in sample}
