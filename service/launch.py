"""Start Ray and the service on this machine, and stop both again."""

import errno
import logging
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import ray
from ray import serve
from rich.console import Console

from service.app import build
from service.config import PoolConfig, ServiceConfig
from service.engine.protocol import EngineStartError

APP_NAME = "deltalog"
METRICS_PERIOD_S = 4
"""A scrape sees what was true this long ago at most. Ray's own default is 10 s. It exports increments, and
drops those that take longer than half the period to collect: at 1 s a busy machine loses some, silently."""


class LaunchError(Exception):
    """The service did not start. The message says why and what to do."""


def serve_until_signalled(config: ServiceConfig, console: Console) -> None:
    """Serve until SIGINT or SIGTERM. Raises LaunchError when the service does not come up."""
    started_at = time.monotonic()

    def step(text: str) -> None:
        console.print(f"{time.monotonic() - started_at:6.1f} s  {text}", highlight=False, soft_wrap=True)

    _check(config)
    _interrupt_on_sigterm()
    with ExitStack() as running:
        try:
            step("Starting Ray.")
            running.callback(ray.shutdown)
            step(f"Ray runs; it and vLLM log to {_start_ray(config)}.")
            _check_cpus(config)
            running.callback(serve.delete, APP_NAME)
            for pool in config.pools:
                step(f"Loading {pool.model_id} into pool {pool.name}.")
            with console.status("Loading the model"):
                _deploy(config)
            step(f"Ready at {config.url}/v1; metrics are on port {config.metrics_port}.")
            signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            # The stop takes seconds; no second signal may cut it short.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            step("Stopping.")
    step("Stopped.")


def _check(config: ServiceConfig) -> None:
    """Find out before anything starts what would not start."""
    # Ray's metrics agent listens on every interface.
    for setting, host, port in (
        ("port", config.host, config.port),
        ("metrics_port", "0.0.0.0", config.metrics_port),
    ):
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            socket.create_server(address, family=family).close()
        except OSError as error:
            in_use = f"stop what uses the port or set `{setting}` to another"
            raise LaunchError(
                f"{setting}: expected to listen on {host}, port {port}; got: {error.strerror}; "
                f"{in_use if error.errno == errno.EADDRINUSE else f'correct `host` or `{setting}`'}"
            ) from None
    for pool in config.pools:
        _check_model(pool)


def _check_model(pool: PoolConfig) -> None:
    # vLLM takes a directory that is not there for a name on a hub.
    if pool.model.startswith((".", "/")) and not Path(pool.model).is_dir():
        raise LaunchError(
            f"pool {pool.name!r}: model: expected a directory; got {pool.model!r}, which is none; "
            "correct the path or build the model"
        )


def _check_cpus(config: ServiceConfig) -> None:
    # Serve would wait for ever for CPUs that Ray does not have.
    needed = sum(pool.cpus_per_replica for pool in config.pools)
    available = int(ray.cluster_resources()["CPU"])
    if needed > available:
        raise LaunchError(
            f"pools: cpus_per_replica: expected to fit the {available} CPUs that Ray finds; got {needed}; "
            "lower it"
        )


def _start_ray(config: ServiceConfig) -> Path:
    """Start Ray and Serve's HTTP proxy. Returns the directory of their logs.

    The HTTP API listens on `config.host`. Ray's own ports listen on every interface, and Ray has no setting
    for that: its RPC, which asks for the cluster's token, and the metrics, which anyone may read.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    context = ray.init(
        address="local",
        include_dashboard=False,
        _metrics_export_port=config.metrics_port,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": METRICS_PERIOD_S * 1000},
    )
    # Ray has put a handler in the place of ours that ends the process without stopping anything.
    _interrupt_on_sigterm()
    serve.start(http_options={"host": config.host, "port": config.port})
    return Path(context.address_info["session_dir"]) / "logs"


def _deploy(config: ServiceConfig) -> None:
    try:
        serve.run(build(config), name=APP_NAME)
    except RuntimeError as error:
        deployments = serve.status().applications[APP_NAME].deployments.values()
        reasons = [deployment.message for deployment in deployments if deployment.message]
        # What the engine says of itself is what a person can act on; anything else comes with its traceback.
        reason = ("\n".join(reasons) or str(error)).rpartition(f"{EngineStartError.__name__}: ")[2]
        raise LaunchError(reason.strip()) from None


def _interrupt_on_sigterm() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
