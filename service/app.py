"""The application: every deployment of the service and how they are wired."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from service.api.chosen import ChosenReplica
from service.api.ingress import Ingress, api
from service.config import ConfigError, ServiceConfig, parse_config
from service.engine.replica import EngineReplica
from service.pools import PoolConfig
from service.scaling import PERIOD_S, PoolScaling

NO_BOUND = 1_000_000
"""Replicas and Pool refuse what they cannot take; Serve's own bounds must never queue it first."""

HEALTH_TIMEOUT_S = 10
"""A replica whose process does not answer for this long, three times, is replaced."""

LOGGING = {"encoding": "JSON", "enable_access_log": False}
"""Guard logs each request once, with what became of it."""


def build_app(args: dict[str, Any]) -> serve.Application:
    """The service of a configuration, for `import_path: service.app:build_app`. Raises ConfigError."""
    config = parse_config(args, "args")
    if config.keys_file is None:
        raise ConfigError(
            "args: keys_file: expected API keys, because the cluster decides who reaches the service; "
            "got none; set it"
        )
    return build(config)


def build(config: ServiceConfig) -> serve.Application:
    """One engine deployment per pool, behind one ingress."""
    ingress = serve.deployment(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        num_replicas=config.ingress_replicas,
        # A new configuration finds its ingress running before the old one leaves.
        max_surge_percent=100,
        max_ongoing_requests=NO_BOUND,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        logging_config=LOGGING,
    )(serve.ingress(api)(Ingress))
    return ingress.bind(config, [_replica(config, pool) for pool in config.pools])


def _replica(config: ServiceConfig, pool: PoolConfig) -> serve.Application:
    replica = serve.deployment(
        name=pool.name,
        max_ongoing_requests=NO_BOUND,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        ray_actor_options=_placement(pool),
        request_router_config=RequestRouterConfig(
            request_router_class=ChosenReplica, request_router_kwargs={"pool": pool.model_dump(mode="json")}
        ),
        **_number(pool),
        # What stops a model from loading does not go away by trying again.
        max_constructor_retry_count=1,
        health_check_period_s=2,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        logging_config=LOGGING,
    )(EngineReplica)
    return replica.bind(pool)


def _placement(pool: PoolConfig) -> dict[str, Any]:
    """What Ray looks for in a node, and takes of it, for one replica."""
    options: dict[str, Any] = {"num_cpus": pool.cpus_per_replica, "num_gpus": pool.gpus_per_replica}
    if pool.placement:
        options["label_selector"] = pool.placement
    if pool.resources:
        options["resources"] = dict(pool.resources)
    return options


def _number(pool: PoolConfig) -> dict[str, Any]:
    """How many replicas: so many, or as many as its load asks for."""
    if pool.max_replicas is None:
        return {"num_replicas": pool.replicas}
    policy = AutoscalingPolicy(
        policy_function=PoolScaling, policy_kwargs={"pool": pool.model_dump(mode="json")}
    )
    # The policy has its own delays and looks at the last samples; Serve adds nothing to it. Without
    # `initial_replicas` a changed configuration keeps as many as there are.
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=pool.replicas,
            max_replicas=pool.max_replicas,
            metrics_interval_s=PERIOD_S,
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=policy,
        )
    }
