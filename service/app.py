"""The application: every deployment of the service and how they are wired."""

from typing import Any

from ray import serve

from service.api.ingress import Ingress, api
from service.config import PoolConfig, ServiceConfig, parse_config
from service.engine.replica import EngineReplica

PROBES = 8
"""Requests that a replica takes beyond its bound, so that probes get through to a full pool."""


def build_app(args: dict[str, Any]) -> serve.Application:
    """The service of a configuration, for `import_path: service.app:build_app`. Raises ConfigError."""
    return build(parse_config(args, "args"))


def build(config: ServiceConfig) -> serve.Application:
    """One engine deployment per pool, behind one ingress."""
    ingress = serve.deployment(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        # A request that no replica can take is answered by Pool; Serve's bound must never queue it first.
        max_ongoing_requests=1_000_000,
    )(serve.ingress(api)(Ingress))
    return ingress.bind(config, [_replica(pool) for pool in config.pools])


def _replica(pool: PoolConfig) -> serve.Application:
    replica = serve.deployment(
        name=pool.name,
        max_ongoing_requests=pool.max_concurrent_requests + PROBES,
        ray_actor_options={"num_cpus": pool.cpus_per_replica},
        # What stops a model from loading does not go away by trying again.
        max_constructor_retry_count=1,
        health_check_period_s=2,
        # The ingress logs each request; the replica would add a line for every probe.
        logging_config={"enable_access_log": False},
    )(EngineReplica)
    return replica.bind(pool)
