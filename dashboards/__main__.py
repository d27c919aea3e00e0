"""Command line of the boards: `python -m dashboards build|check`."""

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(soft_wrap=True)


@app.callback()
def _boards() -> None:
    """Grafana boards as code."""


@app.command()
def build() -> None:
    """Write the boards' JSON and docs/metrics.md."""
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


if __name__ == "__main__":
    app()
