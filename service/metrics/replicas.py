"""What replicas cost: their starts and the time that they hold GPUs."""

import time
from importlib.metadata import PackageNotFoundError, version

from service.metrics.spec import MetricSpec, add
from service.pools import PoolConfig


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


REPLICA_START = MetricSpec(
    "deltalog_replica_start_seconds",
    "histogram",
    "seconds",
    "Cold starts: a replica's constructor to the first token of its engine.",
    buckets=(1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0),
)
ACCELERATOR_SECONDS = MetricSpec(
    "deltalog_accelerator_seconds_total",
    "counter",
    "seconds",
    "Time that replicas held their GPUs, their starts included, once for each; a replica without a GPU "
    "counts as one.",
)
BUILD_INFO = MetricSpec(
    "deltalog_build_info",
    "gauge",
    "info",
    "1, with the versions of DeltaLog and vLLM that the replica runs.",
    labels={"version": (_version("deltalog"),), "vllm": (_version("vllm"),)},
)


class ReplicaMetrics:
    """What one replica costs, from its constructor on."""

    def __init__(self, pool: PoolConfig) -> None:
        self._start = REPLICA_START.bind(pool)
        self._build = BUILD_INFO.bind(pool)
        self._held = ACCELERATOR_SECONDS.bind(pool)
        self._accelerators = max(1, pool.gpus_per_replica)
        self._since_s = self._began_s = time.monotonic()

    def started(self) -> None:
        """It has generated its first token."""
        self._start.observe(time.monotonic() - self._began_s)

    def publish(self) -> None:
        """Count the time since the last call; say the versions again, which Ray forgets."""
        now_s = time.monotonic()
        add(self._held, self._accelerators * (now_s - self._since_s))
        self._since_s = now_s
        self._build.set(1, tags={name: value for name, (value,) in BUILD_INFO.labels.items()})
