"""The wiring, without a cluster."""

import os
import subprocess
import sys

import pytest
from ray.serve import Application

from service.app import build_app
from service.config import ConfigError


def test_a_configuration_builds_an_application() -> None:
    assert isinstance(build_app({"pools": [{"name": "p", "model": "m"}]}), Application)


def test_a_wrong_configuration_does_not() -> None:
    with pytest.raises(ConfigError, match=r"args: pools\[0\]\.merge_interval"):
        build_app({"pools": [{"name": "p", "model": "m", "merge_interval": 0}]})


def test_only_replicas_import_vllm_and_nobody_reports_usage() -> None:
    """In a process of its own: what importing the application loads and sets."""
    script = "import service.app, sys, os; print('vllm' in sys.modules, *map(os.environ.get, sys.argv[1:]))"
    names = ["RAY_USAGE_STATS_ENABLED", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"]
    environment = {name: value for name, value in os.environ.items() if name not in names}
    printed = subprocess.run(
        [sys.executable, "-c", script, *names], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == ["False", "0", "1", "1"]
