"""The wiring, without a cluster."""

import os
import subprocess
import sys

import pytest

from service.app import build_app
from service.config import ConfigError


def test_a_configuration_sets_the_options_of_its_deployments() -> None:
    pool = {"name": "p", "model": "m", "cpus_per_replica": 3, "replicas": 2}
    args = {"pools": [pool], "keys_file": "keys.yaml", "ingress_replicas": 4, "drain_timeout_s": 7}
    ingress = build_app(args)._bound_deployment
    (replica,) = (application._bound_deployment for application in ingress.init_args[1])
    assert (ingress.name, replica.name) == ("ingress", "p")
    assert ingress.ray_actor_options["num_cpus"] == 0
    assert ingress.num_replicas == 4
    for deployment in (ingress, replica):
        assert deployment.max_ongoing_requests > 1000, "Pool refuses; Serve must not queue before it can"
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 7
    assert replica.ray_actor_options["num_cpus"] == 3
    assert replica.num_replicas == 2
    assert replica._deployment_config.max_constructor_retry_count == 1


def test_a_wrong_configuration_does_not() -> None:
    with pytest.raises(ConfigError, match=r"args: pools\[0\]\.merge_interval"):
        build_app({"pools": [{"name": "p", "model": "m", "merge_interval": 0}]})


def test_a_cluster_needs_keys() -> None:
    with pytest.raises(ConfigError, match="keys_file: expected API keys"):
        build_app({"pools": [{"name": "p", "model": "m"}]})


def test_only_replicas_import_vllm_and_nobody_reports_usage() -> None:
    """In a process of its own: what importing the application loads and sets."""
    script = "import service.app, sys, os; print('vllm' in sys.modules, *map(os.environ.get, sys.argv[1:]))"
    names = ["RAY_USAGE_STATS_ENABLED", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"]
    environment = {name: value for name, value in os.environ.items() if name not in names}
    printed = subprocess.run(
        [sys.executable, "-c", script, *names], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == ["False", "0", "1", "1"]
