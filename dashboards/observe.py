"""See the boards without a Grafana server: the service, a real Prometheus, load, Grafana's own components."""

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dashboards.load import Load, put_load
from dashboards.processes import ObserveError, child, free_port, is_free, needed, wait_answers
from dashboards.show import board_height, build_page, load_boards, photograph, serving_page
from service.config import ConfigError, ServiceConfig, load_config
from service.launch import LaunchError, check

ROOT = Path(__file__).parents[1]
BOARDS = ROOT / "dashboards" / "generated"
RULES = BOARDS / "rules.yaml"
SCRAPE_CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
START_TIMEOUT_S = 240
PAGE_PORT = 3300


def command(config: Path, seconds: float, screenshots: Path | None) -> None:
    """`python -m dashboards observe`."""
    console = Console(soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        observe(config, seconds, screenshots, console)
    except (ObserveError, ConfigError, LaunchError) as error:
        stderr = Console(stderr=True, soft_wrap=True)
        stderr.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Stopped.")


def observe(path: Path, seconds: float, screenshots: Path | None, console: Console) -> None:
    """Run everything that the boards need, show them, and end what was started."""
    config = load_config(path)
    # Somebody else's service on these ports would be the one that is observed.
    check(config)
    # What is missing is said before minutes are spent.
    needed("prometheus", "prometheus")
    needed("node", "nodejs")
    if screenshots is not None:
        needed("chromium", "chromium")
    elif not is_free(PAGE_PORT):
        raise ObserveError(f"expected port {PAGE_PORT} for the page; it is taken; stop what uses it")
    with tempfile.TemporaryDirectory(prefix="deltalog-observe-") as scratch:
        folder = Path(scratch)
        console.print("Building the page (minutes the first time) ...")
        build_page()
        console.print("Starting the service ...")
        with (
            _service(path, config, folder),
            running_prometheus(folder, scraping(config)) as prometheus_url,
            serving_page(BOARDS, prometheus_url, None if screenshots else PAGE_PORT) as page_url,
        ):
            started_s = time.time()
            console.print(
                f"Boards: {page_url}/?board=deltalog-slo&from=now-5m   Prometheus: {prometheus_url}"
            )
            _report(_loaded(config, seconds, console), console)
            if screenshots is None:
                console.print("Ctrl-C stops it all. Without load, rates fall to nothing.")
                signal.pause()
            else:
                _photographs(page_url, screenshots, started_s, folder, console)


@contextmanager
def _service(path: Path, config: ServiceConfig, folder: Path) -> Iterator[None]:
    log = folder / "service.log"
    with child([sys.executable, "-m", "service", "serve", str(path)], log) as process:
        wait_answers(process, f"{config.url}/health/ready", log, START_TIMEOUT_S)
        yield


def scraping(config: ServiceConfig) -> dict[str, Any]:
    """The shipped scrape configuration and rules, pointed at this service."""
    if not SCRAPE_CONFIG.exists():
        raise ObserveError(f"expected {SCRAPE_CONFIG}; it is not there; restore it")
    shipped: dict[str, Any] = yaml.safe_load(SCRAPE_CONFIG.read_text())
    # No Alertmanager runs here.
    shipped.pop("alerting", None)
    shipped["rule_files"] = [str(RULES)] if RULES.exists() else []
    for job in shipped["scrape_configs"]:
        for discovery in [key for key in job if key.endswith("_sd_configs")]:
            del job[discovery]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{config.metrics_port}"]}]
    return shipped


@contextmanager
def running_prometheus(folder: Path, configuration: dict[str, Any]) -> Iterator[str]:
    """A Prometheus of its own with this configuration, ready to answer. Yields its URL."""
    path, log, port = folder / "prometheus.yml", folder / "prometheus.log", free_port()
    path.write_text(yaml.safe_dump(configuration))
    arguments = [
        needed("prometheus", "prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}"
    with child(arguments, log) as process:
        wait_answers(process, f"{url}/-/ready", log, 30)
        yield url


def _loaded(config: ServiceConfig, seconds: float, console: Console) -> Load:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("load", total=seconds)

        def told(load: Load, elapsed_s: float) -> None:
            text = f"load: {load.tokens:,} tokens in {len(load.tpots_s)} streams"
            progress.update(task, completed=elapsed_s, description=text)

        models = list(dict.fromkeys(pool.model_id for pool in config.pools))
        return asyncio.run(put_load(config.url, models, seconds, told))


def _report(load: Load, console: Console) -> None:
    if load.mean_tpot_s is None:
        raise ObserveError(f"expected streams to end; {load.failed} failed and none ended; raise --seconds")
    console.print(
        f"The client saw {load.tokens:,} tokens in {len(load.tpots_s)} streams, {load.failed} failed, "
        f"mean TPOT {load.mean_tpot_s * 1e3:.1f} ms; compare with the Log board's."
    )


def _photographs(url: str, folder: Path, started_s: float, scratch: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    span = f"from={started_s * 1000:.0f}&to={time.time() * 1000:.0f}"
    for board in load_boards(BOARDS):
        image = folder / f"{board['uid']}.png"
        photograph(f"{url}/?board={board['uid']}&{span}", board_height(board), image, scratch)
        console.print(f"{image}: {image.stat().st_size / 1024:.0f} KB")
