"""`deltalog`: what this installation can do, and how fast its steps are."""

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from deltalog_kernels.bench import BenchError
from deltalog_kernels.bench import kernels as kernel_bench

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
bench = typer.Typer(no_args_is_help=True, help="Check, then time, then report.")
app.add_typer(bench, name="bench")


@app.command()
def doctor(
    model: Annotated[
        Path | None,
        typer.Argument(exists=True, file_okay=False, help="Also say what DeltaLog would do for this model."),
    ] = None,
    merge_interval: Annotated[str, typer.Option(help='M, or "auto".')] = "auto",
) -> None:
    """Say what is installed and whether vLLM would load the plugin. Exits 1 when it would not, or would
    refuse the model."""
    typer.echo(
        f"deltalog {version('deltalog')}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    try:
        from deltalog_kernels.vllm_plugin import seams, support
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
    typer.echo(f"plugin: ready for {', '.join(support.MODELS)}")
    if model is not None:
        _diagnose(model, int(merge_interval) if merge_interval.isdigit() else merge_interval)


def _diagnose(model: Path, merge_interval: int | str) -> None:
    from deltalog_kernels.bench.report import wide_console
    from deltalog_kernels.vllm_plugin import diagnosis, register

    # As vLLM does when it starts an engine, whether or not it finds the entry point.
    register()
    try:
        found = diagnosis.diagnose(model, merge_interval)
    except ValueError as refusal:
        typer.echo(f"problem: {refusal}")
        raise typer.Exit(1) from None
    diagnosis.show(found, merge_interval, wide_console())


@contextmanager
def _explained() -> Iterator[None]:
    """Exit with status 1 and the message of a BenchError, without a trace."""
    try:
        yield
    except BenchError as problem:
        typer.echo(f"problem: {problem}", err=True)
        raise typer.Exit(1) from None


@bench.command("kernels")
def bench_kernels(
    output: Annotated[
        Path | None, typer.Option(help="Write the numbers here as JSON, a sweep's curves beside it as PNG.")
    ] = None,
    commit: Annotated[str, typer.Option(help="What the JSON says was measured.")] = "unknown",
    sweep_m: Annotated[bool, typer.Option("--sweep-m", help="Vary the merge interval, 1 to 32.")] = False,
    sweep_state: Annotated[bool, typer.Option("--sweep-state", help="Vary heads and their size.")] = False,
    sweep_batch: Annotated[bool, typer.Option("--sweep-batch", help="Vary the batch, 1 to 1024.")] = False,
    counters: Annotated[
        bool, typer.Option("--counters", help="Compare DRAM bytes read by ncu with traffic.py.")
    ] = False,
) -> None:
    """Check and time the decode steps of this machine: on a GPU beside the published kernels.

    At most one of the sweeps and --counters a run; these and --output need a GPU.
    """
    picked = [sweep_m, sweep_state, sweep_batch, counters]
    if sum(picked) > 1:
        raise typer.BadParameter("expected one of the sweeps or --counters, got several; run them in turn")
    with _explained():
        if torch.cuda.is_available():
            _bench_on_gpu(picked, output, commit)
        elif any(picked) or output is not None:
            raise BenchError("expected a CUDA GPU, found none; without one leave these options out")
        else:
            kernel_bench.run()


def _bench_on_gpu(picked: list[bool], output: Path | None, commit: str) -> None:
    # Triton is not there without a GPU.
    from deltalog_kernels.bench import counters, report, sweeps

    sweep = next((sweep for sweep, here in zip(sweeps.Sweep, picked, strict=False) if here), None)
    if sweep is not None:
        sweeps.run(sweep, output, commit)
    elif any(picked):
        counters.run(output, commit)
    else:
        report.run(output, commit)


@bench.command("serving")
def bench_serving(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A model directory.")],
    batches: Annotated[str, typer.Option(help="Requests that decode side by side.")] = "1,8,64,256",
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 1024,
    steps: Annotated[int, typer.Option(min=16, help="Decode steps that count.")] = 64,
    pairs: Annotated[int, typer.Option(min=1, help="Engines of each kind, in turn.")] = 1,
    merge_interval: Annotated[str, typer.Option(help='M, or "auto".')] = "auto",
    spread: Annotated[int, typer.Option(min=0, help="Prompts are up to so much shorter.")] = 0,
    real_weights: Annotated[
        bool, typer.Option("--real-weights", help="Load the directory's weights; else random ones.")
    ] = False,
    profile: Annotated[bool, typer.Option(help="Also say where a step's GPU time goes.")] = True,
    engine_args: Annotated[
        str, typer.Option(help="Further vLLM engine arguments of both sides, by Python name, as JSON.")
    ] = "{}",
    output: Annotated[Path | None, typer.Option(help="Write the numbers here as JSON.")] = None,
    commit: Annotated[str, typer.Option(help="What the JSON says was measured.")] = "unknown",
) -> None:
    """Time decode through vLLM, stock and with DeltaLog, one engine after the other on this GPU."""
    from deltalog_kernels.bench import report, serving

    job = serving.Job(
        model=str(model),
        merge_interval=int(merge_interval) if merge_interval.isdigit() else merge_interval,
        batches=_counts(batches, "--batches"),
        prompt_tokens=prompt_tokens,
        steps=steps,
        spread=spread,
        real_weights=real_weights,
        profile=profile,
        engine_args=_json_object(engine_args, "--engine-args"),
    )
    console, runs = report.wide_console(), serving.nothing_measured(job)
    with _explained():
        try:
            serving.run(job, pairs, console, runs)
        finally:
            listed = serving.rows(runs)
            if output is not None and listed:
                serving.save(output, report.machine(commit) | {"vllm": version("vllm")}, job, listed)
            if listed:
                console.print(serving.table(listed))
            if cost := serving.cost(listed):
                console.print(f"cost: {json.dumps(cost)}", markup=False, highlight=False, soft_wrap=True)


def _counts(text: str, option: str) -> list[int]:
    """Raises typer.BadParameter for what is no list of numbers of requests."""
    counts = [int(part) for part in text.split(",") if part.isdecimal() and int(part)]
    if len(counts) != len(text.split(",")):
        raise typer.BadParameter(f"{option}: expected numbers of requests such as 1,64,256, got {text!r}")
    return counts


def _json_object(text: str, option: str) -> dict[str, Any]:
    """Raises typer.BadParameter for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: expected a JSON object, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{option}: expected a JSON object, got {text!r}")
    return value


def _measured(path: Path) -> dict[str, Any]:
    """Raises BenchError for what is no report."""
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        report, reason = None, str(error)
    else:
        reason = f"JSON with a {type(report).__name__} at the top"
    if not isinstance(report, dict):
        raise BenchError(f"{path}: expected what `deltalog bench kernels --output` wrote, got {reason}")
    return report


Measured = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="What `bench kernels --output` wrote.")
]


@bench.command("plot")
def bench_plot(measured: Measured) -> None:
    """Draw the curves of a sweep or of `bench serving` beside its JSON, as PNG."""
    from deltalog_kernels.bench import serving, sweeps

    with _explained():
        report = _measured(measured)
        draw = serving.draw if "job" in report else sweeps.draw
        draw(report, measured.with_suffix(".png"))


@bench.command("predict")
def bench_predict(measured: Measured) -> None:
    """Predict the steps of an RTX 4090 from a run on another GPU. Nothing is measured."""
    from deltalog_kernels.bench import predict, report

    with _explained():
        report.wide_console().print(predict.table(_measured(measured)))


if __name__ == "__main__":
    app()
