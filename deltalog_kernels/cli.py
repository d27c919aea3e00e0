"""`deltalog`: what this installation can do, and how fast its steps are."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer

from deltalog_kernels.bench import kernels as kernel_bench

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
bench = typer.Typer(no_args_is_help=True, help="Check, then time, then report.")
app.add_typer(bench, name="bench")


@app.command()
def doctor() -> None:
    """Say what is installed and whether vLLM would load the plugin. Exits 1 when it would not."""
    typer.echo(
        f"deltalog {version('deltalog')}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    try:
        from deltalog_kernels.vllm_plugin import seams
    except ModuleNotFoundError as missing:
        if missing.name != "vllm":
            raise
        typer.echo("problem: expected vLLM, got none; install it, or use deltalog_kernels alone")
        raise typer.Exit(1) from None
    typer.echo(seams.describe())
    problems = seams.problems()
    for problem in problems:
        typer.echo(f"problem: {problem}")
    if problems:
        raise typer.Exit(1)
    typer.echo(f"plugin: ready for {', '.join(seams.MODELS)}")


@bench.command("kernels")
def bench_kernels(
    output: Annotated[Path | None, typer.Option(help="Write the numbers here as JSON (GPU only).")] = None,
    commit: Annotated[str, typer.Option(help="What the JSON says was measured.")] = "unknown",
) -> None:
    """Check and time the decode steps of this machine: on a GPU beside the published kernels."""
    if torch.cuda.is_available():
        from deltalog_kernels.bench import gpu

        gpu.run(output, commit)
    else:
        kernel_bench.run()


if __name__ == "__main__":
    app()
