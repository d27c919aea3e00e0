"""Command line of the boards: `python -m dashboards build|check|push|observe`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dashboards.push import command as push_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(soft_wrap=True)


@app.callback()
def _boards() -> None:
    """Grafana boards as code."""


@app.command()
def build() -> None:
    """Write the boards, the rules and the pages in docs/."""
    from dashboards.generate import write

    for path in write():
        console.print(f"changed {path}", markup=False)


@app.command()
def check() -> None:
    """Name generated files that are stale and boards that break a rule; end with 1 if there are any."""
    from dashboards.boards import boards
    from dashboards.generate import stale
    from dashboards.lint import lint

    findings = [f"{path} is stale: run python -m dashboards build" for path in stale()]
    findings += [finding for board in boards().values() for finding in lint(board)]
    for finding in findings:
        console.print(finding, markup=False, highlight=False)
    if findings:
        raise typer.Exit(1)


app.command("push")(push_command)


@app.command()
def observe(
    config: Annotated[Path, typer.Argument(help="YAML file of the service to observe.")] = Path(
        "deploy/serve/cpu-observe.yaml"
    ),
    seconds: Annotated[float, typer.Option(min=20, help="How long to put load on it.")] = 120,
    screenshots: Annotated[
        Path | None, typer.Option(help="Write a PNG of each board into this folder, and end.")
    ] = None,
) -> None:
    """Serve the demo, scrape it, load it, and show the boards in a local page until Ctrl-C."""
    from dashboards.observe import command

    command(config, seconds, screenshots)


if __name__ == "__main__":
    try:
        app()
    except ModuleNotFoundError as missing:
        sys.exit(
            f"expected the environment of `make setup`, got one without {missing.name}; "
            "use .venv/bin/python -m dashboards (only push runs in Grafana's)"
        )
