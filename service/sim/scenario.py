"""What a simulation is told: pools, objectives, workload, policies. A YAML file says it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from service.pools import Count, Seconds, Settings, Slo, StepCost
from service.routing.baselines import LeastLoaded, PowerOfTwo, PrefixAffinity, RoundRobin
from service.routing.policy import (
    PackSpill,
    Policy,
)
from service.sim.workload import AS_LIST, Generator

PolicyName = Literal[
    "pack auto", "pack 0", "pack 1", "least loaded", "power of two", "round robin", "prefix affinity"
]


class SloClass(Slo):
    """What a class of requests is promised. share: of all requests."""

    name: str = "default"
    tpot_ms: Annotated[float, Field(gt=0)] = 25.0
    ttft_ms: Annotated[float, Field(gt=0)] = 1000.0
    share: Annotated[float, Field(gt=0, le=1)] = 1.0


class SimPool(StepCost):
    """Replicas of one kind, and what their steps cost."""

    name: str
    rows_limit: Count = 256
    chunk_tokens: Count = 512
    memory_tokens: Count = 2_000_000
    gpus: Count = 1
    replicas: Count = 1
    max_replicas: Count | None = None
    cold_start_s: Seconds = 30.0

    @model_validator(mode="after")
    def _bounds(self) -> "SimPool":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas: expected {self.replicas} or more; got {self.max_replicas}; raise it"
            )
        return self


class Failure(Settings):
    """A replica, by its number in the pool, dies; with slow_down its steps only get so many times longer."""

    at_s: Seconds
    pool: int = 0
    replica: int = 0
    slow_down: float | None = None


class Scenario(Settings):
    """One simulation, run once for each policy."""

    pools: Annotated[tuple[SimPool, ...], AS_LIST]
    workload: Generator | None = None
    trace: Path | None = Field(default=None, strict=False)
    trace_rate: float = 1.0
    trace_limit: Count | None = None
    slos: Annotated[tuple[SloClass, ...], AS_LIST] = (SloClass(),)
    policies: Annotated[tuple[PolicyName, ...], AS_LIST] = (
        "pack auto",
        "pack 0",
        "pack 1",
        "least loaded",
        "power of two",
    )
    autoscale: bool = False
    routers: Count = 1
    report_period_s: Seconds = 1.0
    queue: int = 1000
    margin: float = 0.9
    failures: Annotated[tuple[Failure, ...], AS_LIST] = ()
    seed: int = 0

    @model_validator(mode="after")
    def _one_source(self) -> "Scenario":
        if (self.workload is None) == (self.trace is None):
            raise ValueError("expected either workload or trace; got both or neither; keep one")
        return self

    def policy(self, name: PolicyName) -> Policy:
        """A fresh one: some count their turns."""
        made: dict[str, Policy] = {
            "pack auto": PackSpill("auto", self.margin),
            "pack 0": PackSpill(0.0, self.margin),
            "pack 1": PackSpill(1.0, self.margin),
            "least loaded": LeastLoaded(),
            "power of two": PowerOfTwo(self.seed),
            "round robin": RoundRobin(),
            "prefix affinity": PrefixAffinity(),
        }
        return made[name]
