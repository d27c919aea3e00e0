"""Command line of the service: `python -m service serve|demo|validate|schema|key|simulate`."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from service import shield
from service.config import ConfigError, ServiceConfig, load_config, parse, read_yaml
from service.keys import new_key, yaml_entry
from service.launch import LaunchError, check_engines, check_files, serve_until_signalled

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console()

ConfigPath = Annotated[Path, typer.Argument(help="YAML file with a ServiceConfig (service/config.py).")]


@contextmanager
def _explained() -> Iterator[None]:
    """What a person can act on is printed without a traceback and ends with exit code 1."""
    try:
        yield
    except (ConfigError, LaunchError) as error:
        Console(stderr=True).print(
            f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from None


@app.command("serve")
def serve_command(config: ConfigPath) -> None:
    """Start Ray and the service on this machine and serve until interrupted."""
    raise typer.Exit(shield.run([sys.executable, "-m", "service", "serve-here", str(config)]))


@app.command("serve-here", hidden=True)
def serve_here(config: ConfigPath) -> None:
    """What `serve` runs behind its shield."""
    with _explained():
        serve_until_signalled(config, console)


@app.command()
def demo(config: ConfigPath = Path("deploy/serve/cpu-demo.yaml")) -> None:
    """Start the service, send it requests with the openai client, print what was counted, stop it."""
    # Only this command needs the openai client.
    from service.demo import run_demo

    with _explained():
        run_demo(config, console)


@app.command()
def validate(config: ConfigPath) -> None:
    """Check a configuration, vLLM's engine arguments included, without starting anything."""
    with _explained():
        checked = load_config(config)
        check_files(checked)
        check_engines(checked, thoroughly=True)
        console.print(f"{config} is valid.")


@app.command()
def schema() -> None:
    """Print the JSON schema of a configuration, for editors that check YAML by one."""
    print(json.dumps(ServiceConfig.model_json_schema(), indent=2))


@app.command()
def key(name: Annotated[str, typer.Argument(help="Whose key it is.")]) -> None:
    """Make an API key: print it once, and its entry for `keys_file`, which has only its hash."""
    with _explained():
        made, sha256 = new_key()
        text = f"Key, shown only now: {made}\n\nkeys:  # once in the file\n{yaml_entry(name, sha256)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True, end="")


@app.command()
def simulate(
    scenario: Annotated[
        Path, typer.Argument(help="YAML file with a Scenario (service/sim/scenario.py).")
    ] = Path("deploy/sim/day.yaml"),
    output: Annotated[Path | None, typer.Option(help="Write the numbers here as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them here, as PNG.")] = None,
) -> None:
    """Simulate pools, routers and autoscalers under each policy of a scenario. No engine runs."""
    from rich.progress import track

    from service.sim import report as reports
    from service.sim.scenario import Scenario
    from service.sim.world import World

    with _explained():
        told = parse(Scenario, read_yaml(scenario), str(scenario))
        rows = [
            reports.Row.of(policy, told, World(told, policy).run())
            for policy in track(told.policies, "simulating", console=console)
        ]
        report = reports.Report(scenario=told, rows=rows)
        # Where there is no terminal, a width that the table fits into.
        (console if console.is_terminal else Console(width=160)).print(reports.table(report))
        if output is not None:
            output.write_text(report.model_dump_json(indent=1) + "\n")
        if plot is not None:
            reports.plot(report, plot)


if __name__ == "__main__":
    app()
